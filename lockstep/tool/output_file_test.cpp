#include "lockstep/tool/output_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep::tool {
namespace output_file_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

void expect_refused(const std::string& file, const std::string& message, const std::string& hint) {
  EXPECT_THAT([&] { check_output_file("--trace", file, "trace.json"); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("--trace " + file + ": " + message),
                                              HasSubstr("hint: " + hint))));
}

TEST(OutputFile, OneThatCanBeMadeLeavesNothing) {
  const TemporaryDirectory folder;
  check_output_file("--trace", (folder.path() / "t.json").string(), "trace.json");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  write_file_atomically(folder.path() / "t.json", "old");
  check_output_file("--trace", (folder.path() / "t.json").string(), "trace.json");
  EXPECT_EQ(read_file(folder.path() / "t.json"), "old");
  check_output_file("--trace", "", "trace.json");
}

TEST(OutputFile, WhatCannotBeWrittenIsNamedWithItsFlag) {
  const TemporaryDirectory folder;
  expect_refused(folder.path().string(), "this is a folder",
                 "for example " + folder.path().string());
  expect_refused((folder.path() / "none" / "t.json").string(), "there is no folder", "make it");
  expect_refused("/dev/null", "cannot write /dev/null: it is there and is no regular file",
                 "give the name of a file");
  expect_refused("/proc/trace.json", "cannot write /proc/trace.json",
                 "check that the folder exists");
}

}  // namespace output_file_test
}  // namespace lockstep::tool
