#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launch {

/// Cuts a stream of bytes into whole lines, for output of several processes that must not mix
/// within a line. Bytes are never changed or dropped. The lines come without their newline.
///
/// Lines of more than kLongestLine bytes come in pieces of that size. A progress bar that rewrites
/// its line by carriage returns would not be seen until its end. So what it wrote comes as a line
/// of its own about once per second.
class LineCutter {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Sink = std::function<void(std::string_view line)>;
  static constexpr size_t kLongestLine = size_t{1} << 20;
  static constexpr std::chrono::milliseconds kProgressInterval{1000};
  static constexpr std::chrono::milliseconds kPromptDelay{100};

  void feed(std::string_view bytes, Time now, const Sink& sink);
  /// The last line, which no newline ended.
  void finish(const Sink& sink);
  /// Whether a line that is no progress bar has begun.
  bool has_unfinished() const {
    return !partial_.empty() && partial_.find('\r') == std::string::npos;
  }
  /// Takes its beginning once that has stood for kPromptDelay; empty: not yet.
  std::string take_prompt(Time now);

 private:
  std::string partial_;
  Time last_line_{};
  Time fed_{};
};

/// The last lines of a stream, at most kLines lines and kBytes bytes.
class Tail {
 public:
  static constexpr size_t kLines = 20;
  static constexpr size_t kBytes = 16 * 1024;

  void feed(std::string_view bytes);
  std::vector<std::string> lines() const;

 private:
  std::string kept_;
};

}  // namespace lockstep::launch
