#include "lockstep/base/error.h"

#include <gtest/gtest.h>

#include <csignal>

namespace lockstep {
namespace {

TEST(Error, HintStandsOnItsOwnLine) {
  EXPECT_STREQ(Error("it broke", "mend it").what(), "it broke\n  hint: mend it");
  EXPECT_STREQ(Error("it broke").what(), "it broke");
}

TEST(Error, ExitCodes) {
  EXPECT_EQ(exit_code_of(Error("x")), 1);
  EXPECT_EQ(exit_code_of(UsageError("x")), 2);
  EXPECT_EQ(exit_code_of(InterruptedError(SIGTERM)), 143);
  EXPECT_EQ(exit_code_of(InterruptedError(SIGINT)), 130);
  EXPECT_EQ(exit_code_of(WorkerError("x", 7)), 7);
  EXPECT_EQ(exit_code_of(std::runtime_error("x")), 1);
}

TEST(Error, NamesTheSignal) {
  EXPECT_STREQ(InterruptedError(SIGTERM).what(), "stopped by SIGTERM");
}

TEST(Error, SystemErrorEndsInTheSystemsText) {
  EXPECT_STREQ(SystemError("cannot open /x", ENOENT).what(),
               "cannot open /x: No such file or directory");
}

}  // namespace
}  // namespace lockstep
