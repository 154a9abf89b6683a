// What a run prints: console and progress.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/train/stop_signal.h"
#include "tests/support/pipe.h"
#include "tests/support/redirected_output.h"
#include "tools/lockstep/train/console.h"
#include "tools/lockstep/train/progress.h"

namespace lockstep {
namespace run_output_test {

using test_process::Pipe;
using test_process::RedirectedOutput;
using testing::HasSubstr;

TEST(OutcomeLine, HasTheFormThatScriptsRead) {
  EXPECT_EQ(outcome_line({0.09123, 0.97309, 10}), "test accuracy 0.9731 loss 0.0912");
  EXPECT_EQ(outcome_line({0.09123, std::nan(""), 10}), "test loss 0.0912");
  EXPECT_EQ(outcome_line({-std::nan(""), 0.5, 10}), "test accuracy 0.5000 loss nan");
}

TEST(Console, QuietLeavesTheResult) {
  testing::internal::CaptureStdout();
  {
    Console console(true, true);
    console.line("progress");
    console.live("bar");
    console.result("outcome");
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "outcome\n");
}

TEST(Console, OtherRanksPrintNothing) {
  testing::internal::CaptureStdout();
  Console(false, false).result("outcome");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST(Console, AClosedPipeAsksTheRunToStop) {
  const StopSignal signals;
  Pipe pipe;
  pipe.read.reset();
  bool closed = false;
  {
    const RedirectedOutput redirected(pipe.write.get());
    Console console(true, false);
    console.line("nobody reads this");
    closed = console.closed();
  }
  EXPECT_TRUE(closed);
  EXPECT_EQ(signals.received(), SIGPIPE);
}

TEST(Console, AFullDiskIsAnError) {
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (!full) GTEST_SKIP() << "this system has no /dev/full";
  std::string message;
  {
    const RedirectedOutput redirected(full.get());
    Console console(true, false);
    try {
      console.line("text");
    } catch (const SystemError& error) {
      message = error.what();
    }
  }
  EXPECT_THAT(message, HasSubstr("cannot write standard output: No space left"));
}

TEST(ProgressBar, FillsTheWidthAndNeverMore) {
  const std::string facts = "loss 0.1234  12345 samples/s  ETA 12.3s";
  for (int width = 1; width < 200; ++width) {
    for (double done : {0.0, 0.33, 1.0}) {
      const std::string bar = progress_bar("epoch 2/5", done, facts, width, false);
      EXPECT_LT(static_cast<int>(bar.size()), std::max(width, 1)) << width;
    }
  }
  EXPECT_EQ(progress_bar("epoch 2/5", 0.5, "loss 1", 44, false),
            "epoch 2/5 [=========>        ]  50%  loss 1");
}

TEST(ProgressBar, ColoursOnlyWhenAsked) {
  EXPECT_THAT(progress_bar("e", 0.5, "f", 80, true), HasSubstr("\x1b[32m"));
  EXPECT_THAT(progress_bar("e", 0.5, "f", 80, false), testing::Not(HasSubstr("\x1b")));
}

}  // namespace run_output_test
}  // namespace lockstep
