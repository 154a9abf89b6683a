#include "lockstep/comm/rendezvous/rendezvous.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"

namespace lockstep {
namespace mpirun_meeting_test {

using std::chrono::milliseconds;

Rendezvous plan_of(int rank, const TemporaryDirectory& folder) {
  Rendezvous plan;
  plan.kind = Rendezvous::Kind::tcp;
  JobEnvironment& job = plan.job;
  job.launcher = "openmpi";
  job.rank = rank;
  job.world_size = 3;
  job.single_host = true;
  job.master_unknown = true;
  job.master_addr = "127.0.0.1";
  job.master_port = 15001;
  job.meeting_file = (folder.path() / "lockstep-store.7").string();
  return plan;
}

TEST(MpirunMeeting, Rank0TellsTheOthersOfItsHostWhereItListens) {
  const TemporaryDirectory folder;
  Rendezvous first = plan_of(0, folder), second = plan_of(1, folder);
  std::thread other([&] { find_master(second, milliseconds(20'000)); });
  find_master(first, milliseconds(20'000));
  other.join();
  const UniqueFd socket(first.listen_fd);
  EXPECT_TRUE(socket);
  EXPECT_EQ(second.listen_fd, -1);
  EXPECT_EQ(first.job.master_port, bound_port(socket.get()));
  EXPECT_EQ(second.job.master_port, first.job.master_port);
  EXPECT_EQ(second.job.master_addr, "127.0.0.1");
}

TEST(MpirunMeeting, WhatWasToldIsTakenBackByRank0) {
  const TemporaryDirectory folder;
  Rendezvous first = plan_of(0, folder);
  find_master(first, milliseconds(1000));
  const UniqueFd socket(first.listen_fd);
  forget_meeting(plan_of(1, folder).job);
  EXPECT_TRUE(std::filesystem::exists(first.job.meeting_file));
  forget_meeting(first.job);
  EXPECT_FALSE(std::filesystem::exists(first.job.meeting_file));
}

TEST(MpirunMeeting, ARank0ThatDoesNotComeIsATimeOut) {
  const TemporaryDirectory folder;
  Rendezvous plan = plan_of(2, folder);
  EXPECT_THROW(find_master(plan, milliseconds(50)), TimeoutError);
}

}  // namespace mpirun_meeting_test
}  // namespace lockstep
