#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "entry.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/store.h"
#include "lockstep/elastic/agent_runner.h"
#include "lockstep/elastic/embedded_registry.h"
#include "lockstep/elastic/etcd_registry.h"
#include "lockstep/elastic/proof.h"
#include "lockstep/launch/host_agent.h"
#include "lockstep/launch/rank_environment.h"
#include "run_options.h"

namespace lockstep::tool {
namespace {

using Backend = MeetingOptions::Backend;

/// So many time-outs of the lease without a word from the registry: it is gone, or this host is cut
/// off and others may go on. An election of etcd's takes one.
constexpr int kSilences = 5;
constexpr std::chrono::milliseconds kNamesAppear{10'000};
constexpr const char* kTokenVariable = "LOCKSTEP_TOKEN";

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

/// Waits for a name to appear: a cluster may know it only after its processes have started.
bool is_at_endpoint(const std::string& address) {
  try {
    resolve_host(address, kNamesAppear);
  } catch (const CommError&) {
    return false;
  }
  return is_this_host(address);
}

/// A cluster may know a host's name some time after its processes have started. What is served does
/// not need it. A mistyped name should not have to wait for its error.
void tell_of_unknown_name(const RunOptions& options) {
  try {
    launch::resolve_at_once(options.master_addr);
  } catch (const CommError& error) {
    log_warning(std::string("lockstep run: ") + error.what() + "; hosts wait for the name for " +
                seconds_text(options.meeting.join_timeout));
  }
}

/// None where another host serves it.
std::shared_ptr<void> serve_registry(const RunOptions& options, const std::string& token) {
  const MeetingOptions& meeting = options.meeting;
  if (meeting.backend == Backend::etcd) return nullptr;
  const bool fixed = meeting.backend == Backend::fixed;
  const bool ours = fixed             ? options.node_rank.value_or(0) == 0
                    : meeting.is_host ? *meeting.is_host
                                      : is_at_endpoint(options.master_addr);
  if (!ours) return nullptr;
  tell_of_unknown_name(options);
  elastic::EmbeddedRegistryOptions server;
  server.port = *options.master_port;
  server.token = token;
  const std::string& address = options.master_addr;
  if (is_loopback_host(address) || (is_numeric_host(address) && is_this_host(address)))
    server.host = address;
  try {
    return elastic::serve_registry(server).server;
  } catch (const CommError&) {
    // Another agent of this host may serve it already.
    if (fixed || meeting.is_host.value_or(false)) throw;
    return nullptr;
  }
}

elastic::EtcdRegistryOptions registry_options(const RunOptions& options, const std::string& token) {
  if (options.meeting.backend == Backend::etcd) return options.meeting.etcd;
  elastic::EtcdRegistryOptions client;
  client.endpoints = {"http://" + endpoint_text(options.master_addr, *options.master_port)};
  client.token = token;
  client.embedded = true;
  return client;
}

/// For messages.
std::string registry_name(const RunOptions& options) {
  const auto backend = options.meeting.backend;
  if (backend == Backend::etcd) return "etcd at " + join(options.meeting.etcd.endpoints, ", ");
  const std::string at = " at " + endpoint_text(options.master_addr, *options.master_port);
  return (backend == Backend::fixed ? "host 0" : "the host of --rdzv-endpoint") + at;
}

/// By which the other hosts reach this one.
std::string own_address(const RunOptions& options) {
  const MeetingOptions& meeting = options.meeting;
  if (!meeting.local_addr.empty()) return meeting.local_addr;
  const bool first = meeting.backend == Backend::fixed && options.node_rank.value_or(0) == 0;
  if (first || is_loopback_host(options.master_addr)) return options.master_addr;
  return reachable_address(options.master_addr);
}

elastic::AgentOptions agent_options(const RunOptions& options) {
  const MeetingOptions& meeting = options.meeting;
  elastic::AgentOptions agent;
  agent.host = host_name();
  agent.id = agent.host + "-" + std::to_string(::getpid()) + "-" + random_hex(4);
  agent.registry = registry_name(options);
  agent.min_agents = options.min_nodes;
  agent.max_agents = options.nodes;
  agent.nproc = options.nproc;
  agent.node_rank = options.node_rank;
  if (meeting.backend == Backend::fixed && !agent.node_rank) agent.node_rank = 0;  // torchrun's
  agent.max_restarts = options.max_restarts;
  agent.ends_with_a_host = meeting.backend == Backend::fixed && options.max_restarts == 0;
  agent.keep_alive = meeting.keep_alive;
  agent.last_call = meeting.last_call;
  agent.join_timeout = meeting.join_timeout;
  agent.embedded_registry = meeting.backend != Backend::etcd;
  agent.contact_limit = kSilences * meeting.keep_alive;
  // An agent's lease ends by keep_alive after its last contact: so long may it be late, too.
  agent.contact_margin = launch::job_options(options.shutdown_timeout).grace;
  return agent;
}

elastic::ServedStore serve_workers_store(const std::string& address) {
  UniqueFd listener = listen_as_master(address, 0, is_loopback_host(address));
  elastic::ServedStore store{address, bound_port(listener.get()), {}};
  store.server = tcp_store({.is_listener = true, .listen_fd = listener.release()}).native();
  return store;
}

}  // namespace
}  // namespace lockstep::tool

/// Serves the registry by which hosts agree, too, where that is this host's to do.
void lockstep_hosts_join(const lockstep::tool::RunOptions& options,
                         std::shared_ptr<lockstep::launch::HostAgent>& agent) {
  using namespace lockstep;
  using namespace lockstep::tool;
  const auto token = elastic::read_token(options.meeting.token_file, kTokenVariable).value_or("");
  elastic::RunnerOptions runner;
  runner.agent = agent_options(options);
  runner.run_id = options.run_id;
  runner.registry_server = serve_registry(options, token);
  runner.agent.hosts_registry = runner.registry_server != nullptr;
  runner.serve_store = [address = own_address(options)] { return serve_workers_store(address); };
  runner.say = [](const std::string& text) { log_info("lockstep run: " + text); };
  auto registry = elastic::connect_registry(registry_options(options, token));
  agent = elastic::run_agent(std::move(runner), std::move(registry));
}
