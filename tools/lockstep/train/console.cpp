#include "tools/lockstep/train/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/terminal.h"
#include "lockstep/train/stop_signal.h"

namespace lockstep {
namespace {

/// mpirun, our parent, gives us a terminal of its own and copies from there to its output: that is
/// what the user sees.
bool output_is_live() {
  if (!is_live_terminal(STDOUT_FILENO)) return false;
  if (!env_string("OMPI_COMM_WORLD_RANK")) return true;
  std::error_code ignored;
  const std::string output =
      std::filesystem::read_symlink("/proc/" + std::to_string(::getppid()) + "/fd/1", ignored);
  return output.starts_with("/dev/pts/") || output.starts_with("/dev/tty");
}

}  // namespace

Console::Console(bool enabled, bool quiet) : enabled_(enabled), quiet_(quiet) {
  live_ = enabled && !quiet && output_is_live();
  color_ = live_ && !env_string("NO_COLOR");
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigemptyset(&ignore.sa_mask);
  ::sigaction(SIGPIPE, &ignore, &before_);
}

Console::~Console() {
  try {
    clear_live();
  } catch (const std::exception&) {
    // The terminal is gone; what was on it no longer matters.
  }
  ::sigaction(SIGPIPE, &before_, nullptr);
}

int Console::width() const {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

void Console::line(std::string_view text) {
  if (!quiet_) result(text);
}

void Console::result(std::string_view text) {
  if (!enabled_) return;
  clear_live();
  write(std::string(text) + "\n");
}

void Console::live(std::string_view text) {
  if (!live_) return;
  // The cursor stays at the line's start, where what else is printed erases it: see line_start.
  write("\r" + std::string(text) + "\x1b[K\r");
  showing_ = true;
}

void Console::clear_live() {
  if (!showing_) return;
  showing_ = false;
  write("\r\x1b[K");
}

void Console::write(std::string_view text) {
  try {
    write_all(STDOUT_FILENO, text.data(), text.size(), "standard output");
  } catch (const SystemError& error) {
    if (error.errno_value() != EPIPE && error.errno_value() != EIO) throw;
    closed_ = true;
    StopSignal::request(error.errno_value() == EPIPE ? SIGPIPE : SIGHUP);
  }
}

}  // namespace lockstep
