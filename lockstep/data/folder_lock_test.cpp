#include "lockstep/data/folder_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/other_process.h"
#include "tests/support/pipe.h"

namespace lockstep {
namespace folder_lock_test {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

bool never() {
  return false;
}

TEST(FolderLock, OneAtATimeAndTheFileGoes) {
  const TemporaryDirectory folder;
  std::atomic<int> inside{0};
  std::atomic<int> turns{0};
  const auto work = [&] {
    for (int i = 0; i < 20; ++i) {
      const auto lock = FolderLock::acquire(folder.path(), never, {.timeout = 60s});
      EXPECT_EQ(++inside, 1);
      std::this_thread::yield();
      --inside;
      ++turns;
    }
  };
  {
    const std::jthread a(work);
    const std::jthread b(work);
    const std::jthread c(work);
  }
  EXPECT_EQ(turns, 60);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(FolderLock, WaitersGoOnWhenTheFolderIsFilled) {
  const TemporaryDirectory folder;
  std::atomic<bool> filled{false};
  const auto holder = FolderLock::acquire(folder.path(), never, {});
  std::jthread waiter([&] {
    EXPECT_EQ(FolderLock::acquire(folder.path(), [&] { return filled.load(); }, {.timeout = 60s}),
              nullptr);
  });
  filled = true;
}

TEST(FolderLock, TimeOutNamesTheFolder) {
  const TemporaryDirectory folder;
  const auto holder = FolderLock::acquire(folder.path(), never, {});
  try {
    FolderLock::acquire(folder.path(), never, {.timeout = 100ms});
    FAIL() << "no time-out";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("waited 100ms"));
    EXPECT_THAT(error.what(), testing::HasSubstr(folder.path().string()));
  }
}

TEST(FolderLock, PatienceLeavesTheWorkToOthers) {
  const TemporaryDirectory folder;
  const auto start = std::chrono::steady_clock::now();
  const auto lock = FolderLock::acquire(folder.path(), never, {.timeout = 60s, .patience = 300ms});
  EXPECT_NE(lock, nullptr);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 300ms);
}

TEST(FolderLock, AFolderThatWasRemovedIsMadeAgainOncePatienceEnds) {
  const TemporaryDirectory folder;
  const auto inner = folder.path() / "inner";
  const auto lock = FolderLock::acquire(inner, never, {.timeout = 60s, .patience = 100ms});
  EXPECT_NE(lock, nullptr);
  EXPECT_TRUE(fs::is_directory(inner));
}

TEST(FolderLock, DeadOwnersLeaveNoLock) {
  const TemporaryDirectory folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lock = FolderLock::acquire(folder.path(), never, {});
    const char byte = 1;
    [[maybe_unused]] const ssize_t written = ::write(ready[1], &byte, 1);
    ::pause();
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_FALSE(fs::is_empty(folder.path())) << "the dead process's file is there";
  EXPECT_NE(FolderLock::acquire(folder.path(), never, {.timeout = 60s}), nullptr);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(FolderLock, EndsWithItsOwnerAlsoWhereAForkedChildLives) {
  const TemporaryDirectory folder;
  test_process::Pipe child_lives, test_lives;
  test_process::OtherProcess other([&](const auto& ready) {
    const auto lock = FolderLock::acquire(folder.path(), never, {});
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
  EXPECT_NE(FolderLock::acquire(folder.path(), never, {.timeout = 60s}), nullptr);
}

TEST(FolderLock, AForkedChildDoesNotGiveItAway) {
  const TemporaryDirectory folder;
  auto lock = FolderLock::acquire(folder.path(), never, {});
  const pid_t child = ::fork();
  if (child == 0) {
    lock.reset();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(fs::is_empty(folder.path()));
}

TEST(FolderLock, UnwritableFolder) {
  EXPECT_THROW(FolderLock::acquire("/proc/self", never, {}), SystemError);
}

}  // namespace folder_lock_test
}  // namespace lockstep
