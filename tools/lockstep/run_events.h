#pragma once

#include <chrono>
#include <string>

#include "lockstep/launch/launcher.h"
#include "lockstep/launch/rank_environment.h"
#include "run_options.h"

namespace lockstep::tool {

/// torchrun's events, as lines of JSON on standard error with --event-log-handler console: the
/// hosts have met (RENDEZVOUS), a worker starts or ends, this host's part ends. Three are ours: all
/// ranks start again (RESTART); one is replaced while the others live on (REPLACEMENT); hosts have
/// come or gone, or the others go on without one (MEMBERSHIP_CHANGE). Fields, and lists of one, are
/// torchrun's; the times are set.
class EventLog {
 public:
  /// `options` must outlive it.
  explicit EventLog(const RunOptions& options) : options_(options) {}
  /// The ranks are about to start. `live_on`: or some, beside those that live.
  void begin(const launch::RankLayout& layout, bool live_on = false);
  void tell(const launch::WorkerEvent& worker);
  /// `error`: empty after a success.
  void end(const std::string& error) const;

 private:
  void write(const std::string& state, const std::string& error,
             const launch::WorkerEvent* worker) const;

  const RunOptions& options_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  launch::RankLayout layout_;
  bool begun_ = false;
};

}  // namespace lockstep::tool
