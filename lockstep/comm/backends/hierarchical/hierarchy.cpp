#include "lockstep/comm/backends/hierarchical/hierarchy.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "lockstep/comm/backends/tensor_work.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/shared_memory/host_key.h"

namespace lockstep::hierarchical {
namespace {

using backends::names_of;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// How much longer than a leader its host's ranks wait for it: it waits for the other hosts, and
/// when these are late it is the one to say who.
constexpr milliseconds kSlack{4'000};
/// How long a leader that lost another one, or waited for it in vain, looks for the cause that the
/// other host tells. The ranks there notice their own dead within some 20 ms, and their own late at
/// about the same time as the leader its own. The one that was too late for a leader's time-out is
/// the less sure cause, so the other waits longer.
constexpr milliseconds kLatePatience{600};

c10::intrusive_ptr<c10d::Store> part_of(const c10::intrusive_ptr<c10d::Store>& store,
                                        const std::string& part) {
  return c10::make_intrusive<c10d::PrefixStore>(part, store);
}

std::vector<int> picked(const std::vector<int>& names, const std::vector<int>& ranks) {
  std::vector<int> result;
  for (const int rank : ranks) result.push_back(names[static_cast<size_t>(rank)]);
  return result;
}

/// The look of a part of the group, whose members are numbered anew.
auto look_of(const BackendOptions& options, std::vector<int> members) {
  std::function<void(const std::vector<int>&)> look;
  if (options.look) {
    look = [whole = options.look, members = std::move(members)](const std::vector<int>& missing) {
      whole(picked(members, missing));
    };
  }
  return look;
}

shm::SharedGroupOptions local_options(const BackendOptions& options, const HostLayout& layout) {
  shm::SharedGroupOptions local;
  local.rank = layout.local;
  local.size = static_cast<int>(layout.mine().size());
  local.timeout = options.timeout;
  local.group = options.group_name;
  local.look = look_of(options, layout.mine());
  local.names = picked(names_of(options)->ranks, layout.mine());
  return local;
}

shm::Meeting local_meeting(const BackendOptions& options, const HostLayout& layout) {
  const auto store = part_of(options.store, "host/" + std::to_string(layout.host));
  return {[store](const std::string& name) { store->set("meeting", name); },
          [store] { return store->get_to_str("meeting"); }};
}

}  // namespace

std::string host_key_of(const BackendOptions& options) {
  const std::string key = host_key();
  return options.host.empty() || key.empty() ? key : key + "/" + options.host;
}

c10::intrusive_ptr<c10d::Store> flat_store(const BackendOptions& options) {
  return part_of(options.store, "flat");
}

std::vector<std::string> meet(const BackendOptions& options) {
  announce_checks(*flat_store(options), options.rank, options.group_name, options.debug);
  const auto keys = numbered_keys("host_key/", options.size);
  options.store->set(keys[static_cast<size_t>(options.rank)], host_key_of(options));
  options.store->wait(keys, options.timeout);
  std::vector<std::string> host_keys;
  for (const auto& one : keys) host_keys.push_back(options.store->get_to_str(one));
  return host_keys;
}

void Joining::join(const std::vector<const std::byte*>& sources, std::byte* target,
                   size_t bytes) const {
  std::vector<const void*> data(sources.begin(), sources.end());
  // In chunks that stay in the first-level cache.
  constexpr size_t kStep = 8 << 10;
  for (size_t at = 0; at < bytes; at += kStep) {
    const size_t step = std::min(kStep, bytes - at);
    kernel(target + at, data.data(), static_cast<int>(data.size()), step);
    for (auto& source : data) source = static_cast<const std::byte*>(source) + step;
  }
}

struct Hierarchy::Frame {
  uint64_t hash = 0;
  uint64_t alike = 1;  ///< 0: the calls of its host's ranks differ.
  std::array<std::byte, SmallData::kMost> data{};
};

Hierarchy::Hierarchy(const BackendOptions& options, HostLayout layout,
                     std::shared_ptr<CheckContext> checks)
    : layout_(std::move(layout)),
      steps_(options.steps),
      checks_(std::move(checks)),
      look_(options.look),
      links_(make_links(options)),
      group_(local_options(options, layout_), local_meeting(options, layout_)) {
  static_assert(sizeof(Frame) == 1024);
  told_left_.resize(static_cast<size_t>(group_.size()));
  if (layout_.leads()) {
    leaders_ = std::make_unique<Leaders>(layout_.leaders());
    frames_.resize(layout_.hosts.size());
    links_->watch({.failed = [this](const Failure& failure) { hear(failure); },
                   .left = [this](const Failure& left) { left_elsewhere_.push_back(left); },
                   .lost = [this](int host, const std::string& why) { hear(how_lost(host, why)); },
                   .tick = [this] { look_around(); }});
  }
  // Last: the checks outlive a failed start.
  checks_->set_failure_callback([this] { return failure(); });
}

void Hierarchy::exchange_over(c10::intrusive_ptr<c10d::Backend> flat) {
  if (leaders_) leaders_->use(std::move(flat));
}

std::unique_ptr<HostLinks> Hierarchy::make_links(const BackendOptions& options) const {
  if (!layout_.leads()) return nullptr;
  HostLinks::Options links;
  links.store = part_of(options.store, "links");
  links.host = layout_.host;
  for (int host = 0; host < static_cast<int>(layout_.hosts.size()); ++host)
    links.names.push_back(describe({.ranks = {leader_of(host, {})}}));
  const std::string address = address_of_interface(options.interface);
  links.address = address.empty() ? options.address : address;
  links.timeout = options.timeout;
  links.look = look_of(options, layout_.leaders());
  return std::make_unique<HostLinks>(std::move(links));
}

Hierarchy::~Hierarchy() {
  checks_->set_failure_callback({});
  tell_failure();
  links_.reset();
}

void Hierarchy::run(const shm::Call& call, milliseconds timeout,
                    const std::function<void()>& body) {
  const auto end = c10::make_scope_exit([this] { call_number_ = 0; });
  call_ = &call;
  timeout_ = timeout;
  first_step_ = true;
  frames_under_way_.clear();
  try {
    body();
  } catch (const HostFailure& failure) {
    fail(failure);
  } catch (const MismatchError&) {
    throw;
  } catch (const CommError& error) {
    // Already on the board, unless it was the flat group's.
    hear(error.failure());
    tell_failure();
    throw;
  } catch (const std::exception& error) {
    abort(call.text() + " " + error.what());
    throw;
  }
}

void Hierarchy::step(const std::function<void(std::byte*)>& give) {
  give(group_.give(group_.slot_bytes()));
  group_.arrive();
  group_.await(*call_, first_step_ ? timeout_ : timeout_ + kSlack);
  first_step_ = false;
}

void Hierarchy::run_local(shm::Plan plan) {
  while (plan.next()) {
    group_.arrive();
    group_.await(*call_, timeout_ + kSlack);
  }
}

bool Hierarchy::begin(const SmallData& data) {
  const uint64_t hash = call_->hash();
  group_.begin(*call_);
  call_number_ = static_cast<int64_t>(
      group_.record(layout_.local).calls.load(std::memory_order_relaxed));
  step([&](std::byte* slot) {
    std::memcpy(slot, &hash, sizeof(hash));
    copy_bytes(slot + sizeof(hash), data.data, data.bytes);
  });
  std::vector<const std::byte*> ranks;
  alike_ = true;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const std::byte* slot = group_.given(rank, group_.slot_bytes());
    uint64_t theirs = 0;
    std::memcpy(&theirs, slot, sizeof(theirs));
    alike_ = alike_ && theirs == hash;
    ranks.push_back(slot + sizeof(theirs));
  }
  if (!leaders_) return alike_;
  Frame& mine = frames_[static_cast<size_t>(layout_.host)];
  mine.hash = hash;
  mine.alike = alike_;
  if (alike_) data.joining.join(ranks, mine.data.data(), data.bytes);
  const auto* bytes = reinterpret_cast<const std::byte*>(&mine);
  for (int host = 0; host < static_cast<int>(frames_.size()); ++host) {
    if (host == layout_.host) continue;
    auto* theirs = reinterpret_cast<std::byte*>(&frames_[static_cast<size_t>(host)]);
    receive(host, theirs, sizeof(Frame), frames_under_way_);
    send(host, bytes, sizeof(Frame), frames_under_way_);
  }
  return alike_;
}

void Hierarchy::await_frames(const SmallData& data) {
  finish(frames_under_way_);
  const Frame& mine = frames_[static_cast<size_t>(layout_.host)];
  std::vector<const std::byte*> hosts;
  for (const Frame& frame : frames_) {
    alike_ = alike_ && frame.alike == 1 && frame.hash == mine.hash;
    hosts.push_back(frame.data.data());
  }
  if (!alike_) return;
  std::byte* result = group_.give(group_.slot_bytes()) + sizeof(uint64_t);
  data.joining.join(hosts, result, data.bytes);
  data.joining.finish(result, data.bytes);
}

void Hierarchy::conclude(const SmallData& data) {
  if (leaders_) await_frames(data);
  step([&](std::byte* slot) {
    const uint64_t alike = alike_;
    if (leaders_) std::memcpy(slot, &alike, sizeof(alike));
  });
  const std::byte* told = group_.given(0, group_.slot_bytes());
  uint64_t alike = 1;
  std::memcpy(&alike, told, sizeof(alike));
  if (alike == 0) differ();
  copy_bytes(data.data, told + sizeof(alike), data.bytes);
}

// By the store, which takes texts of any length.
void Hierarchy::differ() {
  const std::string round = "differs/" + std::to_string(++differences_) + "/";
  std::vector<CallSignature> calls;
  translated([&] {
    auto& store = checks_->store();
    const auto tell_all = [&](const char* what, const std::string& word) {
      const auto keys = numbered_keys(round + what, checks_->size());
      store.set(keys[static_cast<size_t>(checks_->rank())], word);
      store.wait(keys, timeout_);
      return keys;
    };
    for (const auto& key : tell_all("call/", call_->encoded()))
      calls.push_back(decode(store.get_to_str(key)));
    try {
      tell_all("read/", "1");
    } catch (const std::exception&) {  // Who holds the store has ended, when all had read.
    }
  });
  std::rethrow_exception(
      mismatch_error(find_mismatch(calls, checks_->names(), checks_->group())
                         .value_or(mismatch_of({}, "the ranks of group '" + checks_->group() +
                                                       "' did not make the same call"))));
}

std::byte* Hierarchy::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

Failure::Rank Hierarchy::leader_of(int host, Failure::Kind kind) const {
  const auto& ranks = layout_.hosts[static_cast<size_t>(host)];
  Failure::Rank leader = checks_->member(ranks.front(), kind);
  leader.host = picked(checks_->names(), ranks);
  return leader;
}

std::optional<Failure> Hierarchy::await_failure(milliseconds patience) const {
  auto found = failure();
  for (const auto end = Clock::now() + patience; !found && Clock::now() < end; found = failure())
    std::this_thread::sleep_for(milliseconds(10));
  return found;
}

Failure Hierarchy::cause_of(const HostFailure& failure) {
  const bool late = failure.kind == HostFailure::Kind::late;
  if (auto heard = await_failure(late ? kLatePatience : kLostPatience)) return *heard;
  if (!late) return how_lost(failure.host, failure.text);
  constexpr auto kLate = Failure::Kind::late;
  return {.kind = kLate, .ranks = {leader_of(failure.host, kLate)}, .waited_ms = timeout_.count()};
}

Failure Hierarchy::how_lost(int host, const std::string& why) const {
  constexpr auto kLost = Failure::Kind::unreachable;
  return {.kind = kLost, .ranks = {leader_of(host, kLost)}, .detail = " [" + why + "]"};
}

void Hierarchy::hear(const Failure& failure) noexcept {
  group_.fail(failure);
  if (leaders_) leaders_->interrupt();
}

void Hierarchy::tell_failure() noexcept {
  if (!links_ || told_failure_) return;
  const auto known = failure();
  if (known && !told_failure_.exchange(true)) links_->tell_failed(*known);
}

// This rank may make no call, or wait for a message, while a call of the others cannot go on.
void Hierarchy::look_around() {
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (rank == layout_.local || told_left_[at] || !group_.gone(rank)) continue;
    const Failure end = group_.end_of(rank);
    if (end.kind == Failure::Kind::ended) {
      hear(end);
    } else {
      links_->tell_left(end);
      told_left_[at] = true;
    }
  }
  try {
    if (look_) look_({});
  } catch (const CommError& error) {
    hear(error.failure());
  }
  for (const Failure& left : left_elsewhere_)
    if (!left.ranks.empty() && left.ranks[0].calls < call_number_) hear(left);
  tell_failure();
  if (!leaders_) return;
  if (group_.failed()) leaders_->interrupt();
  leaders_->look();
}

void Hierarchy::fail(const HostFailure& failure) {
  const Failure cause = cause_of(failure);
  hear(cause);
  tell_failure();
  group_.throw_if_failed(call_->text(), {leader_of(failure.host, Failure::Kind::late)});
  throw_failure(call_->text() + " cannot finish: ", cause);
}

void Hierarchy::abort(const std::string& failed_in) noexcept {
  constexpr auto kGaveUp = Failure::Kind::gave_up;
  Failure failure{.kind = kGaveUp, .ranks = {group_.member(layout_.local, kGaveUp)}};
  if (const std::string failed = failed_in.empty() ? checks_->told() : failed_in; !failed.empty())
    failure.detail = "; it failed in " + failed;
  if (const auto host = leaders_ ? leaders_->awaited() : std::nullopt)
    failure.ranks.push_back(leader_of(*host, Failure::Kind::late));
  hear(failure);
  tell_failure();
}

void Hierarchy::leave() noexcept {
  const int64_t steps = steps_ && !group_.failed() ? steps_->load() : 0;
  if (steps > 0) checks_->tell_end(Failure::Kind::closed, steps);
  group_.leave(steps);
  if (!links_) return;
  tell_failure();
  links_->tell_left(group_.end_of(layout_.local));
  links_->close();
}

}  // namespace lockstep::hierarchical
