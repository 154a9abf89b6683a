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
#include "lockstep/loggers/logger.h"
#include "tests/support/redirected_output.h"

namespace lockstep {
namespace json_lines_test {

using test_process::RedirectedOutput;
using testing::ElementsAre;
using testing::HasSubstr;

using Lines = std::shared_ptr<Logger>;

class MetricsRows : public testing::Test {
 protected:
  Lines logger(bool only_metrics = false) { return json_lines_logger({path_, only_metrics}); }
  Lines begun(int64_t step = 0, int64_t epochs = 0) {
    Lines made = logger();
    made->begin(step, epochs);
    return made;
  }
  static void log(const Lines& file, int64_t step, double epoch) {
    file->log(step, {{"epoch", epoch + 1}, {"loss", 0.5}}, "train");
  }
  static void end_epoch(const Lines& file, int64_t step, double epoch) {
    file->log(step, {{"epoch", epoch + 1}, {"loss", 0.5}}, "test");
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

TEST_F(MetricsRows, HaveTheValuesInOrder) {
  const Lines file = logger();
  file->log(50, {{"loss", 0.5}, {"accuracy", std::nan("")}, {"rate", 1e-3}, {"samples", 12.0}});
  file->log(50, {{"loss", std::numeric_limits<double>::infinity()}}, "test");
  file->log_ranks(50, {{{"waiting_s", 0.25}}, {{"waiting_s", 2.0}}});
  file->log_hyperparameters({{"lr", "0.1"}});
  file->close("rank 1 has ended");
  EXPECT_EQ(read_file(path_),
            "{\"step\":50,\"loss\":0.5,\"accuracy\":null,\"rate\":0.001,\"samples\":12}\n"
            "{\"step\":50,\"split\":\"test\",\"loss\":null}\n"
            "{\"step\":50,\"split\":\"ranks\",\"waiting_s\":[0.25,2]}\n"
            "{\"step\":50,\"split\":\"run\",\"hyperparameters\":{\"lr\":\"0.1\"}}\n"
            "{\"step\":50,\"split\":\"run\",\"failure\":\"rank 1 has ended\"}\n");
}

TEST_F(MetricsRows, NamesAndPathsThatAreNoUtf8EndNoRun) {
  const Lines file = logger();
  file->log_hyperparameters({{"data-dir", "caf\xe9"}});
  file->log(50, {{"caf\xe9", 0.5}, {"loss", 1}}, "train");
  file->close("no such folder: caf\xe9");
  const auto rows = split(read_file(path_), '\n');
  ASSERT_EQ(rows.size(), 4);
  EXPECT_EQ(nlohmann::json::parse(rows[0])["hyperparameters"]["data-dir"], "caf\xef\xbf\xbd");
  EXPECT_EQ(nlohmann::json::parse(rows[1])["loss"], 1);
}

/// protobuf's readers refuse a whole event whose tag is no UTF-8, and TensorBoard all after it.
TEST_F(MetricsRows, OfTensorBoardHaveTagsOfUtf8) {
  const Lines events = tensorboard_logger(folder_.path());
  events->log(1, {{"caf\xe9", 0.5}}, "train");
  for (const auto& file : std::filesystem::directory_iterator(folder_.path()))
    EXPECT_THAT(read_file(file.path()), HasSubstr("train/caf\xef\xbf\xbd"));
}

TEST_F(MetricsRows, OfMetricsOnlyAreThoseOfTrainingAndEvaluation) {
  const Lines file = logger(/*only_metrics=*/true);
  file->log(0, {{"restarts", 0}}, "run");
  file->log_hyperparameters({{"lr", "0.1"}});
  log(file, 50, 0);
  file->log_ranks(50, {{{"waiting_s", 0.25}}});
  file->close("rank 1 has ended");
  EXPECT_THAT(places(), ElementsAre("train 50 1"));
}

TEST_F(MetricsRows, ANewRunStartsAnewAndSaysWhatItOverwrites) {
  testing::internal::CaptureStderr();
  {
    const Lines file = begun();
    log(file, 50, 0);
    log(file, 100, 0);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  const Lines again = begun();
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("metrics file " + path_.string() + " holds 2 rows of an earlier run"));
  EXPECT_THAT(places(), ElementsAre());
}

TEST_F(MetricsRows, OfSharedMemoryAreThoseOfAFile) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "this system has no /dev/shm";
  const TemporaryDirectory folder("/dev/shm/lockstep-test");
  path_ = folder.path() / "metrics.jsonl";
  {
    const Lines file = begun();
    log(file, 50, 0);
  }
  const Lines again = begun();
  EXPECT_THAT(places(), ElementsAre());
}

/// The rows that stay are under the file's name at every moment: a reader of the old file keeps it.
TEST_F(MetricsRows, AResumedRunReplacesTheFileInOneStep) {
  {
    const Lines file = begun();
    log(file, 50, 0);
    log(file, 100, 1);
  }
  const std::string before = read_file(path_);
  const UniqueFd reader(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  const Lines file = begun(50, 0);
  EXPECT_THAT(places(), ElementsAre("train 50 1"));
  EXPECT_EQ(read_file("/proc/self/fd/" + std::to_string(reader.get())), before);
  log(file, 100, 1);
  EXPECT_THAT(places(), ElementsAre("train 50 1", "train 100 2"));
}

TEST_F(MetricsRows, APipeIsOnlyWrittenTo) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  const UniqueFd reader(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const Lines file = begun(50, 0);
  log(file, 50, 0);
  std::array<char, 256> text{};
  EXPECT_GT(::read(reader.get(), text.data(), text.size()), 0);
  EXPECT_THAT(text.data(), HasSubstr("\"step\":50"));
}

TEST_F(MetricsRows, WhatElseGoesToStandardOutputStays) {
  for (const std::filesystem::path& name : {std::filesystem::path("/dev/stdout"), path_}) {
    const UniqueFd output(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    const RedirectedOutput redirected(output.get());
    write_all(STDOUT_FILENO, "before\n", 7, name);
    const Lines file = json_lines_logger({name});
    file->begin();
    log(file, 50, 0);
    write_all(STDOUT_FILENO, "after\n", 6, name);
    EXPECT_THAT(split(read_file(path_), '\n'),
                ElementsAre("before", testing::StartsWith("{\"step\":50"), "after", ""));
  }
}

TEST_F(MetricsRows, WhatCannotBeWrittenIsFoundWithoutATrace) {
  EXPECT_NO_THROW(check_json_lines(path_));
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_THROW(check_json_lines(folder_.path() / "none" / "m.jsonl"), SystemError);
  EXPECT_NO_THROW(check_json_lines("/dev/null"));
}

TEST_F(MetricsRows, AResumedRunKeepsTheRowsUpToItsCheckpoint) {
  {
    const Lines file = begun();
    log(file, 50, 0);
    end_epoch(file, 60, 0);
    log(file, 100, 1);
    end_epoch(file, 120, 1);
    log(file, 150, 2);
  }
  write_file_atomically(path_, read_file(path_) + "{\"step\":20");  // cut short by a kill
  const Lines file = begun(120, 1);
  EXPECT_THAT(places(), ElementsAre("train 50 1", "test 60 1", "train 100 2"));
  end_epoch(file, 120, 1);
  EXPECT_THAT(places(), ElementsAre("train 50 1", "test 60 1", "train 100 2", "test 120 2"));
}

TEST_F(MetricsRows, AFolderThatIsNotThereIsNamed) {
  EXPECT_THAT([&] { json_lines_logger({folder_.path() / "none" / "m.jsonl"})->begin(); },
              testing::ThrowsMessage<SystemError>(HasSubstr("none/m.jsonl")));
}

}  // namespace json_lines_test
}  // namespace lockstep
