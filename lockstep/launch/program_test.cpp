#include "lockstep/launch/program.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep::launch {
namespace program_test {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

class ProgramTest : public testing::Test {
 protected:
  ProgramTest() : before_(fs::current_path()), path_(getenv("PATH")) {
    fs::current_path(folder_.path());
    setenv("PYTHON_EXEC", "/bin/cat", 1);
  }
  ~ProgramTest() override {
    fs::current_path(before_);
    setenv("PATH", path_.c_str(), 1);
    unsetenv("PYTHON_EXEC");
  }
  static void make(const std::string& name, const std::string& content, bool executable) {
    std::ofstream(name) << content;
    if (executable) fs::permissions(name, fs::perms::owner_all);
  }
  static Program found(const Words& words, ProgramKind kind = ProgramKind::guess) {
    return find_program(words, kind);
  }
  static std::string refusal(const Words& words, ProgramKind kind = ProgramKind::guess) {
    try {
      find_program(words, kind);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  TemporaryDirectory folder_;
  fs::path before_;
  std::string path_;
};

TEST_F(ProgramTest, AnExecutableIsItself) {
  make("prog", "#!/bin/sh\n", true);
  EXPECT_EQ(found({"./prog", "--flag", "-m"}).file, "./prog");
  EXPECT_EQ(found({"./prog", "--flag", "-m"}).argv, (Words{"./prog", "--flag", "-m"}));
}

TEST_F(ProgramTest, ANameIsLookedUpAsAShellDoesThenHere) {
  fs::create_directory("bin");
  make("bin/tool", "#!/bin/sh\n", true);
  make("tool", "#!/bin/sh\n", true);
  EXPECT_EQ(found({"tool"}).file, "tool");
  setenv("PATH", (folder_.path() / "bin").c_str(), 1);
  EXPECT_EQ(found({"tool"}).file, (folder_.path() / "bin" / "tool").string());
}

TEST_F(ProgramTest, APythonSourceThatIsNotExecutableGoesToPython) {
  make("train.py", "print()\n", false);
  EXPECT_EQ(found({"train.py", "-x"}).argv, (Words{"/bin/cat", "-u", "train.py", "-x"}));
  EXPECT_EQ(found({"train.py", "-x"}).file, "/bin/cat");
}

TEST_F(ProgramTest, APythonSourceWithItsInterpreterNamedIsAnExecutable) {
  make("run.py", "#!/usr/bin/env python3\n", true);
  EXPECT_EQ(found({"./run.py"}).file, "./run.py");
  make("odd.py", "print()\n", true);
  EXPECT_EQ(found({"./odd.py"}).file, "/bin/cat")
      << "all files are executable on some file systems";
  EXPECT_EQ(found({"./odd.py"}, ProgramKind::executable).file, "./odd.py");
}

TEST_F(ProgramTest, AModuleGoesToPython) {
  EXPECT_EQ(found({"pkg.mod", "-m"}, ProgramKind::module).argv,
            (Words{"/bin/cat", "-u", "-m", "pkg.mod", "-m"}));
}

TEST_F(ProgramTest, WhatCannotBeExecutedIsNamed) {
  EXPECT_NE(refusal({"no-such-program"}).find("'no-such-program' does not exist"),
            std::string::npos);
  EXPECT_NE(refusal({"./missing.py"}).find("does not exist"), std::string::npos);
  fs::create_directory("folder");
  EXPECT_NE(refusal({"./folder"}).find("is a folder"), std::string::npos);
  make("data", "x", false);
  EXPECT_NE(refusal({"./data"}).find("chmod +x"), std::string::npos);
  make("plain.py", "x", false);
  EXPECT_NE(refusal({"./plain.py"}, ProgramKind::executable).find("not executable"),
            std::string::npos);
}

TEST_F(ProgramTest, AMissingPythonIsNamed) {
  setenv("PYTHON_EXEC", "no-such-python", 1);
  EXPECT_NE(refusal({"mod"}, ProgramKind::module).find("no-such-python"), std::string::npos);
}

}  // namespace program_test
}  // namespace lockstep::launch
