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

TEST_F(LockedFolder, WhatAnotherOwnerLeftIsTakenOver) {
  for (
      const std::string left :
      {R"({"host": "node7", "process": 4711, "program": "lockstep", "since": "", "identity": "b"})",
       "", "no JSON", R"({"host": 7})"}) {
    write_file_atomically(file_, left);
    testing::internal::CaptureStderr();
    const auto lock = acquire();
    const bool warned = !testing::internal::GetCapturedStderr().empty();
    EXPECT_EQ(warned, left.find("node7") != left.npos) << left;
    EXPECT_EQ(nlohmann::json::parse(read_file(file_))["process"], ::getpid()) << left;
  }
}

}  // namespace checkpoint_lock_test
}  // namespace lockstep
