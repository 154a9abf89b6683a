#include "lockstep/train/metrics_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "tests/support/redirected_output.h"

namespace lockstep {
namespace metrics_file_test {

using test_process::RedirectedOutput;
using testing::ElementsAre;
using testing::HasSubstr;

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

TEST_F(MetricsRows, HaveWhatTheModuleNotesAndNoneWithoutAnEvaluation) {
  MetricsFile file(path_);
  file.open_at(0, 0);
  LogResult result;
  result.metrics.values = {{"d_loss", 0.5}, {"g_loss", std::nan("")}, {"lr", 7}};
  file.on_log(no_trainer(), result);
  file.on_epoch_end(no_trainer(), {});
  const auto row = nlohmann::json::parse(read_file(path_));  // one row
  EXPECT_EQ(row["d_loss"], 0.5);
  EXPECT_TRUE(row["g_loss"].is_null());
  EXPECT_EQ(row["lr"], 0.0) << "the rate of the optimizer";
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

}  // namespace metrics_file_test
}  // namespace lockstep
