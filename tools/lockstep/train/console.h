#pragma once

#include <csignal>
#include <string>
#include <string_view>

namespace lockstep {

/// Standard output of a training run: whole lines, and on a terminal one live line below them. One
/// thread at a time. One at a time in a process, because it ignores SIGPIPE while it lives.
///
/// When the reader has gone (`| head`), the run is asked to stop as by a signal (StopSignal), and
/// `closed` becomes true. Any other failure to write throws SystemError.
class Console {
 public:
  /// `quiet` leaves only `result`. Nothing is written when `enabled` is false (ranks other than 0).
  Console(bool enabled, bool quiet);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// A line about progress.
  void line(std::string_view text);
  /// A line that --quiet leaves: the outcome.
  void result(std::string_view text);
  /// Replaces the live line; nothing where there is no terminal.
  void live(std::string_view text);
  /// Takes the live line away.
  void clear_live();

  /// True when live lines are shown: a terminal that can move its cursor, and not quiet.
  bool is_live() const { return live_; }
  /// True when colours are wanted: a terminal and no NO_COLOR.
  bool has_color() const { return color_; }
  /// The terminal's width in columns at this moment; 80 when unknown.
  int width() const;
  bool closed() const { return closed_; }

 private:
  void write(std::string_view text);

  bool enabled_;
  bool quiet_;
  bool live_ = false;
  bool color_ = false;
  bool showing_ = false;
  bool closed_ = false;
  struct sigaction before_;
};

}  // namespace lockstep
