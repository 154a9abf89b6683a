#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace lockstep {

/// Shows how far a transfer is on standard error: a bar that is redrawn on a terminal, else one
/// line when it is done. Shows nothing below the log level "info".
class DownloadProgress {
 public:
  /// `already` bytes are there from an earlier try.
  DownloadProgress(std::string name, uint64_t already);
  /// Ends a bar that was drawn with a line of its own.
  ~DownloadProgress();
  DownloadProgress(const DownloadProgress&) = delete;
  DownloadProgress& operator=(const DownloadProgress&) = delete;

  /// `now` of `total` bytes of this transfer have arrived. A total of 0 is unknown.
  void update(uint64_t now, uint64_t total);
  /// The transfer is complete.
  void done(const std::string& url);

  /// "mnist.gz  45% [=========           ] 4.4 MB of 9.9 MB, 1.2 MB/s".
  static std::string bar(const std::string& name, uint64_t now, uint64_t total,
                         double bytes_per_second);

 private:
  using Clock = std::chrono::steady_clock;
  double seconds() const;

  std::string name_;
  uint64_t already_;
  uint64_t now_ = 0;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_drawn_;
};

}  // namespace lockstep
