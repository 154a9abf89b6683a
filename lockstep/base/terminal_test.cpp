#include "lockstep/base/terminal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "lockstep/base/file.h"

namespace lockstep {
namespace terminal_test {

TEST(Terminal, OfOnesThatMoveTheirCursorALineStartErasesIt) {
  const std::string before = std::getenv("TERM") ? std::getenv("TERM") : "";
  const UniqueFd leader(::posix_openpt(O_RDWR | O_NOCTTY));
  ASSERT_TRUE(leader);
  ASSERT_EQ(::unlockpt(leader.get()), 0);
  const UniqueFd terminal(::open(::ptsname(leader.get()), O_RDWR | O_NOCTTY));
  const UniqueFd file(::open("/dev/null", O_WRONLY));
  ::setenv("TERM", "xterm", 1);
  EXPECT_EQ(line_start(terminal.get()), "\x1b[K");
  EXPECT_EQ(line_start(file.get()), "");
  ::setenv("TERM", "dumb", 1);
  EXPECT_EQ(line_start(terminal.get()), "");
  ::setenv("TERM", before.c_str(), 1);
}

}  // namespace terminal_test
}  // namespace lockstep
