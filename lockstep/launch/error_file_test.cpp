#include "lockstep/launch/error_file.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/launch/variables.h"

namespace lockstep::launch {
namespace error_file_test {

class ErrorFile : public testing::Test {
 protected:
  ErrorFile() : path_(folder_.path() / "error.json") {
    setenv(kErrorFileVariable, path_.c_str(), 1);
  }
  ~ErrorFile() override { unsetenv(kErrorFileVariable); }

  std::optional<ErrorReport> parsed(const std::string& content) {
    std::ofstream(path_) << content;
    return read_error_file(path_);
  }

  TemporaryDirectory folder_;
  std::filesystem::path path_;
};

TEST_F(ErrorFile, WhatIsWrittenIsRead) {
  write_error_file(UsageError("no such \"flag\"", "try another"));
  const auto report = read_error_file(path_);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->message, "no such \"flag\"\n  hint: try another");
  EXPECT_GT(report->timestamp, 1'700'000'000);
}

TEST_F(ErrorFile, AReportOfWhatIsKnown) {
  write_error_file("out of memory", 1, nullptr);
  const auto report = read_error_file(path_);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->message, "out of memory");
  EXPECT_FALSE(report->failure);
  EXPECT_FALSE(report->consequence());
}

TEST_F(ErrorFile, AFailureBetweenRanksComesBackAsData) {
  using Kind = Failure::Kind;
  Failure failure{.kind = Kind::closed, .ranks = {{.number = 1, .kind = Kind::closed}}};
  failure.cause = std::make_shared<const Failure>(
      Failure{.kind = Kind::ended, .ranks = {{.number = 2, .kind = Kind::ended, .process = 4712}}});
  write_error_file(PeerLostError("rank 0: barrier cannot finish", "", failure));
  const auto report = read_error_file(path_);
  ASSERT_TRUE(report && report->failure && report->failure->cause);
  EXPECT_EQ(report->failure->kind, Kind::closed);
  EXPECT_EQ(report->failure->ranks, failure.ranks);
  EXPECT_EQ(report->failure->cause->ranks, failure.cause->ranks);
  EXPECT_TRUE(report->consequence());
}

TEST_F(ErrorFile, OnlyALostPeerMakesAConsequence) {
  const auto consequence = [this](const std::exception& error) {
    std::filesystem::remove(path_);
    write_error_file(error);
    return read_error_file(path_)->consequence();
  };
  EXPECT_TRUE(consequence(PeerLostError("lost")));
  EXPECT_FALSE(consequence(TimeoutError("late")));
  EXPECT_FALSE(consequence(MismatchError("another call")));
  EXPECT_FALSE(consequence(CommError("look at what the lost rank printed last")));
}

TEST(ToldBy, NamesTheRankOnce) {
  EXPECT_EQ(told_by(1, "no file"), "rank 1: no file");
  EXPECT_EQ(told_by(1, "rank 1: no file"), "rank 1: no file");
  EXPECT_EQ(told_by(1, "rank 1 called barrier"), "rank 1 called barrier");
  EXPECT_EQ(told_by(1, "rank 10: no file"), "rank 1: rank 10: no file");
}

TEST_F(ErrorFile, TheFirstReportStays) {
  write_error_file(Error("the cause"));
  write_error_file(Error("a consequence"));
  EXPECT_EQ(read_error_file(path_)->message, "the cause");
}

TEST_F(ErrorFile, BytesThatAreNoTextDoNotPreventTheReport) {
  write_error_file(Error("bad name \xff\xfe in file"));
  ASSERT_TRUE(read_error_file(path_));
}

TEST_F(ErrorFile, AFolderThatIsGoneIsNoSecondError) {
  setenv(kErrorFileVariable, "/nonexistent/folder/error.json", 1);
  write_error_file(Error("x"));
  EXPECT_FALSE(read_error_file("/nonexistent/folder/error.json"));
}

TEST_F(ErrorFile, PythonsFormatsAreRead) {
  // As torch.distributed.elastic's ErrorHandler.record_exception writes it.
  const auto report = parsed(
      R"({"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback", "timestamp": "1700000001"}}})");
  ASSERT_TRUE(report);
  EXPECT_EQ(report->message, "ValueError: bad");
  EXPECT_EQ(report->timestamp, 1'700'000'001);
  EXPECT_EQ(parsed(R"({"message": "plain", "timestamp": 7})")->message, "plain");
}

TEST_F(ErrorFile, ForeignOrDamagedContentIsNoReport) {
  for (const char* content :
       {"", "{", "[]", "{}", "null", R"({"message": 3})", R"({"message": {}})",
        R"({"message": {"message": "x", "failure": 3}})", R"({"message": {"message": 1}})"}) {
    EXPECT_FALSE(parsed(content)) << content;
  }
  EXPECT_FALSE(read_error_file(folder_.path() / "missing.json"));
  EXPECT_FALSE(read_error_file({}));
}

}  // namespace error_file_test
}  // namespace lockstep::launch
