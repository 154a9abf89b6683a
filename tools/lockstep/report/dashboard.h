#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "lockstep/loggers/logger.h"

namespace lockstep {

struct DashboardOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;  ///< 0: a free one.
  /// The run's JSON lines, from which a run that goes on takes what was before; empty: none.
  std::filesystem::path rows = {};
  std::string name = "this run";
};

/// Serves the page of `lockstep report`, with what the run logs, from a thread of its own. The
/// first `begin` says where. Throws Error for an address that cannot be served.
std::shared_ptr<Logger> dashboard(DashboardOptions options);

}  // namespace lockstep
