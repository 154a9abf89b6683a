#include "lockstep/comm/world.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/arrival.h"
#include "lockstep/base/descriptors.h"
#include "lockstep/base/duration.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/heap.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/settings.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/hierarchical/host_layout.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/forming_watch.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/comm/rendezvous/rendezvous.h"
#include "lockstep/comm/shared_memory/host_key.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kDefaultTimeout{120'000};
constexpr milliseconds kLeaveTimeout{5'000};
constexpr milliseconds kNewsEvery{5'000};
/// How often a rank that waits for votes looks for Python's ranks. All ranks ask one store, so many
/// of them look less often.
constexpr milliseconds kLookEvery{50}, kSeldomLookEvery{500};
constexpr int kFewRanks = 32;

milliseconds timeout_of(const InitOptions& options) {
  if (options.timeout) check_timeout("init", *options.timeout);
  return options.timeout ? *options.timeout : timeout_setting().value_or(kDefaultTimeout);
}

/// For the connections of a rank to its peers, and of all ranks to the store where this one holds
/// it.
void make_room(const JobEnvironment& job, bool holds_store) {
  constexpr int kOwn = 12;  // Counted over each backend, and a little more.
  const int connections = job.world_size * (holds_store ? 3 : 1);
  make_room_for_descriptors(kOwn + connections, "rank " + std::to_string(job.rank) + " of " +
                                                    std::to_string(job.world_size));
}

// Fills in which of this host's ranks this one is where the launcher did not say: by the hosts that
// the ranks have published. Ranks that publish none (Python's) count as of another host.
void find_local_ranks(Store store, JobEnvironment& job) {
  std::vector<std::string> hosts;
  for (const auto& key : numbered_keys("host/", job.world_size)) {
    const bool mine = static_cast<int>(hosts.size()) == job.rank;
    hosts.push_back(mine ? host_id() : store.check({key}) ? store.get(key) : "another");
  }
  const auto layout = hierarchical::HostLayout::of(hosts, job.rank);
  job.local_rank = layout.local;
  job.local_size = static_cast<int>(layout.mine().size());
  if (job.node_rank < 0) job.node_rank = layout.host;
}

void default_local_ranks(JobEnvironment& job) {
  if (!job.single_host) return;
  if (job.local_rank < 0) job.local_rank = job.rank;
  if (job.local_size < 0) job.local_size = job.world_size;
  if (job.node_rank < 0) job.node_rank = 0;
}

[[noreturn]] void throw_missing(Store store, const std::vector<std::string>& keys) {
  std::vector<int> missing;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (!store.check({keys[rank]})) missing.push_back(static_cast<int>(rank));
  }
  throw_late("init: of " + std::to_string(keys.size()) + " ranks, ", missing, store.timeout(),
             "did every rank start, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?");
}

void wait_for_all(Store store, const std::string& what, int world_size) {
  const auto keys = numbered_keys(what + "/", world_size);
  try {
    store.wait(keys);
  } catch (const TimeoutError&) {
    throw_missing(store, keys);
  }
}

/// How many have come, for a person who sees nothing else while many ranks start.
void log_arrivals(Store store, const std::vector<std::string>& keys) {
  const auto came = std::count_if(keys.begin(), keys.end(),
                                  [&](const std::string& key) { return store.check({key}); });
  log_info("waiting for the ranks: " + std::to_string(came) + " of " + std::to_string(keys.size()) +
           " have come");
}

// Whether all ranks vote. False as soon as one has come that is Python's, which knows nothing of it
// but publishes the address at which Gloo meets the others. `gloo`: where it does that.
bool all_vote(Store store, Store gloo, int world_size, bool tells,
              const std::function<bool()>& cancelled) {
  const auto keys = numbered_keys("vote/", world_size);
  const auto deadline = std::chrono::steady_clock::now() + store.timeout();
  const auto here = [&](const std::vector<std::string>& asked) { return store.check(asked); };
  Every news(kNewsEvery), look(world_size <= kFewRanks ? kLookEvery : kSeldomLookEvery);
  Arrival arrival(keys);
  for (PollPause pause; !arrival.complete(here); pause.sleep()) {
    if (tells && news.due()) log_arrivals(store, keys);
    const bool looks = look.due();
    if (looks && cancelled && cancelled())
      throw PeerLostError("init: " + describe(cancelled_generation()), {}, cancelled_generation());
    for (int rank = 0; looks && rank < world_size; ++rank) {
      if (gloo.check({"0/" + std::to_string(rank)})) return false;
    }
    if (std::chrono::steady_clock::now() >= deadline) throw_missing(store, keys);
  }
  return true;
}

/// What a rank says of itself before the group is formed.
struct Vote {
  std::string asked;  ///< The backend it was told to use, or auto.
  std::string kind;   ///< nccl where it has a device and may use it, else cpu.
  std::string host_key;

  std::string encoded() const { return nlohmann::json::array({asked, kind, host_key}).dump(); }
  static Vote decode(const std::string& text) {
    const auto fields = nlohmann::json::parse(text);
    return {fields.at(0), fields.at(1), fields.at(2)};
  }
};

Vote own_vote(const InitOptions& options, const JobEnvironment& job) {
  // Of a launcher that shows each rank its own device only, all local ranks are 0.
  const bool may = options.backend == "nccl" || (options.backend == "auto" && !options.cpu_only);
  const bool cuda = may && backend_info("nccl").available &&
                    at::detail::getCUDAHooks().deviceCount() > std::max(0, job.local_rank);
  return {options.backend, cuda ? "nccl" : "cpu", host_key()};
}

/// By rank; where not `all` are known to be there, those that are.
std::map<int, Vote> read_votes(Store store, int world_size, bool all) {
  std::map<int, Vote> votes;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = "vote/" + std::to_string(rank);
    if (all || store.check({key})) votes[rank] = Vote::decode(store.get(key));
  }
  return votes;
}

// `auto` agrees with all.
void expect_one_backend(const std::map<int, Vote>& votes) {
  const std::pair<const int, Vote>* first = nullptr;
  for (const auto& vote : votes) {
    if (vote.second.asked == "auto") continue;
    if (!first) first = &vote;
    if (vote.second.asked == first->second.asked) continue;
    const auto said = [&](const auto& one) {
      return "rank " + std::to_string(one.first) + " has '" + one.second.asked + "'";
    };
    throw MismatchError("init: the ranks' backends differ: " + said(*first) + ", " + said(vote),
                        "give all ranks the same --backend",
                        mismatch_of({first->first, vote.first}));
  }
}

std::string choose_from(const std::map<int, Vote>& votes) {
  bool all_cuda = true;
  std::vector<std::string> host_keys;
  for (const auto& [rank, vote] : votes) {
    if (vote.asked != "auto") return vote.asked;
    all_cuda = all_cuda && vote.kind == "nccl";
    host_keys.push_back(vote.host_key);
  }
  return all_cuda ? "nccl" : hierarchical::backend_for(host_keys);
}

/// NCCL waits without an end for a rank that cannot come.
void expect_devices(const std::map<int, Vote>& votes) {
  for (const auto& [rank, vote] : votes) {
    if (vote.kind == "nccl") continue;
    throw UsageError("init: rank " + std::to_string(rank) +
                         " has no CUDA device of its own, which backend 'nccl' needs",
                     "start at most one rank a device, or use --backend gloo");
  }
}

// Every rank votes, so that all choose alike even where some hosts have fewer devices, and where
// they cannot, all are told. Python's ranks do not vote: who may meet those does not wait for it.
std::string choose_backend(const InitOptions& options, Store store, Store gloo,
                           const JobEnvironment& job) {
  const bool automatic = options.backend == "auto";
  const Vote mine = own_vote(options, job);
  std::map<int, Vote> votes{{job.rank, mine}};
  if (job.world_size > 1) {
    store.set("vote/" + std::to_string(job.rank), mine.encoded());
    const bool waits = options.backend != "gloo";
    const bool all =
        waits && all_vote(store, gloo, job.world_size, job.rank == 0, options.cancelled);
    votes = read_votes(store, job.world_size, all);
    expect_one_backend(votes);
    if (waits && !all && automatic) return "gloo";
    if (waits && !all)
      throw MismatchError("init: rank " + std::to_string(job.rank) + " has the backend '" +
                              options.backend + "', but Python's ranks are of the job",
                          "use --backend gloo, or auto, which takes it then");
  }
  const std::string chosen = automatic ? choose_from(votes) : options.backend;
  if (chosen == "nccl" && backend_info(chosen).available) expect_devices(votes);
  return chosen;
}

constexpr const char* kGenerations = "generation/";

/// All keys of a generation. Those of the first lie where Python's ranks look for them.
Store keys_of_generation(const Store& root, int64_t generation) {
  return generation == 0 ? root : prefix_store(kGenerations + std::to_string(generation), root);
}

Store own_keys(const Store& of_generation) {
  return prefix_store("lockstep", of_generation);
}

/// Deletes what earlier generations left: the keys of members that died as well. The World has
/// formed, so a store that fails here fails nothing: its next use tells.
void forget_generations_before(const Store& root, int64_t generation) noexcept {
  try {
    const auto store = native_store(root);
    for (const std::string& key : store->listKeys()) {
      const bool first = key.starts_with("default_pg/") || key.starts_with("lockstep/");
      const auto words = split(key, '/');
      const auto number = key.starts_with(kGenerations) ? parse_int(words[1]) : std::nullopt;
      if (first || (number && *number < generation)) store->deleteKey(key);
    }
  } catch (const std::exception& error) {
    log_debug(std::string("deleting the keys of earlier generations: ") + error.what());
  }
}

Store program_keys(const Store& own) {
  return prefix_store("user", own);
}

/// torchrun keeps one store for all its restarts. Our launcher, and who holds a store of its own,
/// makes a new one. There generation 0 is also what ranks in Python take part in.
int64_t generation_of(const InitOptions& options, const JobEnvironment& job) {
  if (options.generation >= 0) return options.generation;
  return job.agent_store && job.launcher == "torchrun" ? job.restart_count : 0;
}

Rendezvous plan_of(const InitOptions& options, milliseconds timeout) {
  if (options.mpi_communicator) {
    if (!options.store && options.rank < 0 && options.world_size < 0)
      return plan_over_mpi(options.mpi_communicator, timeout, options.backend == "mpi");
    throw UsageError("init: mpi_communicator is given beside a store, a rank or a world_size",
                     "leave those out: the communicator says who the ranks are");
  }
  if (options.store) return plan_over_store(options.store, options.rank, options.world_size);
  return plan_rendezvous(options.init_method, options.rank, options.world_size,
                         [](const std::string& name) { return env_string(name); });
}

}  // namespace

class World::Impl {
 public:
  explicit Impl(const InitOptions& options);
  ~Impl() { close(std::uncaught_exceptions() > exceptions_at_start_); }
  void close(bool failing) noexcept;

  JobEnvironment job;
  int64_t generation = 0;
  std::string store_address;
  std::shared_ptr<GroupContext> context;
  Store store;  // The program's own keys.
  ProcessGroup group;
  bool failing() const { return std::uncaught_exceptions() > exceptions_at_start_; }

 private:
  void tell_leave(bool failing);

  const int exceptions_at_start_ = std::uncaught_exceptions();
  bool holds_store_ = false;
  bool closed_ = false;
  Store root_;
};

World::Impl::Impl(const InitOptions& options) : context(std::make_shared<GroupContext>()) {
  const milliseconds timeout = timeout_of(options);
  if (options.keep_freed_memory) keep_freed_memory();
  context->debug = options.debug ? *options.debug : debug_level();
  context->cancelled = options.cancelled;
  if (options.backend != "auto") backend_info(options.backend);
  Rendezvous plan = plan_of(options, timeout);
  find_master(plan, timeout);
  job = plan.job;
  generation = generation_of(options, job);
  if (job.slurm_tasks > 1) {
    log_info("init: 1 rank, as this is a shell in Slurm's " + job.slurm_allocation +
             "; srun starts its " + std::to_string(job.slurm_tasks) + " tasks");
  }
  default_local_ranks(job);
  context->rank = job.rank;
  context->world_size = job.world_size;
  context->timeout = timeout;
  context->interface =
      options.interface.empty() ? env_string("GLOO_SOCKET_IFNAME").value_or("") : options.interface;
  holds_store_ = holds_store(plan);
  if (job.world_size > 1) make_room(job, holds_store_);
  root_ = options.store ? options.store.clone() : open_store(plan, timeout);
  if (options.store) root_.set_timeout(timeout);
  const Store keys = keys_of_generation(root_, generation);
  context->store = prefix_store("default_pg", keys);
  context->own_store = own_keys(keys);
  if (plan.kind == Rendezvous::Kind::tcp)  // "host:port/generation"
    store_address =
        endpoint_text(job.master_addr, job.master_port) + "/" + std::to_string(generation);
  context->address = job.single_host ? "127.0.0.1" : reachable_address(job.master_addr);
  store = program_keys(context->own_store);

  const bool local_unknown = job.local_rank < 0 || job.local_size < 0;
  if (local_unknown) context->own_store.set("host/" + std::to_string(job.rank), host_id());
  const bool wants_devices =
      options.backend == "nccl" || (options.backend == "auto" && backend_info("nccl").available);
  if (local_unknown && wants_devices) {
    wait_for_all(context->own_store, "host", job.world_size);
    find_local_ranks(context->own_store, job);
  }
  // Where Python's default group keeps Gloo's addresses; see ProcessGroup::Impl.
  const Store gloo = prefix_store("cpu/", prefix_store("0/", context->store));
  context->backend = choose_backend(options, context->own_store, gloo, job);
  if (context->backend == "nccl") {
    context->device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(job.local_rank));
  }
  std::vector<int> everyone;
  for (int rank = 0; rank < job.world_size; ++rank) everyone.push_back(rank);
  group = ProcessGroup(form_group(context, kDefaultGroup, everyone, context->backend));
  if (job.local_rank < 0 || job.local_size < 0) find_local_ranks(context->own_store, job);
  forget_meeting(job);
  if (generation > 0 && job.rank == 0) forget_generations_before(root_, generation);
}

void World::Impl::tell_leave(bool failing) {
  // A store that has vanished with its host would hold up who goes on without it.
  const bool is_over = context->cancelled && context->cancelled();
  if (job.world_size == 1 || !root_ || is_over) return;
  Store own = context->own_store;
  own.set_timeout(kLeaveTimeout);
  // The others' last use of the store is this; who holds it outlives that.
  if (!holds_store_) {
    own.set(leave_key(job.rank), "1");
    return;
  }
  if (failing) return;
  std::vector<std::string> keys;
  for (int rank = 1; rank < job.world_size; ++rank) {
    // Python's ranks tell nothing: those that never announced themselves are not waited for.
    if (own.check({member_key(kDefaultGroup, rank)})) keys.push_back(leave_key(rank));
  }
  if (!keys.empty()) own.wait(keys, kLeaveTimeout);
}

void World::Impl::close(bool failing) noexcept {
  if (closed_) return;
  closed_ = true;
  std::vector<std::weak_ptr<ProcessGroup::Impl>> groups;
  {
    const std::lock_guard lock(context->mutex);
    groups.swap(context->groups);
  }
  for (auto entry = groups.rbegin(); entry != groups.rend(); ++entry) {
    if (const auto impl = entry->lock()) impl->close(failing);
  }
  try {
    tell_leave(failing);
  } catch (const std::exception& error) {
    log_debug(std::string("closing the store: ") + error.what());
  }
  store = {};
  context->store = {};
  context->own_store = {};
  root_ = {};
  mpi::end(failing);
}

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

int World::rank() const {
  return impl_->job.rank;
}
int World::size() const {
  return impl_->job.world_size;
}
int World::local_rank() const {
  return std::max(0, impl_->job.local_rank);
}
int World::local_size() const {
  return std::max(1, impl_->job.local_size);
}
int World::node_rank() const {
  return std::max(0, impl_->job.node_rank);
}
const std::string& World::launcher() const {
  return impl_->job.launcher;
}
int64_t World::generation() const {
  return impl_->generation;
}
c10::Device World::device() const {
  return impl_->context->device;
}
const std::string& World::address() const {
  return impl_->context->address;
}
const std::string& World::store_address() const {
  return impl_->store_address;
}
const ProcessGroup& World::group() const {
  return impl_->group;
}
const Store& World::store() const {
  return impl_->store;
}

ProcessGroup World::new_group(const std::vector<int>& ranks, const std::string& backend,
                              bool use_local_synchronization) const {
  auto& context = impl_->context;
  if (!context->store) throw CommError("new_group: the World is closed");
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.empty() || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw UsageError(sorted.empty() ? "new_group: no ranks" : "new_group: a rank is given twice");
  }
  if (sorted.front() < 0 || sorted.back() >= size()) {
    throw UsageError("new_group: rank " +
                     std::to_string(sorted.front() < 0 ? sorted.front() : sorted.back()) +
                     " is out of range; the job has ranks 0 to " + std::to_string(size() - 1));
  }
  const std::string wanted = backend.empty() ? context->backend : backend;
  backend_info(wanted);
  const bool member = std::binary_search(sorted.begin(), sorted.end(), rank());
  std::string name;
  if (use_local_synchronization) {
    if (!member) return {};
    name = "local." + std::to_string(context->local_groups[sorted]++);
    for (const int one : sorted) name += "_" + std::to_string(one);
  } else {
    name = std::to_string(context->next_group++);
    agree_on_group(context, name, sorted, wanted);
    if (!member) return {};
  }
  return ProcessGroup(form_group(context, name, sorted, wanted));
}

void World::close() noexcept {
  if (impl_) impl_->close(impl_->failing());
}

World init(const InitOptions& options) {
  return World(std::make_unique<World::Impl>(options));
}

Store store_of_job(const std::string& address, milliseconds timeout) {
  const size_t slash = std::min(address.rfind('/'), address.size());
  const auto endpoint = parse_endpoint(address.substr(0, slash));
  const auto generation =
      parse_int(std::string_view(address).substr(std::min(slash + 1, address.size())));
  if (!endpoint || endpoint->first.empty() || !generation || *generation < 0) {
    throw UsageError("'" + address + "' is no address of a job's store; expected HOST:PORT/NUMBER",
                     "World::store_address() of one of the job's ranks gives it");
  }
  TcpStoreOptions options;
  options.host = without_brackets(endpoint->first);
  options.port = endpoint->second;
  options.timeout = timeout;
  return program_keys(own_keys(keys_of_generation(tcp_store(options), *generation)));
}

}  // namespace lockstep
