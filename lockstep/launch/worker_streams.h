#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/line_cutter.h"
#include "lockstep/launch/output.h"

namespace lockstep::launch {

/// A file that a launcher writes its workers' output to. A full disk costs the log, with a warning,
/// and not the training.
class LogFile {
 public:
  /// Empties the file, or makes it. No file: an empty name. Throws SystemError naming it.
  explicit LogFile(std::filesystem::path path);
  void write(std::string_view bytes);

 private:
  std::filesystem::path path_;
  UniqueFd file_;
};

/// The file of a LineCopiesPlan.
class LineCopies {
 public:
  /// Throws as LogFile.
  explicit LineCopies(const LineCopiesPlan& plan) : words_(plan.words), file_(plan.file) {}
  /// Copies the line, with its prefix, if it has one of the words.
  void take(std::string_view prefix, std::string_view line);

 private:
  std::vector<std::string> words_;
  LogFile file_;
};

/// Our end of one output stream of a worker. Reads it, keeps its tail and passes it on: to a file
/// and, in whole lines, to the console.
class WorkerStream {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// Makes the pipe and opens the file. Throws SystemError naming the file. `console` and `copies`
  /// outlive this. A line that begins with "[rankN]" of this rank's number gets no prefix.
  WorkerStream(const StreamPlan& plan, int rank, std::string prefix, int own_fd,
               OutputQueue& console, LineCopies& copies);

  /// The descriptor for the worker; ours alone until `started`.
  int worker_fd() const { return inherit_ ? own_fd_ : write_.get(); }
  /// The workers have their descriptors. Ours is closed, so that the end of the stream is seen.
  void started() { write_.reset(); }

  /// -1 at the end of the stream, and while the console is too far behind to take more.
  int poll_fd() const { return console_wanted_ && console_.full() ? -1 : read_.get(); }
  bool open() const { return static_cast<bool>(read_); }
  /// Takes in what is there now. Does not block.
  void read(Time now);
  /// Whether an unfinished line waits for `show_prompt`.
  bool has_prompt() const { return prompts_ && !is_muted_ && cutter_.has_unfinished(); }
  /// Shows a line that has stood unfinished for LineCutter::kPromptDelay.
  void show_prompt(Time now);
  /// From now on the console gets nothing of it.
  void mute(bool is_muted);
  /// Gives the stream up: its last line is passed on.
  void close();
  const Tail& tail() const { return tail_; }
  /// Its last lines are the last on the console: who looks there has them before his eyes.
  bool last_on_console() const {
    return inherit_ || (console_wanted_ && console_.last_writer() == this);
  }

 private:
  void take(std::string_view bytes, Time now);
  void show(std::string_view line);

  bool inherit_;
  bool console_wanted_;
  bool prompts_;
  bool prompted_ = false;  ///< The beginning of the line is on the console.
  bool is_muted_ = false;
  int own_fd_;
  std::string_view line_start_;  ///< Of the console.
  std::string prefix_;
  std::string own_mark_;  ///< "[rank3]", which our own messages and c10d's begin with.
  OutputQueue& console_;
  LineCopies& copies_;
  LogFile file_;
  UniqueFd read_;
  UniqueFd write_;
  LineCutter cutter_;
  Tail tail_;
};

}  // namespace lockstep::launch
