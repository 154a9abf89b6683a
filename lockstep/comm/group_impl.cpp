#include "lockstep/comm/group_impl.h"

#include <algorithm>
#include <future>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/arrival.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/native_log.h"
#include "lockstep/comm/forming_watch.h"
#include "lockstep/comm/native_store.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr std::chrono::milliseconds kAbortPatience{300};
constexpr std::chrono::milliseconds kFormingPatience{5000};

/// Under this key a rank tells that it has formed the group.
std::string formed_key(const std::string& group, int rank) {
  return member_key(group, rank) + "/formed";
}

// The ranks of the group that have not come: neither announced as ours do nor, as Python's do not,
// published an address for Gloo's first context under their rank.
std::vector<int> missing_ranks(GroupContext& context, const std::string& name,
                               const std::vector<int>& global_ranks, Store& backend_store) {
  std::vector<int> missing;
  for (size_t i = 0; i < global_ranks.size(); ++i) {
    const bool announced = context.own_store.check({member_key(name, static_cast<int>(i))});
    if (!announced && !backend_store.check({"0/" + std::to_string(i)})) {
      missing.push_back(global_ranks[i]);
    }
  }
  return missing;
}

constexpr const char* kDidTheyStart =
    "did every rank start, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE? A rank that "
    "failed has said why above";
constexpr const char* kDoTheyReachEachOther =
    "the hosts must reach each other: GLOO_SOCKET_IFNAME, or the option `interface`, names the "
    "network interface; else a firewall drops what is sent";
constexpr const char* kAllCallNewGroup =
    "every rank of the job calls new_group, also those that are not of the group. Where only its "
    "members call, pass use_local_synchronization";

// What a backend, or the store below it, threw while the group formed.
[[noreturn]] void throw_forming(GroupContext& context, const std::string& name,
                                const std::vector<int>& global_ranks, Store& backend_store,
                                FormingWatch& watch, const std::exception_ptr& error) {
  const std::string what = forming(context, name, global_ranks.size());
  const std::string reason = what + ": " + whole_text(error);
  const FailureKind kind = failure_kind(error);
  std::vector<int> missing;
  try {
    // Gloo does not see who ends while it connects.
    if (is_lost(kind) || kind == FailureKind::timeout) watch.throw_if_lost(watch.others());
    missing = missing_ranks(context, name, global_ranks, backend_store);
  } catch (const PeerLostError& lost) {
    watch.throw_if_found();
    // Of the store, with its hint. Where the backend failed over something else, that comes first.
    throw PeerLostError((is_lost(kind) ? what : reason) + ": " + lost.what(), /*hint=*/{});
  } catch (const Error&) {
    // The reason at hand must do.
  }
  if (kind == FailureKind::connection) throw PeerLostError(reason);
  if (!missing.empty()) throw_late(what + ": ", missing, context.timeout, kDidTheyStart);
  if (kind == FailureKind::timeout || kind == FailureKind::silence)
    throw TimeoutError(reason, kDoTheyReachEachOther);
  throw CommError(reason);
}

c10::intrusive_ptr<c10d::Backend> with_checks(const GroupContext& context, MadeBackend made,
                                              const c10::intrusive_ptr<c10d::Store>& store,
                                              const BackendOptions& options) {
  CheckedBackendOptions checks = checks_of(options, made.traits);
  checks.steps = options.steps;
  checks.recorded = true;
  if (context.cancelled && made.traits.misses_deaths) {
    checks.context =
        std::make_shared<CheckContext>(store, options.rank, options.size, options.global_ranks,
                                       options.group_name, options.timeout);
    checks.context->set_failure_callback(
        [cancelled = context.cancelled]() -> std::optional<Failure> {
          return cancelled() ? std::optional(cancelled_generation()) : std::nullopt;
        });
  }
  return make_checked_backend(std::move(made.backend), store, std::move(checks));
}

/// Waits until ranks have told that they come to a further group: its members, or all ranks of the
/// job. The default group knows which processes they are. One that ends before it comes is noticed
/// on its own host, which tells the others. Python's ranks tell nothing, and are met by the backend
/// only. `key`: where the rank at an index of `ranks` tells it.
void await_ranks(const std::shared_ptr<GroupContext>& context, const std::string& name,
                 const std::vector<int>& ranks,
                 std::string (*key)(const std::string& name, int index), const char* hint) {
  Store store = context->own_store;
  std::vector<std::string> known, keys;
  std::vector<int> expected;  // Indices of ranks; those of ours.
  for (const int rank : ranks) known.push_back(member_key(kDefaultGroup, rank));
  const bool all = store.check(known);
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!all && !store.check({known[i]})) continue;
    expected.push_back(static_cast<int>(i));
    keys.push_back(key(name, expected.back()));
  }
  Arrival arrival(keys);
  const auto absent = [&] {
    std::vector<int> indices;
    for (size_t i = arrival.seen(); i < keys.size(); ++i)
      if (!store.check({keys[i]})) indices.push_back(expected[i]);
    return indices;
  };
  FormingWatch watch(context, name, ranks, FormingWatch::Phase::meeting);
  if (watch.await(
          arrival, [&](const auto& some) { return store.check(some); }, absent))
    return;
  std::vector<int> missing;
  for (const int index : absent()) missing.push_back(ranks[static_cast<size_t>(index)]);
  throw_late(forming(*context, name, ranks.size()) + ": ", missing, context->timeout, hint);
}

/// Under this key a rank of the job tells that it has called new_group for the group.
std::string asked_key(const std::string& group, int rank) {
  return "new_group/" + group + "/" + std::to_string(rank);
}

/// `mine`, `other`: what one rank asked for, as agree_on_group writes it.
[[noreturn]] void throw_other_group(const json& mine, const json& other, const std::string& name) {
  const auto said = [](const json& asked) {
    return "rank " + asked["rank"].dump() + " gave the ranks " + asked["ranks"].dump() +
           " and the backend " + asked["backend"].get<std::string>();
  };
  Failure failure{.kind = Failure::Kind::mismatch};
  for (const json& asked : {mine, other})
    failure.ranks.push_back(
        {.number = asked["rank"], .kind = failure.kind, .asked_group = asked["ranks"]});
  throw MismatchError("new_group, group '" + name + "': " + said(mine) + ", but " + said(other),
                      kAllCallNewGroup, failure);
}

// Lets a backend go on a thread of its own: Gloo's destructor waits for what is in flight, which on
// a rank that has failed may take the whole time-out. If it is not done shortly it is left to the
// end of the process.
void release_impatiently(c10::intrusive_ptr<c10d::ProcessGroup> native,
                         c10::intrusive_ptr<c10d::Backend> backend) {
  std::promise<void> done;
  const auto released = done.get_future();
  std::thread([done = std::move(done), native = std::move(native),
               backend = std::move(backend)]() mutable {
    native.reset();
    backend.reset();
    done.set_value();
  }).detach();
  released.wait_for(kAbortPatience);
}

}  // namespace

std::string leave_key(int rank) {
  return "leave/" + std::to_string(rank);
}

std::string member_key(const std::string& group, int rank) {
  return "group/" + group + "/" + std::to_string(rank);
}

ProcessGroup::Impl::Impl(std::shared_ptr<GroupContext> context, std::string name,
                         std::vector<int> global_ranks, int rank, std::string backend)
    : context(std::move(context)),
      name(std::move(name)),
      global_ranks(std::move(global_ranks)),
      rank(rank),
      size(static_cast<int>(this->global_ranks.size())),
      backend_name(std::move(backend)),
      timeout(this->context->timeout),
      device_(backend_info(backend_name).traits.on_cuda ? this->context->device
                                                        : c10::Device(c10::kCPU)),
      waiters_(std::make_shared<detail::WaiterPool>()) {
  // The nesting of Python's init_process_group and new_group, so that its ranks meet ours: further
  // groups lie within the default group's prefix.
  Store parent = this->context->store;
  if (this->name != kDefaultGroup) parent = prefix_store(std::string(kDefaultGroup) + "/", parent);
  const std::string device_name = device_.is_cuda() ? "cuda" : "cpu";
  auto group_store = c10::make_intrusive<c10d::PrefixStore>(this->name + "/", native_store(parent));
  const auto watch = std::make_shared<FormingWatch>(this->context, this->name, this->global_ranks,
                                                    FormingWatch::Phase::connecting);
  const auto backend_store = watched_store(device_name + "/", group_store, watch);
  auto check_store = native_store(prefix_store(check_part(this->name), this->context->own_store));
  BackendOptions options;
  options.store = backend_store;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  options.interface = this->context->interface;
  options.address = this->context->address;
  options.host = this->context->host;
  options.device = device_;
  options.group_name = this->name;
  options.global_ranks = this->global_ranks;
  options.debug = this->context->debug;
  options.steps = steps;
  options.look = [watch](const std::vector<int>& missing) {
    missing.empty() ? watch->throw_if_cancelled() : watch->throw_if_lost(missing);
  };
  try {
    const QuietNativeLog quiet;
    announce_checks(*check_store, rank, this->name, this->context->debug);
    auto made = make_backend(backend_name, options);
    traits_ = made.traits;
    backend_ = with_checks(*this->context, std::move(made), check_store, options);
  } catch (const TimeoutError&) {
    watch->throw_if_lost(watch->others());
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    watch->throw_if_found();
    Store view = wrap_store(backend_store);
    throw_forming(*this->context, this->name, this->global_ranks, view, *watch,
                  std::current_exception());
  }
  native_ = c10::make_intrusive<c10d::ProcessGroup>(group_store, rank, size);
  const auto type = c10d::ProcessGroup::strToBackendType(backend_name);
  native_->setDefaultBackend(type);
  if (device_.is_cuda()) native_->setBoundDeviceId(device_);
  native_->setBackend(device_.type(), type, backend_);
  if (backend_info(backend_name).traits.takes_cuda) native_->setBackend(c10::kCUDA, type, backend_);
  native_->setGroupName(this->name);
  if (traits_.connects_one_by_one) this->context->own_store.set(formed_key(this->name, rank), "1");
}

ProcessGroup::Impl::~Impl() {
  close(std::uncaught_exceptions() > 0);
}

c10d::Backend& ProcessGroup::Impl::backend() const {
  if (!backend_) throw CommError("group '" + name + "' is closed", "keep the World alive longer");
  return *backend_;
}

c10d::ProcessGroup& ProcessGroup::Impl::native() const {
  backend();
  return *native_;
}

Work ProcessGroup::Impl::make_work(c10::intrusive_ptr<c10d::Work> work,
                                   std::vector<at::Tensor> outputs,
                                   std::vector<at::Tensor> kept_alive, bool p2p) const {
  return Work(std::make_shared<detail::WorkState>(
      std::move(work), std::move(outputs), std::move(kept_alive),
      p2p && traits_.tells_only_waiters ? waiters_ : nullptr));
}

void ProcessGroup::Impl::close(bool abort) noexcept {
  if (!backend_) return;
  waiters_->close();
  // Gloo has no shutdown of its own, its destructor drains the queue and joins the threads; the
  // checks tell those who wait for this rank.
  try {
    if (abort) {
      backend_->abort();
      release_impatiently(std::move(native_), std::move(backend_));
    } else {
      await_formed_by_all();
      backend_->shutdown();
      if (has_abandoned_work(*backend_))
        release_impatiently(std::move(native_), std::move(backend_));
    }
  } catch (const std::exception& error) {
    log_warning("closing the group '" + name + "': " + error.what());
  }
  native_.reset();
  backend_.reset();
}

// Python's ranks tell nothing, and are not waited for. A member that never forms the group has told
// why.
void ProcessGroup::Impl::await_formed_by_all() {
  if (!traits_.connects_one_by_one || !context->own_store) return;
  try {
    std::vector<std::string> keys;
    for (int member = 0; member < size; ++member)
      if (context->own_store.check({member_key(name, member)}))
        keys.push_back(formed_key(name, member));
    if (context->own_store.check(keys)) return;
    context->own_store.wait(keys, std::min(timeout, kFormingPatience));
  } catch (const Error& error) {
    log_debug("closing the group '" + name + "': " + error.what());
  }
}

void agree_on_group(const std::shared_ptr<GroupContext>& context, const std::string& name,
                    const std::vector<int>& ranks, const std::string& backend) {
  const json mine{{"rank", context->rank}, {"ranks", ranks}, {"backend", backend}};
  const std::string first_key = "new_group/" + name + "/first";
  const std::string other_key = "new_group/" + name + "/other";
  Store store = context->own_store;
  const json first = json::parse(store.compare_set(first_key, "", mine.dump()));
  const bool agrees = mine["ranks"] == first["ranks"] && mine["backend"] == first["backend"];
  // Before this rank has come: who has seen all come sees it.
  if (!agrees) store.set(other_key, mine.dump());
  store.set(asked_key(name, context->rank), "1");
  if (!agrees) throw_other_group(mine, first, name);
  if (!std::ranges::binary_search(ranks, context->rank)) return;
  std::vector<int> everyone(static_cast<size_t>(context->world_size));
  std::iota(everyone.begin(), everyone.end(), 0);
  await_ranks(context, name, everyone, asked_key, kAllCallNewGroup);
  if (store.check({other_key})) throw_other_group(mine, json::parse(store.get(other_key)), name);
}

std::shared_ptr<ProcessGroup::Impl> form_group(const std::shared_ptr<GroupContext>& context,
                                               const std::string& name,
                                               const std::vector<int>& global_ranks,
                                               const std::string& backend) {
  const auto me = std::find(global_ranks.begin(), global_ranks.end(), context->rank);
  if (me == global_ranks.end()) throw UsageError("form_group: this rank is not of the group");
  const int rank = static_cast<int>(me - global_ranks.begin());
  if (context->own_store.add(member_key(name, rank), 1) > 1) {
    throw UsageError(
        "rank " + std::to_string(context->rank) + " of group '" + name +
            "' was given to two processes (or the store still holds an earlier job)",
        "give each process a rank of its own. A program that a rank has started "
        "inherits the rank's variables: start it without RANK and WORLD_SIZE (env -u). "
        "A file of file:// must be new for "
        "each job, and so must a port on which an old rank 0 may still listen");
  }
  if (name != kDefaultGroup) await_ranks(context, name, global_ranks, member_key, kDidTheyStart);
  auto impl = std::make_shared<ProcessGroup::Impl>(context, name, global_ranks, rank, backend);
  const std::lock_guard lock(context->mutex);
  context->groups.push_back(impl);
  return impl;
}

}  // namespace lockstep
