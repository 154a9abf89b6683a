#include "lockstep/comm/checks/p2p_gate.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/pending_work.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kLookForEnded{50};

/// What stands in place of a call that will not be made, and why. Nobody deletes such a key: the
/// other side may have seen it and be about to read it.
constexpr char kGivenUp = '!';
/// Its rank leaves the group, which it tells by itself.
constexpr const char* kWithdrawn = "!";

/// `side`: 's' of the send, 'r' of the receive.
std::string key_of(const std::string& channel, char side, int64_t index) {
  return channel + "/" + side + std::to_string(index);
}

c10d::OpType type_of(Operation operation) {
  if (operation == Operation::send) return c10d::OpType::SEND;
  return operation == Operation::recv ? c10d::OpType::RECV : c10d::OpType::RECVANYSOURCE;
}

}  // namespace

P2PGate::~P2PGate() {
  close();
}

std::string P2PGate::channel_key(int sender, int receiver, int tag) const {
  return "p2p/" + std::to_string(sender) + "/" + std::to_string(receiver) + "/" +
         std::to_string(tag);
}

std::string P2PGate::release_key(int receiver, int tag) const {
  return "p2p/release/" + std::to_string(receiver) + "/" + std::to_string(tag);
}

P2PGate::Held P2PGate::make_held(Operation operation, const std::vector<at::Tensor>& tensors,
                                 int peer, int tag, std::chrono::milliseconds timeout,
                                 const Issue& issue) const {
  Held held;
  held.call.operation = operation;
  held.call.root = peer;
  held.call.set_tensor(tensors.at(0), tensors.size());
  held.signature.operation = operation;
  held.signature.root = peer;
  (operation == Operation::send ? held.signature.inputs : held.signature.outputs) =
      signatures_of(tensors);
  held.tensors = tensors;
  held.issue = issue;
  held.tag = tag;
  held.timeout = timeout;
  held.deadline = Clock::now() + timeout;
  return held;
}

c10::intrusive_ptr<c10d::Work> P2PGate::submit(Operation operation,
                                               std::vector<at::Tensor>& tensors, int peer, int tag,
                                               std::chrono::milliseconds timeout,
                                               const Issue& issue) {
  std::lock_guard lock(mutex_);
  if (stop_) return {};
  try {
    return hold_back(operation, tensors, peer, tag, timeout, issue);
  } catch (const std::exception&) {
    std::rethrow_exception(
        failure_of(make_held(operation, tensors, peer, tag, timeout, issue).call));
  }
}

std::exception_ptr P2PGate::failure_of(const CallSummary& call) const {
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string what =
        describe(call, context_->names()) + " of group '" + context_->group() + "'";
    if (is_store_lost(error)) return context_->store_lost(what);
    if (failure_kind(std::current_exception()) == FailureKind::ours)
      return std::current_exception();
    return std::make_exception_ptr(CommError(context_->me() + ": " + what + " could not begin: " +
                                             failure_text(std::current_exception())));
  }
}

c10::intrusive_ptr<c10d::Work> P2PGate::hold_back(Operation operation,
                                                  const std::vector<at::Tensor>& tensors, int peer,
                                                  int tag, std::chrono::milliseconds timeout,
                                                  const Issue& issue) {
  Channel* channel = nullptr;
  if (operation == Operation::send) {
    channel = &sends_[{peer, tag}];
    if (!hold_send(peer, tag, *channel)) return {};
  } else if (operation == Operation::recv) {
    channel = &recvs_[{peer, tag}];
    if (!hold_recv(tag, *channel)) return {};
  } else if (!hold_any(tag)) {
    return {};
  }
  // First: where no thread can be had the other side is not to hear of the call.
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  Held held = make_held(operation, tensors, peer, tag, timeout, issue);
  if (channel) {
    const int me = context_->rank();
    held.index = channel->next++;
    held.call.sequence = held.signature.sequence = static_cast<uint64_t>(held.index + 1);
    const bool send = operation == Operation::send;
    const std::string channel_name = send ? channel_key(me, peer, tag) : channel_key(peer, me, tag);
    if (!channel->free) {
      held.told_under = key_of(channel_name, send ? 's' : 'r', held.index);
      context_->store().set(held.told_under, encode(held.signature));
    }
  }
  held.work = c10::make_intrusive<PendingWork>(context_, held.call, type_of(operation));
  c10::intrusive_ptr<c10d::Work> work = held.work;
  (channel ? channel->held : tags_[tag].held).push_back(std::move(held));
  changed_.notify_all();
  return work;
}

bool P2PGate::hold_send(int peer, int tag, Channel& channel) {
  if (!channel.free && !channel.claimed && !within_limit(channel.next)) {
    const std::string mode = channel_key(context_->rank(), peer, tag) + "/mode";
    channel.claimed = true;
    channel.free = context_->store().compareSet(mode, "", "free") == "free";
  }
  return !channel.free || !channel.held.empty();
}

bool P2PGate::hold_recv(int tag, Channel& channel) {
  const Tag& state = tags_[tag];
  if (state.released || (!state.any_used && !within_limit(channel.next))) channel.free = true;
  return !channel.free || !channel.held.empty();
}

bool P2PGate::hold_any(int tag) {
  Tag& state = tags_[tag];
  const int me = context_->rank();
  bool release = false;
  if (!state.any_used) {
    state.any_used = true;
    for (int peer : context_->others()) {
      const std::string mode = channel_key(peer, me, tag) + "/mode";
      release |= context_->store().compareSet(mode, "", "any") != "any";
      release |= recvs_[{peer, tag}].free;
    }
  }
  release |= !within_limit(state.any_count++) && state.held.empty();
  if (release && !state.released) {
    context_->store().set(release_key(me, tag), "1");
    state.released = true;
  }
  return !state.released || !state.held.empty();
}

void P2PGate::close() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  bool store_is_there = true;
  const auto fail_all = [&](std::deque<Held>& all) {
    for (Held& held : all) {
      store_is_there = store_is_there && take_back(held, kWithdrawn);
      held.work->failed(std::make_exception_ptr(
          CommError(context_->me() + ": " + describe(held.call, context_->names()) +
                    " had not begun when group '" + context_->group() + "' closed")));
    }
    all.clear();
  };
  std::lock_guard lock(mutex_);
  for (auto& [key, channel] : sends_) fail_all(channel.held);
  for (auto& [key, channel] : recvs_) fail_all(channel.held);
  for (auto& [key, tag] : tags_) fail_all(tag.held);
}

bool P2PGate::take_back(const Held& held, const std::string& word) const {
  if (!held.is_told()) return true;
  try {
    context_->store().set(held.told_under, word);
    return true;
  } catch (const std::exception&) {  // The store is lost, which is told by whoever asks it.
    return false;
  }
}

bool P2PGate::anything_held() const {
  for (const auto& [key, channel] : sends_)
    if (!channel.held.empty()) return true;
  for (const auto& [key, channel] : recvs_)
    if (!channel.held.empty()) return true;
  for (const auto& [key, tag] : tags_)
    if (!tag.held.empty()) return true;
  return false;
}

void P2PGate::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock, [this] { return stop_ || anything_held(); });
    PollPause pause;
    Every look(kLookForEnded);
    while (!stop_ && anything_held()) {
      if (advance(look.due())) {
        pause = PollPause();
        continue;
      }
      // Never zero: the mutex must be free for a moment.
      changed_.wait_for(lock, std::max(pause.next(), std::chrono::microseconds(20)));
    }
  }
}

bool P2PGate::advance(bool look_for_ended) {
  bool progress = false;
  const auto guarded = [&](std::deque<Held>& held, auto step) {
    try {
      while (!held.empty() && step()) progress = true;
    } catch (const std::exception&) {
      held.front().work->failed(failure_of(held.front().call));
      held.pop_front();
    }
  };
  for (auto& [key, channel] : sends_)
    guarded(channel.held, [&, peer = key.first, &c = channel] { return advance_send(peer, c); });
  for (auto& [key, channel] : recvs_)
    guarded(channel.held, [&, peer = key.first, &c = channel] { return advance_recv(peer, c); });
  for (auto& [key, tag] : tags_) guarded(tag.held, [&, &t = tag] { return advance_any(t); });
  const auto expire_all = [&](std::deque<Held>& all, const std::vector<int>& peers) {
    while (!all.empty() && expire(all.front(), peers, look_for_ended)) all.pop_front();
  };
  for (auto& [key, channel] : sends_) expire_all(channel.held, {key.first});
  for (auto& [key, channel] : recvs_) expire_all(channel.held, {key.first});
  for (auto& [key, tag] : tags_) expire_all(tag.held, context_->others());
  return progress;
}

bool P2PGate::advance_send(int peer, Channel& channel) {
  Held& held = channel.held.front();
  auto& store = context_->store();
  const std::string other = key_of(channel_key(context_->rank(), peer, held.tag), 'r', held.index);
  if (!held.is_told()) {
    issue(held, peer);
  } else if (const auto word = word_under(other)) {
    settle(held, peer, other, *word);
  } else if (store.check({release_key(peer, held.tag)})) {
    channel.free = true;
    issue(held, peer);
  } else {
    return false;
  }
  channel.held.pop_front();
  return true;
}

bool P2PGate::advance_recv(int peer, Channel& channel) {
  Held& held = channel.held.front();
  const std::string other = key_of(channel_key(peer, context_->rank(), held.tag), 's', held.index);
  if (!held.is_told()) {
    issue(held, peer);
  } else if (const auto word = word_under(other)) {
    settle(held, peer, other, *word);
  } else if (tags_[held.tag].released) {
    issue(held, peer);
  } else {
    return false;
  }
  channel.held.pop_front();
  return true;
}

bool P2PGate::advance_any(Tag& tag) {
  Held& held = tag.held.front();
  if (tag.released) {
    issue(held, kAnyRank);
    tag.held.pop_front();
    return true;
  }
  auto& store = context_->store();
  for (int peer : context_->others()) {
    Channel& channel = recvs_[{peer, held.tag}];
    if (!channel.held.empty()) continue;  // The next message is another receive's.
    const std::string name = channel_key(peer, context_->rank(), held.tag);
    const std::string other = key_of(name, 's', channel.next);
    const auto word = word_under(other);
    if (!word) continue;
    if (word->front() == kGivenUp) {  // The next one of this sender may do.
      ++channel.next;
      return true;
    }
    held.index = channel.next++;
    held.call.sequence = held.signature.sequence = static_cast<uint64_t>(held.index + 1);
    held.told_under = key_of(name, 'r', held.index);
    store.set(held.told_under, encode(held.signature));
    settle(held, peer, other, *word);
    tag.held.pop_front();
    return true;
  }
  return false;
}

std::optional<std::string> P2PGate::word_under(const std::string& key) const {
  auto& store = context_->store();
  if (!store.check({key})) return std::nullopt;
  std::string word = store.get_to_str(key);
  if (word == kWithdrawn) return std::nullopt;
  return word;
}

void P2PGate::settle(Held& held, int peer, const std::string& other_key, const std::string& word) {
  if (word.front() == kGivenUp) {
    held.work->failed(std::make_exception_ptr(
        CommError(context_->me() + " called " + describe(held.call, context_->names()) +
                      " in group '" + context_->group() + "', but " + word.substr(1),
                  "a call that timed out is not made again by itself")));
    return;
  }
  auto& store = context_->store();
  const CallSignature other = decode(word);
  const bool send = held.signature.operation == Operation::send;
  const int me = context_->rank();
  const auto mismatch = send ? find_p2p_mismatch(held.signature, me, other, peer, held.tag,
                                                 context_->names(), context_->group())
                             : find_p2p_mismatch(other, peer, held.signature, me, held.tag,
                                                 context_->names(), context_->group());
  if (mismatch) {
    held.work->failed(std::make_exception_ptr(MismatchError(*mismatch)));
  } else {
    issue(held, peer);
  }
  try {
    store.deleteKey(other_key);
  } catch (const std::exception&) {  // A key more in a store that is lost.
  }
}

void P2PGate::issue(Held& held, int peer) {
  if (held.work->given_up()) return;
  try {
    held.work->issued(held.issue(held.tensors, peer), peer);
    // The program has gone on after it: it is no cause of what may come.
    if (!told_late_.empty() && held.deadline - held.timeout > late_at_)
      context_->take_back(std::exchange(told_late_, {}));
  } catch (...) {
    held.work->failed(std::current_exception());
  }
}

std::string P2PGate::how_all_left(Held& held, const std::vector<int>& peers,
                                  const std::vector<int>& ended) const {
  std::vector<std::string> ways;
  if (!ended.empty()) ways.push_back(context_->how_they_ended(ended));
  bool all = true;
  for (const int peer : peers) {
    if (std::ranges::find(ended, peer) != ended.end()) continue;
    auto way = context_->how_it_left(peer);
    all = all && way;
    if (way) ways.push_back(std::move(*way));
  }
  // A call of theirs may have come between the last look for it and this one: look once more.
  const bool had_left = std::exchange(held.all_left, all);
  return had_left && all ? join(ways, ", ") : std::string();
}

bool P2PGate::expire(Held& held, const std::vector<int>& peers, bool look_for_ended) {
  const bool late = Clock::now() >= held.deadline;
  if (!late && !look_for_ended) return false;
  const auto ended = context_->ended(peers);
  const std::string call = describe(held.call, context_->names()) + " with tag " +
                           std::to_string(held.tag) + " in group '" + context_->group() + "'";
  const std::string mine = context_->me() + " called " + call;
  const auto give_up = [&](bool timed_out, const std::string& cause) {
    const std::string text = mine + ", but " + cause;
    context_->tell_failed(call + ", but " + cause, /*known=*/true);
    take_back(held, kWithdrawn);
    try {
      throw_failure({}, {timed_out, text});
    } catch (...) {
      held.work->failed(std::current_exception());
    }
    return true;
  };
  if (ended.size() == peers.size()) return give_up(false, context_->how_they_ended(ended));
  if (const auto failure = context_->seen_failure()) {
    const bool names_all = peers.size() == 1 || !failure->given_up;
    return give_up(failure->timed_out,
                   "the group has failed: " + failure->text +
                       (names_all ? "" : "; it waited for " + rank_list(peers, context_->names())));
  }
  if (const auto left = how_all_left(held, peers, ended); !left.empty())
    return give_up(false, left);
  if (!late) return false;
  const bool sends = held.signature.operation == Operation::send;
  take_back(held, kGivenUp + context_->me() + " has given its " + (sends ? "send" : "receive") +
                      " up after " + seconds_text(held.timeout));
  told_late_ = call + ", for which " + rank_list(peers, context_->names()) + " did not come";
  late_at_ = Clock::now();
  context_->tell_failed(told_late_, /*known=*/true);
  const char* counterpart = sends ? " did not call the receive" : " did not call the send";
  held.work->failed(std::make_exception_ptr(
      TimeoutError(mine + " and waited " + seconds_text(held.timeout) + ": " +
                       rank_list(peers, context_->names()) + counterpart,
                   "do both sides use the same ranks and tag? Else give a longer time-out")));
  return true;
}

}  // namespace lockstep
