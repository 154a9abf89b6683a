#include "lockstep/base/error.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace lockstep {
namespace error_test {

TEST(Error, HintStandsOnItsOwnLine) {
  EXPECT_STREQ(Error("it broke", "mend it").what(), "it broke\n  hint: mend it");
  EXPECT_STREQ(Error("it broke").what(), "it broke");
}

TEST(Error, ATimeOutSaysSoInTheWordsThatOthersLookFor) {
  EXPECT_STREQ(TimeoutError("rank 1 did not come within 2 s").what(),
               "rank 1 did not come within 2 s (timed out)");
  EXPECT_STREQ(TimeoutError("rank 1 did not come", "start it").what(),
               "rank 1 did not come (timed out)\n  hint: start it");
  EXPECT_STREQ(TimeoutError("rank 1 did not come\n  hint: start it").what(),
               "rank 1 did not come (timed out)\n  hint: start it");
  EXPECT_STREQ(TimeoutError("connect() timed out").what(), "connect() timed out");
  EXPECT_STREQ(TimeoutError("Socket Timeout").what(), "Socket Timeout (timed out)");
  EXPECT_STREQ(TimeoutError("reached the timeout of 3 s").what(), "reached the timeout of 3 s");
}

TEST(Error, TooManyOpenFilesNameTheLimit) {
  const std::string text = SystemError("accept", EMFILE).what();
  EXPECT_NE(text.find("`ulimit -n` allows this process"), std::string::npos) << text;
  EXPECT_EQ(std::string(SystemError("accept", ENOENT).what()).find("ulimit"), std::string::npos);
  EXPECT_NE(std::string(SystemError("accept", EMFILE, "own hint").what()).find("own hint"),
            std::string::npos);
}

TEST(Error, AFileThatIsTooLargeNamesTheLimit) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {3'000'000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = SystemError("write", EFBIG).what();
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(text.find("`ulimit -f` allows"), std::string::npos) << text;
  EXPECT_NE(text.find("3.0 MB"), std::string::npos) << text;
}

TEST(Error, HasABacktraceWhereThatIsAskedFor) {
  ::setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
  const std::string text = UsageError("it broke", "mend it").what();
  ::unsetenv("TORCH_SHOW_CPP_STACKTRACES");
  EXPECT_TRUE(text.starts_with("it broke\n  hint: mend it\n")) << text;
  EXPECT_NE(text.find(program_invocation_short_name), std::string::npos) << text;
  EXPECT_NE(text.find("__libc_start"), std::string::npos) << "down to main: " << text;
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

}  // namespace error_test
}  // namespace lockstep
