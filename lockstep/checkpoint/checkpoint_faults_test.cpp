// Saves that are killed at any byte and between any two calls, and whose calls fail or come short.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <random>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace checkpoint_faults_test {
namespace {

/// What befalls the calls that change files.
struct Fault {
  enum class Kind {
    none,
    kill_at_byte,  ///< SIGKILL when so many bytes are written.
    kill_at_call,  ///< SIGKILL before the call of this number.
    fail_once,     ///< EIO of the call of this number.
    fail_from,     ///< EIO of it and of all that follow.
    short_writes,  ///< At most so many bytes in a call.
  };
  Kind kind = Kind::none;
  int64_t number = 0;
};
thread_local Fault fault;  ///< Of this thread.
Fault everywhere;          ///< Of all others.

/// Each fsync waits for its end.
std::atomic<bool> held_up = false;

Fault& current() {
  return fault.kind == Fault::Kind::none ? everywhere : fault;
}

/// Whether the call fails instead of being made.
bool strikes() {
  using Kind = Fault::Kind;
  Fault& met = current();
  if (met.kind == Kind::kill_at_call && met.number-- == 0) ::kill(::getpid(), SIGKILL);
  const bool once = met.kind == Kind::fail_once && met.number-- == 0;
  const bool on = met.kind == Kind::fail_from && met.number-- <= 0;
  if (once || on) errno = EIO;
  return once || on;
}

/// How many of the bytes are written before this process ends or the call returns.
size_t allowed(size_t size) {
  Fault& met = current();
  const auto most = static_cast<size_t>(met.number);
  if (met.kind == Fault::Kind::short_writes) return std::min(size, most);
  if (met.kind != Fault::Kind::kill_at_byte) return size;
  met.number -= static_cast<int64_t>(std::min(size, most));
  return std::min(size, most);
}

}  // namespace
}  // namespace checkpoint_faults_test
}  // namespace lockstep

// In place of libc's, for this program and the libraries that it loads.
#define IN_PLACE_OF_LIBC extern "C" __attribute__((visibility("default")))
namespace faults = lockstep::checkpoint_faults_test;

IN_PLACE_OF_LIBC ssize_t write(int fd, const void* data, size_t size) {
  if (faults::strikes()) return -1;
  const size_t part = faults::allowed(size);
  const ssize_t written = ::syscall(SYS_write, fd, data, part);
  if (part < size && faults::current().kind == faults::Fault::Kind::kill_at_byte)
    ::kill(::getpid(), SIGKILL);
  return written;
}
IN_PLACE_OF_LIBC int fsync(int) {
  if (faults::held_up.load()) faults::held_up.wait(true);
  // What lies in memory only outlives a process: a sweep of thousands need not wait for the disk.
  return faults::strikes() ? -1 : 0;
}
IN_PLACE_OF_LIBC int rename(const char* from, const char* to) noexcept {
  return faults::strikes()
             ? -1
             : static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
IN_PLACE_OF_LIBC int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                               unsigned flags) noexcept {
  return faults::strikes()
             ? -1
             : static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}
IN_PLACE_OF_LIBC int symlink(const char* target, const char* link) noexcept {
  return faults::strikes() ? -1
                           : static_cast<int>(::syscall(SYS_symlinkat, target, AT_FDCWD, link));
}
IN_PLACE_OF_LIBC int mkdir(const char* path, mode_t mode) noexcept {
  return faults::strikes() ? -1 : static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

namespace lockstep {
namespace checkpoint_faults_test {

using Kind = Fault::Kind;

Checkpoint checkpoint_of(int64_t step, int64_t elements = 3) {
  Checkpoint checkpoint;
  checkpoint.info.step = step;
  checkpoint.model = {{"w", at::full({elements}, static_cast<double>(step))}};
  checkpoint.state = {{"optimizer.step.0", at::full({1}, step)}};
  return checkpoint;
}

class CheckpointFaults : public ::testing::Test {
 protected:
  enum class Outcome { saved, refused, killed };

  CheckpointFaults() { CheckpointFolder(first_).write(checkpoint_of(1)); }

  /// Saves a second checkpoint in a process of its own, beside a copy of the first.
  Outcome save(Fault met, int64_t step = 2, int64_t keep = 0) {
    fs::remove_all(folder_);
    fs::copy(first_, folder_, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    const Checkpoint checkpoint = checkpoint_of(step, elements_);
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 0;
      try {
        everywhere = met;
        CheckpointFolder(folder_, keep).write(checkpoint);
      } catch (const CheckpointError&) {
        code = 1;
      } catch (...) {
        code = 2;
      }
      ::_exit(code);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
      EXPECT_EQ(WTERMSIG(status), SIGKILL);
      return Outcome::killed;
    }
    EXPECT_LT(WEXITSTATUS(status), 2) << "an error of another kind";
    return WEXITSTATUS(status) == 0 ? Outcome::saved : Outcome::refused;
  }

  /// The newest is the first or the second, and whole. Gives its step.
  int64_t newest() const {
    const auto found = CheckpointFolder(folder_).read_newest();
    EXPECT_TRUE(found);
    if (!found) return 0;
    const int64_t step = found->second.info.step;
    const at::Tensor& model = found->second.model.at(0).second;
    EXPECT_TRUE(at::equal(model, at::full_like(model, static_cast<double>(step))));
    EXPECT_EQ(found->second.state.at(0).second.item<int64_t>(), step);
    return step;
  }

  /// Temporary files and folders in it.
  std::vector<std::string> left_behind() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      const std::string name = entry.path().filename().string();
      if (name.find("tmp") != std::string::npos) names.push_back(name);
    }
    return names;
  }

  int64_t elements_ = 3;  ///< Of the second one's model.
  TemporaryDirectory temporary_;
  fs::path first_ = temporary_.path() / "first";
  fs::path folder_ = temporary_.path() / "folder";
};

TEST_F(CheckpointFaults, KilledAtAnyByteThePreviousOneLoads) {
  // A save takes some milliseconds: the long form tries each byte, the short one draws one of ten.
  std::mt19937_64 draw{std::random_device{}()};
  int64_t byte = 0;
  while (save({Kind::kill_at_byte, byte}) == Outcome::killed) {
    ASSERT_EQ(newest(), 1) << "killed at byte " << byte;
    CheckpointFolder(folder_).prepare();
    ASSERT_THAT(left_behind(), ::testing::IsEmpty()) << "killed at byte " << byte;
    byte += env_flag("LOCKSTEP_LONG_TESTS") ? 1 : 1 + static_cast<int64_t>(draw() % 19);
  }
  EXPECT_GT(byte, 1000);
  EXPECT_EQ(newest(), 2);
}

TEST_F(CheckpointFaults, KilledBetweenAnyTwoCallsTheNewestIsWhole) {
  // Of a new step; and of the same one, as after a resume, whose folder is exchanged.
  for (const int64_t step : {2, 1}) {
    int64_t call = 0;
    int64_t before = 1;
    for (; save({Kind::kill_at_call, call}, step, 1) == Outcome::killed; ++call) {
      const int64_t found = newest();
      ASSERT_GE(found, before) << "killed at call " << call << ": a checkpoint is lost again";
      before = found;
      CheckpointFolder(folder_).prepare();
      ASSERT_EQ(newest(), found);
    }
    EXPECT_GT(call, 12);
    EXPECT_EQ(newest(), step);
  }
}

/// A new one that is whole may stay, too, where its folder's name could not be flushed.
TEST_F(CheckpointFaults, ACallThatFailsLeavesThePreviousOneAndNothingElse) {
  for (int64_t call = 0;; ++call) {
    const Outcome outcome = save({Kind::fail_once, call});
    ASSERT_NE(outcome, Outcome::killed);
    const int64_t found = newest();
    ASSERT_TRUE(found == 2 || (found == 1 && outcome != Outcome::saved)) << "call " << call;
    ASSERT_THAT(left_behind(), ::testing::IsEmpty()) << "call " << call;
    if (outcome == Outcome::saved && call > 100) break;
  }
}

TEST_F(CheckpointFaults, ADiskThatFailsForGoodLeavesThePreviousOne) {
  int64_t call = 0;
  for (; save({Kind::fail_from, call}) == Outcome::refused; ++call) {
    ASSERT_GE(newest(), 1) << "call " << call;
  }
  EXPECT_GT(call, 12);
  EXPECT_EQ(newest(), 2);
}

TEST_F(CheckpointFaults, ShortWritesAreWrittenToTheirEnd) {
  for (const int64_t most : {1, 7, 100}) {
    EXPECT_EQ(save({Kind::short_writes, most}), Outcome::saved);
    EXPECT_EQ(newest(), 2);
  }
}

/// One of several blocks, which a thread of the writer writes.
TEST_F(CheckpointFaults, ALargeOneIsAsSafe) {
  elements_ = (int64_t{17} << 20) / 4;
  for (const int64_t byte : {int64_t{1}, int64_t{1} << 20, int64_t{9} << 20, int64_t{16} << 20}) {
    ASSERT_EQ(save({Kind::kill_at_byte, byte}), Outcome::killed);
    ASSERT_EQ(newest(), 1) << "killed at byte " << byte;
  }
  const bool all = env_flag("LOCKSTEP_LONG_TESTS");
  const auto drawn = static_cast<int64_t>(std::random_device{}());
  for (const Kind kind : {Kind::kill_at_call, Kind::fail_once}) {
    for (int64_t call = 0; call < 25; ++call) {
      // The short form strikes each call in one of the two ways.
      if (!all && (drawn + call) % 2 != static_cast<int64_t>(kind == Kind::fail_once)) continue;
      const Outcome outcome = save({kind, call});
      const int64_t found = newest();
      ASSERT_TRUE(found == 2 || (found == 1 && outcome != Outcome::saved)) << "call " << call;
      if (kind == Kind::fail_once) {
        ASSERT_THAT(left_behind(), ::testing::IsEmpty());
      }
    }
  }
  // Pieces that no disk takes past the cache.
  EXPECT_EQ(save({Kind::short_writes, (1 << 20) + 1}), Outcome::saved);
  EXPECT_EQ(newest(), 2);
}

TEST_F(CheckpointFaults, ASaveThatOvertakesTheDiskWaitsOrIsLeftOut) {
  const auto shards_at = [](int64_t step) {
    CheckpointShards shards;
    shards.info.step = step;
    shards.model = whole_shards({{"w", at::full({3}, 1.0)}});
    return shards;
  };
  test::run_group(2, [&](const ProcessGroup& group) {
    CheckpointWriter writer(group, CheckpointFolder(folder_));
    if (group.rank() == 0) held_up = true;
    group.barrier();
    EXPECT_TRUE(writer.save(shards_at(1), CheckpointOverlap::skip));
    EXPECT_FALSE(writer.save(shards_at(2), CheckpointOverlap::skip));
    group.barrier();
    std::thread release;
    if (group.rank() == 0) {
      release = std::thread([] {
        held_up = false;
        held_up.notify_all();
      });
    }
    EXPECT_TRUE(writer.save(shards_at(3), CheckpointOverlap::wait)) << "when 1 is on the disk";
    EXPECT_EQ(fs::exists(folder_ / checkpoint_name(1)), true);
    if (release.joinable()) release.join();
    writer.finish();
    EXPECT_TRUE(writer.save(shards_at(4), CheckpointOverlap::skip)) << "nothing is being written";
    writer.finish();
  });
  std::vector<std::string> saved;
  for (const fs::path& path : CheckpointFolder(folder_).list()) saved.push_back(path.filename());
  EXPECT_THAT(saved,
              ::testing::ElementsAre(checkpoint_name(4), checkpoint_name(3), checkpoint_name(1)));
}

TEST_F(CheckpointFaults, AnErrorOfOneRankIsEveryRanks) {
  fs::copy(first_, folder_, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  for (const int struck : {0, 1}) {
    test::run_group(2, [&](const ProcessGroup& group) {
      CheckpointFolder folder(folder_);
      CheckpointShards shards;
      shards.info.step = 2;
      shards.model = whole_shards({{"r" + std::to_string(group.rank()), at::full({3}, 2.0)}});
      if (group.rank() == struck) fault = {Kind::fail_from, struck == 0 ? 5 : 1};
      EXPECT_THAT([&] { save_checkpoint(group, folder, shards); },
                  ::testing::ThrowsMessage<CheckpointError>(::testing::HasSubstr("Input/output")));
      fault = {};
      group.barrier();
    });
    EXPECT_EQ(newest(), 1);
    EXPECT_THAT(CheckpointFolder(folder_).list(), ::testing::SizeIs(1));
  }
}

}  // namespace checkpoint_faults_test
}  // namespace lockstep
