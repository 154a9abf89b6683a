#include "lockstep/comm/shared_memory/messages.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/base/error.h"

namespace lockstep::shm {
namespace {

constexpr size_t kNotLive = SIZE_MAX;
/// At most an eighth of the ring is used.
constexpr size_t kEagerBytes = 4096;
/// Of a message's pieces: while one is copied out, the next is copied in.
constexpr size_t kMostOfPiece = 32 << 10;

}  // namespace

MessagePtr Messages::take(Table& table, uint64_t id) {
  auto node = table.extract(id);
  return node ? std::move(node.mapped()) : nullptr;
}

Messages::Messages(SharedGroup& group, Judge judge)
    : group_(group),
      judge_(std::move(judge)),
      rank_(group.rank()),
      size_(group.size()),
      peers_(static_cast<size_t>(size_)) {
  const size_t memory = group.message_bytes();
  constexpr size_t kLeast = 4096;
  static_assert(sizeof(Mailbox) <= kLeast);
  if (memory < kLeast)
    throw UsageError("shared memory: " + std::to_string(memory) +
                     " bytes for messages between two ranks; at least " + std::to_string(kLeast) +
                     " are needed");
  constexpr size_t kLine = 64;
  chunk_ = std::min(ring_capacity(memory) / 4, kMostOfPiece) / kLine * kLine - kLine;
  eager_ = std::min(kEagerBytes, ring_capacity(memory) / 8 - kLine);
  mailbox_ = &mailbox(rank_);
  for (int other = 0; other < size_; ++other) {
    Peer& peer = peers_[static_cast<size_t>(other)];
    peer.out.attach(group.messages(rank_, other), memory);
    peer.in.attach(group.messages(other, rank_), memory);
  }
}

MessagePtr Messages::make(bool send, int peer, MessageCall call) {
  if (peer >= size_ || peer < (send ? 0 : kAnyRank))
    throw UsageError((send ? "send to rank " : "receive from rank ") + std::to_string(peer) +
                     " of a group of " + std::to_string(size_));
  auto message = std::make_shared<Message>();
  message->engine_ = this;
  message->send_ = send;
  message->peer_ = peer;
  message->hash_ = call.call->hash();
  message->deadline_ = Clock::now() + call.timeout;
  message->call_ = std::move(call);
  message->live_ = kNotLive;
  message->source_.store(send ? rank_ : peer, std::memory_order_relaxed);
  return message;
}

bool Messages::admit(const MessagePtr& message) {
  if (closed_) {
    finish(message,
           std::make_exception_ptr(CommError(text_of(*message) + " came after the group's end")));
    return false;
  }
  if (group_.failed()) {
    finish(message, group_error(*message));
    return false;
  }
  message->live_ = live_.size();
  live_.push_back(message);
  if (message->peer_ >= 0) ++peers_[static_cast<size_t>(message->peer_)].live;
  return true;
}

void Messages::finish(const MessagePtr& message, std::exception_ptr error) {
  if (message->done()) return;
  message->error_ = std::move(error);
  if (message->live_ != kNotLive) {
    live_.back()->live_ = message->live_;
    std::swap(live_[message->live_], live_.back());
    live_.pop_back();
    if (message->peer_ >= 0) --peers_[static_cast<size_t>(message->peer_)].live;
  }
  // The program has gone on after what was late: that is no cause of what may come.
  if (!message->error_ && message->deadline_ - message->call_.timeout > late_at_) late_.clear();
  if (message->error_ && !message->send_) posted_[bucket(message->call_.tag)].remove(message);
  message->done_.store(true, std::memory_order_seq_cst);
  finished_.push_back(message);
}

MessagePtr Messages::post_send(int dst, MessageCall call) {
  MessagePtr message = make(true, dst, std::move(call));
  Lock lock(*this);
  if (!admit(message)) return message;
  Peer& peer = peers_[static_cast<size_t>(dst)];
  message->id_ = ++peer.number;
  if (peer.lost) {
    finish(message, lost_error(*message));
  } else {
    ++unanswered_;
    peer.sends.emplace(message->id_, message);
    peer.announcing.push_back(message);
    flush(dst);
  }
  start_or_wake_thread();
  return message;
}

MessagePtr Messages::post_recv(int src, MessageCall call) {
  MessagePtr message = make(false, src, std::move(call));
  Lock lock(*this);
  if (!admit(message)) return message;
  if (!meet_earlier(message)) {
    const bool hopeless =
        src == kAnyRank ? all_others_lost() : peers_[static_cast<size_t>(src)].lost;
    if (hopeless) {
      finish(message, lost_error(*message));
      return message;
    }
    posted_[bucket(message->call_.tag)].push_back(message);
    if (look()) progress();
  }
  start_or_wake_thread();
  return message;
}

std::string Messages::late() {
  const std::lock_guard lock(mutex_);
  return late_;
}

MessagePtr Messages::take_answered(Peer& peer, uint64_t id) {
  MessagePtr send = take(peer.sends, id);
  if (send) --unanswered_;
  return send;
}

bool Messages::meet_earlier(const MessagePtr& recv) {
  auto& list = arrived_[bucket(recv->call_.tag)];
  const auto found = std::find_if(list.begin(), list.end(), [&](const Arrived& one) {
    return one.frame.tag == recv->call_.tag && (recv->peer_ == kAnyRank || recv->peer_ == one.from);
  });
  if (found == list.end()) return false;
  const Arrived arrived = std::move(*found);
  list.erase(found);
  match(arrived.from, arrived.frame, arrived.payload.data(), recv);
  flush(arrived.from);
  return true;
}

MessagePtr Messages::take_posted(int from, int tag) {
  auto& list = posted_[bucket(tag)];
  const auto it = std::find_if(list.begin(), list.end(), [&](const MessagePtr& recv) {
    return recv->call_.tag == tag && (recv->peer_ == kAnyRank || recv->peer_ == from);
  });
  if (it == list.end()) return nullptr;
  const MessagePtr found = std::move(*it);
  list.erase(it);
  return found;
}

void Messages::meet(Message& recv, int from) {
  if (recv.peer_ == kAnyRank) {
    recv.peer_ = from;
    ++peers_[static_cast<size_t>(from)].live;
  }
  recv.source_.store(from, std::memory_order_release);
}

void Messages::match(int from, const Frame& frame, const std::byte* payload,
                     const MessagePtr& recv) {
  meet(*recv, from);
  const MessageCall& call = recv->call_;
  if (frame.size != call.bytes || frame.hash != recv->hash_) {
    answer(from, FrameKind::refuse, frame.id, call.bytes, recv->hash_);
    finish(recv, mismatch({{frame.hash, frame.size},
                           {recv->hash_, call.bytes},
                           from,
                           rank_,
                           call.tag,
                           frame.id}));
  } else if (frame.eager) {
    copy_bytes(call.data, payload, call.bytes);
    answer(from, FrameKind::ack, frame.id);
    finish(recv);
  } else if (peers_[static_cast<size_t>(from)].lost) {
    finish(recv, lost_error(*recv));
  } else {
    recv->moving_ = true;
    recv->id_ = ++received_;
    receiving_.emplace(recv->id_, recv);
    answer(from, FrameKind::clear, frame.id, recv->id_);
  }
}

}  // namespace lockstep::shm
