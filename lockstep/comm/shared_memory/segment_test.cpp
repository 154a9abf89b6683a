#include "lockstep/comm/shared_memory/segment.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include <string>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/file_limit.h"
#include "tests/support/pipe.h"
#include "tests/support/run_ranks.h"

namespace lockstep::shm {
namespace segment_test {

using test::FileLimit;
using test::Outcome;
using test::outcome_of;
using test_process::Pipe;
using Clock = std::chrono::steady_clock;

SegmentOptions options_of(int rank) {
  SegmentOptions options;
  options.rank = rank;
  options.size = 2;
  options.timeout = std::chrono::seconds(20);
  return options;
}

/// Rank 1 in a process of its own, which has forked a child that starts no other program.
class ForkedRank {
 public:
  ForkedRank() {
    pid_ = fork();
    if (pid_ != 0) return;
    ends_rank_.write.reset();
    ends_child_.write.reset();
    const Segment segment(options_of(1), {{}, [this] { return name_.text(); }});
    if (fork() == 0) {
      forked_.tell(
          "forked");  // It, and not its parent: by then it has closed what it must not keep.
      ends_child_.text();
      _exit(0);
    }
    ends_rank_.text();
    _exit(0);
  }
  ~ForkedRank() {
    end();
    ends_child_.write.reset();
  }
  ForkedRank(const ForkedRank&) = delete;
  ForkedRank& operator=(const ForkedRank&) = delete;

  Meeting meeting() const {
    return {[this](const std::string& name) { name_.tell(name); }, {}};
  }
  void wait_until_forked() const { EXPECT_EQ(forked_.text(), "forked"); }
  /// Its child lives on.
  void end() {
    ends_rank_.write.reset();
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  Pipe name_, forked_, ends_rank_, ends_child_;
  pid_t pid_ = -1;
};

TEST(Segment, ARankOfAnotherNamespaceHasEndedThoughItsForkedChildLives) {
  ForkedRank other;
  const Segment segment(options_of(0), other.meeting());
  other.wait_until_forked();
  auto& record = segment.record(1);
  store_text(record.identity, "another namespace");
  EXPECT_EQ(record.locked, 1U);
  EXPECT_FALSE(segment.has_ended(1));
  other.end();
  EXPECT_TRUE(segment.has_ended(1));
}

TEST(Segment, WhoIsWaitedForIsLookedAfter) {
  SegmentOptions options = options_of(0);
  options.look = [](const std::vector<int>& missing) {
    EXPECT_EQ(missing, std::vector<int>{1});
    throw PeerLostError("rank 1 has ended");
  };
  const Meeting meeting{[](const std::string&) {}, {}};
  EXPECT_THROW(Segment(options, meeting), PeerLostError);
}

TEST(Segment, WithoutADescriptorForItsLockItSaysSo) {
  const FileLimit the_memory_only(1);
  try {
    Segment(options_of(0), {});
    ADD_FAILURE() << "made without a lock";
  } catch (const SystemError& error) {
    EXPECT_EQ(error.errno_value(), EMFILE) << error.what();
  }
}

}  // namespace segment_test
}  // namespace lockstep::shm
