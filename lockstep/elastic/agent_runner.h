#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lockstep/elastic/agent_events.h"
#include "lockstep/elastic/registry.h"
#include "lockstep/launch/host_agent.h"

namespace lockstep::elastic {

/// The store of the workers of one generation, served by this process while `server` lives.
struct ServedStore {
  std::string address;  ///< By which other hosts reach it.
  uint16_t port = 0;
  std::shared_ptr<void> server;
};

struct RunnerOptions {
  AgentOptions agent;
  std::string run_id;  ///< Of the job: its keys stand under lockstep/RUN_ID/.
  /// Serves a new store. Called by the agent's thread. What it throws ends the job.
  std::function<ServedStore()> serve_store;
  /// A line for the user. Called by the agent's thread.
  std::function<void(const std::string&)> say;
  std::shared_ptr<void> registry_server = {};  ///< The embedded one, kept until the end.
};

/// This host's part in a job of several: a thread that runs an Agent over a registry. The
/// destructor ends it, as a crash would: others notice by the lease. After an order that ends the
/// job nothing of that is left to do.
std::unique_ptr<launch::HostAgent> run_agent(RunnerOptions options,
                                             std::unique_ptr<Registry> registry);

}  // namespace lockstep::elastic
