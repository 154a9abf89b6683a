// What a run prints and writes: console, progress, metrics file.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/train/stop_signal.h"
#include "tests/support/pipe.h"
#include "tools/lockstep/train/console.h"
#include "tools/lockstep/train/metrics_file.h"
#include "tools/lockstep/train/progress.h"

namespace lockstep {
namespace run_output_test {

using test_process::Pipe;
using testing::ElementsAre;
using testing::HasSubstr;

/// Standard output goes to a descriptor of the test's while one lives.
class RedirectedOutput {
 public:
  explicit RedirectedOutput(int to) : saved_(::dup(STDOUT_FILENO)) { ::dup2(to, STDOUT_FILENO); }
  ~RedirectedOutput() { ::dup2(saved_.get(), STDOUT_FILENO); }

 private:
  UniqueFd saved_;
};

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

class MetricsRows : public testing::Test {
 protected:
  // The callback reads nothing from the trainer.
  Trainer& no_trainer() { return *reinterpret_cast<Trainer*>(this); }
  void log(MetricsFile& file, int64_t step, int64_t epoch) {
    LogResult result;
    result.step.step = step;
    result.step.epoch = epoch;
    result.step.lr = 0.05;
    result.metrics = {0.5, 0.25, 100};
    file.on_log(no_trainer(), result);
  }
  void end_epoch(MetricsFile& file, int64_t step, int64_t epoch, double accuracy = 0.75) {
    EpochResult result;
    result.step = step;
    result.epoch = epoch;
    result.test = {std::numeric_limits<double>::infinity(), accuracy, 10};
    file.on_epoch_end(no_trainer(), result);
  }
  std::vector<std::string> places() {
    std::vector<std::string> all;
    for (const std::string& line : split(read_file(path_), '\n')) {
      if (line.empty()) continue;
      const auto row = nlohmann::json::parse(line);
      all.push_back(row["split"].get<std::string>() + " " + row["step"].dump() + " " +
                    row["epoch"].dump());
    }
    return all;
  }
  TemporaryDirectory folder_;
  std::filesystem::path path_ = folder_.path() / "metrics.jsonl";
};

TEST_F(MetricsRows, HaveTheKeysInOrder) {
  MetricsFile file(path_);
  file.open_at(0, 0);
  log(file, 50, 0);
  end_epoch(file, 79, 0, std::nan(""));
  EXPECT_EQ(read_file(path_),
            "{\"step\":50,\"epoch\":1,\"split\":\"train\",\"loss\":0.5,\"accuracy\":0.25,"
            "\"lr\":0.05,\"samples_per_s\":0.0,\"seconds\":0.0}\n"
            "{\"step\":79,\"epoch\":1,\"split\":\"test\",\"loss\":null,\"accuracy\":null,"
            "\"lr\":0.0,\"samples_per_s\":0.0,\"seconds\":0.0}\n");
}

TEST_F(MetricsRows, ANewRunStartsAnewAndSaysWhatItOverwrites) {
  testing::internal::CaptureStderr();
  {
    MetricsFile file(path_);
    file.open_at(0, 0);
    log(file, 50, 0);
    log(file, 100, 0);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  MetricsFile again(path_);
  again.open_at(0, 0);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("metrics file " + path_.string() + " holds 2 rows of an earlier run"));
  EXPECT_THAT(places(), ElementsAre());
}

TEST_F(MetricsRows, OfSharedMemoryAreThoseOfAFile) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "this system has no /dev/shm";
  const TemporaryDirectory folder("/dev/shm/lockstep-test");
  path_ = folder.path() / "metrics.jsonl";
  {
    MetricsFile file(path_);
    file.open_at(0, 0);
    log(file, 50, 0);
  }
  MetricsFile again(path_);
  again.open_at(0, 0);
  EXPECT_THAT(places(), ElementsAre());
}

/// The rows that stay are under the file's name at every moment: a reader of the old file keeps it.
TEST_F(MetricsRows, AResumedRunReplacesTheFileInOneStep) {
  {
    MetricsFile file(path_);
    file.open_at(0, 0);
    log(file, 50, 0);
    log(file, 100, 1);
  }
  const std::string before = read_file(path_);
  const UniqueFd reader(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  MetricsFile file(path_);
  file.open_at(50, 0);
  EXPECT_THAT(places(), ElementsAre("train 50 1"));
  EXPECT_EQ(read_file("/proc/self/fd/" + std::to_string(reader.get())), before);
  log(file, 100, 1);
  EXPECT_THAT(places(), ElementsAre("train 50 1", "train 100 2"));
}

TEST_F(MetricsRows, AFileThatAnotherRunWritesToIsRefusedAndLeftAlone) {
  MetricsFile file(path_);
  file.open_at(0, 0);
  log(file, 50, 0);
  EXPECT_THAT([&] { MetricsFile(path_).open_at(0, 0); },
              testing::ThrowsMessage<Error>(HasSubstr("another process writes to metrics file")));
  EXPECT_THAT(places(), ElementsAre("train 50 1"));
}

TEST_F(MetricsRows, APipeIsOnlyWrittenTo) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  const UniqueFd reader(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  MetricsFile file(path_);
  file.open_at(50, 0);
  log(file, 50, 0);
  std::array<char, 256> text{};
  EXPECT_GT(::read(reader.get(), text.data(), text.size()), 0);
  EXPECT_THAT(text.data(), HasSubstr("\"step\":50"));
}

TEST_F(MetricsRows, WhatElseGoesToStandardOutputStays) {
  write_file_atomically(path_, "a line of the log\n");
  const UniqueFd output(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  const RedirectedOutput redirected(output.get());
  MetricsFile file("/dev/stdout");
  file.open_at(0, 0);
  log(file, 50, 0);
  EXPECT_THAT(read_file(path_), testing::StartsWith("a line of the log\n{\"step\":50"));
}

TEST_F(MetricsRows, WhatCannotBeWrittenIsFoundWithoutATrace) {
  EXPECT_NO_THROW(check_metrics_file(path_));
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_THROW(check_metrics_file(folder_.path() / "none" / "m.jsonl"), SystemError);
  EXPECT_NO_THROW(check_metrics_file("/dev/null"));
}

TEST_F(MetricsRows, AResumedRunKeepsTheRowsUpToItsCheckpoint) {
  {
    MetricsFile file(path_);
    file.open_at(0, 0);
    log(file, 50, 0);
    end_epoch(file, 60, 0);
    log(file, 100, 1);
    end_epoch(file, 120, 1);
    log(file, 150, 2);
  }
  write_file_atomically(path_, read_file(path_) + "{\"step\":20");  // cut short by a kill
  MetricsFile file(path_);
  file.open_at(120, 1);
  EXPECT_THAT(places(), ElementsAre("train 50 1", "test 60 1", "train 100 2"));
  end_epoch(file, 120, 1);
  EXPECT_THAT(places(), ElementsAre("train 50 1", "test 60 1", "train 100 2", "test 120 2"));
}

TEST_F(MetricsRows, AFolderThatIsNotThereIsNamed) {
  EXPECT_THAT([&] { MetricsFile(folder_.path() / "none" / "m.jsonl").open_at(0, 0); },
              testing::ThrowsMessage<SystemError>(HasSubstr("none/m.jsonl")));
}

}  // namespace run_output_test
}  // namespace lockstep
