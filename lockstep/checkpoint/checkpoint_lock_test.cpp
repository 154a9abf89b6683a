#include "lockstep/checkpoint/checkpoint_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "lockstep/base/process_identity.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "tests/support/other_process.h"
#include "tests/support/pipe.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace checkpoint_lock_test {

using test_process::OtherProcess;
using test_process::Pipe;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;
using namespace std::chrono_literals;

class LockedFolder : public testing::Test {
 protected:
  std::unique_ptr<CheckpointLock> acquire(std::chrono::milliseconds patience = 0ms) {
    return CheckpointLock::acquire(folder_.path(), patience);
  }
  /// What a process that was killed leaves.
  void leave_file_of(const LockOwner& owner) {
    const nlohmann::json object = {{"host", owner.host},
                                   {"process", owner.process},
                                   {"program", owner.program},
                                   {"since", owner.since},
                                   {"identity", owner.identity}};
    write_file_atomically(file_, object.dump());
  }
  TemporaryDirectory folder_;
  fs::path file_ = folder_.path() / ".in-use";
};

TEST_F(LockedFolder, SaysWhoseItIsAndIsFreeAfterwards) {
  {
    const auto lock = acquire();
    const auto owner = nlohmann::json::parse(read_file(file_));
    EXPECT_EQ(owner["process"], ::getpid());
    EXPECT_EQ(owner["program"], program_invocation_short_name);
    EXPECT_EQ(owner["identity"], process_identity());
    EXPECT_FALSE(owner["host"].get<std::string>().empty());
    EXPECT_THAT(owner["since"].get<std::string>(),
                testing::MatchesRegex("2[0-9-]+ [0-9]+:[0-9]+:[0-9]+ UTC"));
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(LockedFolder, SaysWhyItsFileCannotBeOpened) {
  std::filesystem::create_symlink("nowhere", file_);
  try {
    CheckpointLock::acquire(folder_.path());
    ADD_FAILURE();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.errno_value(), ELOOP) << error.what();
  }
}

TEST_F(LockedFolder, OfThisProcessIsNoObstacle) {
  const auto lock = acquire();
  EXPECT_EQ(acquire(), nullptr);
  EXPECT_TRUE(fs::exists(file_));
}

TEST_F(LockedFolder, OfAnotherProcessIsRefusedUntilItIsKilled) {
  OtherProcess other([&](const auto& ready) {
    const auto lock = acquire();
    ready();
  });
  const std::string content = read_file(file_);
  EXPECT_THAT([&] { acquire(); },
              ThrowsMessage<FolderInUseError>(
                  AllOf(HasSubstr("folder " + folder_.path().string() + " is in use"),
                        HasSubstr("process " + std::to_string(other.process()) + " (" +
                                  program_invocation_short_name + ") of this host writes"),
                        HasSubstr(" UTC"), HasSubstr("wait until it has ended"))));
  EXPECT_EQ(read_file(file_), content);
  other.kill();
  EXPECT_TRUE(fs::exists(file_)) << "a killed process removes nothing";
  EXPECT_NE(acquire(), nullptr);
}

TEST_F(LockedFolder, IsWaitedForAsLongAsAKilledProcessTakesToEnd) {
  OtherProcess other([&](const auto& ready) {
    const auto lock = acquire();
    ready();
  });
  ::kill(other.process(), SIGKILL);  // and goes on at once
  EXPECT_NE(acquire(30s), nullptr);
}

TEST_F(LockedFolder, AForkedChildDoesNotGiveItAway) {
  const auto lock = acquire();
  const pid_t child = ::fork();
  if (child == 0) {
    lock->~CheckpointLock();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(fs::exists(file_));
}

TEST_F(LockedFolder, EndsWithItsOwnerAlsoWhereAForkedChildLives) {
  Pipe child_lives;
  Pipe test_lives;
  OtherProcess other([&](const auto& ready) {
    const auto lock = acquire();
    if (::fork() == 0) {
      test_lives.write.reset();
      child_lives.tell("x");
      test_lives.wait();
      ::_exit(0);
    }
    ready();
  });
  ASSERT_TRUE(child_lives.wait());
  other.kill();
  EXPECT_NE(acquire(), nullptr);
}

TEST_F(LockedFolder, TheFileOfAnotherOwnerIsNotRemoved) {
  auto lock = acquire();
  fs::remove(file_);
  EXPECT_FALSE(lock->is_in_place());
  write_file_atomically(file_, "of somebody else");
  lock.reset();
  EXPECT_TRUE(fs::exists(file_));
}

TEST_F(LockedFolder, WhatAnotherHostLeftIsTakenOverWhereItsLockWouldBeSeen) {
  leave_file_of(
      {"node7", 4711, std::string(500, 'p'), "2026-01-02 03:04:05 UTC", "boot,pid:[1] 4711 99"});
  const auto lock = CheckpointLock::acquire(folder_.path(), 0ms, LockReach::all_hosts);
  EXPECT_EQ(nlohmann::json::parse(read_file(file_))["process"], ::getpid());
}

TEST_F(LockedFolder, WhatAnotherHostLeftIsBelievedWhereItsLockWouldNotBeSeen) {
  leave_file_of({"node7", 4711, "lockstep", "2026-01-02 03:04:05 UTC", "boot,pid:[1] 4711 99"});
  const std::string content = read_file(file_);
  EXPECT_THAT([&] { CheckpointLock::acquire(folder_.path(), 0ms, LockReach::this_host); },
              ThrowsMessage<FolderInUseError>(
                  AllOf(HasSubstr("process 4711 (lockstep) of host node7 writes checkpoints there "
                                  "since 2026-01-02 03:04:05 UTC"),
                        HasSubstr("If that process has ended, remove " + file_.string()))));
  EXPECT_EQ(read_file(file_), content);
}

class MayBeAtWork : public testing::Test {
 protected:
  LockOwner self_ = this_process();
  LockOwner elsewhere_{"node7", 4711, "lockstep", "", "another-boot,pid:[1] 4711 99"};
  LockOwner booted_anew_{self_.host, 4711, "lockstep", "", "another-boot,pid:[1] 4711 99"};
};

TEST_F(MayBeAtWork, NobodyWhereTheKernelWouldHaveRefused) {
  for (const LockOwner& owner : {self_, elsewhere_, booted_anew_}) {
    EXPECT_FALSE(may_be_at_work(owner, self_, LockReach::all_hosts));
  }
  EXPECT_FALSE(may_be_at_work(self_, self_, LockReach::this_host));
}

TEST_F(MayBeAtWork, AnotherHostWhereLocksDoNotReachIt) {
  EXPECT_TRUE(may_be_at_work(elsewhere_, self_, LockReach::this_host));
  EXPECT_TRUE(may_be_at_work(elsewhere_, self_, LockReach::none));
  EXPECT_FALSE(may_be_at_work(booted_anew_, self_, LockReach::this_host));
}

TEST_F(MayBeAtWork, WithoutLocksAProcessThatIsThere) {
  EXPECT_TRUE(may_be_at_work(self_, self_, LockReach::none));
  LockOwner ended = self_;
  OtherProcess other([](const auto& ready) { ready(); });
  ended.identity = process_identity();
  const size_t number = ended.identity.find(' ') + 1;
  ended.identity.replace(number, ended.identity.find(' ', number) - number,
                         std::to_string(other.process()));
  EXPECT_FALSE(may_be_at_work(ended, self_, LockReach::none)) << "started at another time";
}

TEST(LocksReachAllHosts, BySystemAndItsOptions) {
  EXPECT_TRUE(locks_reach_all_hosts("ext4", "rw"));
  EXPECT_TRUE(locks_reach_all_hosts("overlay", "rw"));
  EXPECT_TRUE(locks_reach_all_hosts("nfs4", "rw,vers=4.2,local_lock=none,addr=10.0.0.1"));
  EXPECT_FALSE(locks_reach_all_hosts("nfs", "rw,vers=3,nolock,local_lock=all"));
  EXPECT_FALSE(locks_reach_all_hosts("nfs", "rw,local_lock=flock"));
  EXPECT_TRUE(locks_reach_all_hosts("lustre", "rw,flock,lazystatfs"));
  EXPECT_FALSE(locks_reach_all_hosts("lustre", "rw,localflock"));
  EXPECT_TRUE(locks_reach_all_hosts("ceph", "rw"));
  EXPECT_FALSE(locks_reach_all_hosts("fuse.sshfs", "rw"));
  EXPECT_FALSE(locks_reach_all_hosts("beegfs", "rw"));
}

}  // namespace checkpoint_lock_test
}  // namespace lockstep
