#include "lockstep/rpc/rpc.h"

#include <algorithm>
#include <exception>
#include <functional>

#include "lockstep/base/cores.h"
#include "lockstep/base/duration.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/host_key.h"
#include "lockstep/rpc/fast_meeting.h"
#include "lockstep/rpc/rpc_worker.h"
#include "lockstep/rpc/seal.h"

namespace lockstep::rpc {
namespace {

/// LibTorch's own limit.
constexpr size_t kLongestName = 128;
constexpr size_t kShortestSecret = 16;

void check_options(const std::string& name, const Options& options) {
  if (name.empty() || name.size() > kLongestName) {
    throw UsageError("rpc::init: the worker's name '" + name + "' has " +
                     std::to_string(name.size()) + " characters; expected 1 to " +
                     std::to_string(kLongestName));
  }
  check_timeout("rpc::init: timeout", options.timeout);
  check_timeout("rpc::init: shutdown_timeout", options.shutdown_timeout);
  check_timeout("rpc::init: stop_timeout", options.stop_timeout);
  if (options.threads < 2) {
    throw UsageError("rpc::init: " + std::to_string(options.threads) +
                     " threads; expected at least 2");
  }
  if (options.max_pending < 1) {
    throw UsageError("rpc::init: max_pending is " + std::to_string(options.max_pending) +
                     "; expected at least 1");
  }
}

std::string secret_of(const Options& options) {
  std::string secret =
      options.secret.empty() ? env_string("LOCKSTEP_RPC_SECRET").value_or("") : options.secret;
  if (!secret.empty() && secret.size() < kShortestSecret) {
    throw UsageError("rpc::init: the secret has " + std::to_string(secret.size()) +
                         " characters; expected at least " + std::to_string(kShortestSecret),
                     "`openssl rand -hex 32` makes one");
  }
  return secret;
}

/// A number of this job alone, which rank 0 makes. Each rank shows that it has the same secret
/// without telling it.
std::string meet_with_secret(Store store, const World& world, const std::string& secret) {
  if (world.rank() == 0) store.set("job", random_hex(16));
  const std::string job = store.get("job");
  const auto proof = [&](size_t rank) {
    if (secret.empty()) return std::string("none");
    const std::string code = detail::hmac_sha256(secret, job + "/" + std::to_string(rank));
    return sha256_hex(code);
  };
  const auto self = static_cast<size_t>(world.rank());
  const auto proofs = detail::exchange(store, "secret", world.rank(), world.size(), proof(self));
  for (size_t rank = 0; rank < proofs.size(); ++rank) {
    if (proofs[rank] == proof(rank)) continue;
    throw UsageError("rpc::init: ranks " + std::to_string(std::min(rank, self)) + " and " +
                         std::to_string(std::max(rank, self)) + " have different secrets",
                     "give all ranks the same LOCKSTEP_RPC_SECRET or Options::secret");
  }
  return job;
}

/// Each rank says its name, so that a name that is taken is an error which names both. Returns all.
std::vector<std::string> meet(Store store, const World& world, const std::string& name) {
  auto names = detail::exchange(store, "name", world.rank(), world.size(), name);
  for (size_t rank = 0; rank < names.size(); ++rank) {
    const auto first = std::find(names.begin(), names.end(), names[rank]) - names.begin();
    if (static_cast<size_t>(first) == rank) continue;
    throw UsageError("rpc::init: ranks " + std::to_string(first) + " and " + std::to_string(rank) +
                     " are both named '" + names[rank] + "'");
  }
  return names;
}

}  // namespace

Agent::Agent(std::shared_ptr<detail::Worker> worker) : worker_(std::move(worker)) {}

Agent::~Agent() {
  if (!worker_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    shutdown_now();
    return;
  }
  try {
    shutdown();
  } catch (const std::exception& error) {
    log_error(error.what());
  }
}

const std::string& Agent::address() const {
  return worker_->address();
}

const std::string& Agent::name() const {
  return worker_->name();
}

std::vector<std::string> Agent::workers() const {
  return worker_->peers().names();
}

std::vector<std::string> Agent::lost_workers() const {
  return worker_->peers().lost();
}

void Agent::shutdown() {
  worker_->leave_together();
}

void Agent::shutdown_now() noexcept {
  worker_->leave_now();
}

namespace {

detail::WorkerSetup setup_of(const Options& options, const std::string& name) {
  detail::register_optimizer_functions();
  detail::WorkerSetup setup;
  setup.options = options;
  setup.options.secret = secret_of(options);
  setup.name = name;
  return setup;
}

constexpr const char* kCarrier = "carrier";

using detail::Carrier;

Carrier carrier_of(const World& world, const Options& options) {
  if (world.local_size() != world.size()) return Carrier::network;
  // TensorPipe needs what our own shared memory does.
  return options.poll && !host_key().empty() ? Carrier::polled_memory : Carrier::loopback;
}

/// As rank 0 has told it.
Carrier carrier_in(Store& store) {
  return static_cast<Carrier>(parse_int(store.get(kCarrier)).value_or(0));
}

/// Where others reach this worker. `towards_group`: this host's address that the group's other
/// hosts reach.
std::string host_of(Carrier carrier, const std::function<std::string()>& towards_group) {
  if (carrier != Carrier::network) return "127.0.0.1";
  const std::string interface = env_string("TP_SOCKET_IFNAME").value_or("");
  if (interface.empty()) return towards_group();
  std::string address = address_of_interface(interface);
  if (address.empty()) {
    throw UsageError("rpc: TP_SOCKET_IFNAME: this host has no interface '" + interface +
                         "' that is up and has an address",
                     "name one that `ip address` shows, or unset the variable");
  }
  return address;
}

/// Of "host:port/restarts".
std::string store_host(const std::string& address) {
  return without_brackets(address.substr(0, address.rfind(':')));
}

std::shared_ptr<detail::FastLink> link_of(const World& world, const detail::WorkerSetup& setup) {
  return detail::meet(setup.store, {.rank = world.rank(),
                                    .size = world.size(),
                                    .wanted = setup.options.fast_calls,
                                    .shared_memory = setup.options.shared_memory,
                                    .host = setup.host,
                                    .has_processor = usable_processors() >= world.local_size(),
                                    .secret = setup.options.secret,
                                    .job = setup.job});
}

}  // namespace

Agent init(const World& world, const std::string& name, const Options& options) {
  check_options(name, options);
  if (world.size() > INT16_MAX) {
    throw UsageError("rpc::init: " + std::to_string(world.size()) +
                     " ranks; LibTorch's RPC has at most " + std::to_string(INT16_MAX));
  }
  auto setup = setup_of(options, name);
  setup.store = prefix_store("rpc", world.store().clone());
  setup.id = world.rank();
  if (world.rank() == 0) {
    setup.store.set(kCarrier, std::to_string(static_cast<int>(carrier_of(world, options))));
    setup.store.add("workers", world.size());
  }
  setup.carrier = carrier_in(setup.store);
  setup.host = host_of(setup.carrier, [&] { return world.address(); });
  setup.names = meet(setup.store, world, name);
  setup.job = meet_with_secret(setup.store, world, setup.options.secret);
  if (world.size() > 1) setup.link = link_of(world, setup);
  setup.address = world.store_address();
  return Agent(detail::Worker::start(setup));
}

Agent join(const std::string& address, const std::string& name, const Options& options) {
  check_options(name, options);
  auto setup = setup_of(options, name);
  setup.store = prefix_store("rpc", store_of_job(address, options.timeout));
  setup.job = setup.store.get("job");
  setup.carrier = carrier_in(setup.store);
  setup.host = host_of(setup.carrier, [&] { return reachable_address(store_host(address)); });
  // Numbers are never used twice, so nothing of a dead worker is taken for the new one's.
  const int64_t id = setup.store.add("workers", 1) - 1;
  if (id > INT16_MAX) {
    throw UsageError("rpc::join: the group has had " + std::to_string(INT16_MAX) +
                     " workers; LibTorch's RPC has no more numbers");
  }
  setup.id = static_cast<int>(id);
  setup.address = address;
  return Agent(detail::Worker::start(setup));
}

}  // namespace lockstep::rpc
