#include "lockstep/comm/rendezvous/mpirun_meeting.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"

namespace lockstep {
namespace mpirun_meeting_test {

using std::chrono::milliseconds;

JobEnvironment job_of(int rank, const TemporaryDirectory& folder) {
  JobEnvironment job;
  job.launcher = "openmpi";
  job.rank = rank;
  job.world_size = 3;
  job.single_host = true;
  job.master_unknown = true;
  job.master_addr = "127.0.0.1";
  job.master_port = 15001;
  job.meeting_file = (folder.path() / "lockstep-store.7").string();
  return job;
}

TEST(MpirunMeeting, Rank0TellsTheOthersOfItsHostWhereItListens) {
  const TemporaryDirectory folder;
  JobEnvironment first = job_of(0, folder), second = job_of(1, folder);
  UniqueFd none;
  std::thread other([&] { none = meet_under_mpirun(second, milliseconds(20'000)); });
  const UniqueFd socket = meet_under_mpirun(first, milliseconds(20'000));
  other.join();
  EXPECT_TRUE(socket);
  EXPECT_FALSE(none);
  EXPECT_EQ(first.master_port, bound_port(socket.get()));
  EXPECT_EQ(second.master_port, first.master_port);
  EXPECT_EQ(second.master_addr, "127.0.0.1");
}

TEST(MpirunMeeting, WhatWasToldIsTakenBackByRank0) {
  const TemporaryDirectory folder;
  JobEnvironment first = job_of(0, folder);
  const UniqueFd socket = meet_under_mpirun(first, milliseconds(1000));
  forget_meeting(job_of(1, folder));
  EXPECT_TRUE(std::filesystem::exists(first.meeting_file));
  forget_meeting(first);
  EXPECT_FALSE(std::filesystem::exists(first.meeting_file));
}

TEST(MpirunMeeting, ARank0ThatDoesNotComeIsATimeOut) {
  const TemporaryDirectory folder;
  JobEnvironment job = job_of(2, folder);
  EXPECT_THROW(meet_under_mpirun(job, milliseconds(50)), TimeoutError);
}

}  // namespace mpirun_meeting_test
}  // namespace lockstep
