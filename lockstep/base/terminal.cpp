#include "lockstep/base/terminal.h"

#include <unistd.h>

#include "lockstep/base/env.h"

namespace lockstep {

bool is_live_terminal(int fd) {
  return ::isatty(fd) == 1 && env_string("TERM").value_or("dumb") != "dumb";
}

std::string_view line_start(int fd) {
  return is_live_terminal(fd) ? "\x1b[K" : "";
}

}  // namespace lockstep
