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
      caller_spin_(group.least_spin(), group.most_spin()),
      peers_(static_cast<size_t>(size_)) {
  if (size_ == 1) return;
  Segment& segment = group.segment();
  const size_t memory = segment.message_bytes();
  constexpr size_t kLeast = 4096;
  static_assert(sizeof(Mailbox) <= kLeast);
  if (memory < kLeast)
    throw UsageError("shared memory: " + std::to_string(memory) +
                     " bytes for messages between two ranks; at least " + std::to_string(kLeast) +
                     " are needed");
  constexpr size_t kLine = 64;
  chunk_ = std::min(ring_capacity(memory) / 4, kMostOfPiece) / kLine * kLine - kLine;
  eager_ = std::min(kEagerBytes, ring_capacity(memory) / 8 - kLine);
  mailbox_ = reinterpret_cast<Mailbox*>(segment.messages(rank_, rank_));
  for (int other = 0; other < size_; ++other) {
    if (other == rank_) continue;
    Peer& peer = peers_[static_cast<size_t>(other)];
    peer.out.attach(segment.messages(rank_, other), memory);
    peer.in.attach(segment.messages(other, rank_), memory);
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
  message->tag_ = call.tag;
  message->data_ = static_cast<std::byte*>(call.data);
  message->bytes_ = call.bytes;
  message->hash_ = call.call->hash();
  message->call_ = std::move(call.call);
  message->timeout_ = call.timeout;
  message->deadline_ = Clock::now() + call.timeout;
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
  if (!message->error_ && message->deadline_ - message->timeout_ > late_at_) late_.clear();
  message->done_.store(true, std::memory_order_seq_cst);
  finished_.push_back(message);
}

MessagePtr Messages::post_send(int dst, MessageCall call) {
  MessagePtr message = make(true, dst, std::move(call));
  Lock lock(*this);
  if (!admit(message)) return message;
  Peer& peer = peers_[static_cast<size_t>(dst)];
  message->id_ = ++peer.number;
  if (dst == rank_) {
    if (const MessagePtr recv = take_posted(dst, message->tag_)) {
      match_own(message, recv);
    } else {
      arrived_[bucket(message->tag_)].push_back({dst, {}, {}, message});
    }
  } else if (peer.lost) {
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
    posted_[bucket(message->tag_)].push_back(message);
    if (look()) progress();
  }
  start_or_wake_thread();
  return message;
}

std::string Messages::late() {
  const std::lock_guard lock(mutex_);
  return late_;
}

size_t Messages::unreceived() {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& list : arrived_) count += list.size();
  return count;
}

MessagePtr Messages::take_answered(Peer& peer, uint64_t id) {
  MessagePtr send = take(peer.sends, id);
  if (send) --unanswered_;
  return send;
}

bool Messages::meet_earlier(const MessagePtr& recv) {
  auto& list = arrived_[bucket(recv->tag_)];
  for (auto it = list.begin(); it != list.end();) {
    if (it->own && it->own->done()) {  // Given up meanwhile.
      it = list.erase(it);
      continue;
    }
    const int tag = it->own ? it->own->tag_ : it->frame.tag;
    if (tag != recv->tag_ || (recv->peer_ != kAnyRank && recv->peer_ != it->from)) {
      ++it;
      continue;
    }
    const Arrived arrived = std::move(*it);
    list.erase(it);
    if (arrived.own) {
      match_own(arrived.own, recv);
    } else {
      match(arrived.from, arrived.frame, arrived.payload.data(), recv);
      flush(arrived.from);
    }
    return true;
  }
  return false;
}

MessagePtr Messages::take_posted(int from, int tag) {
  auto& list = posted_[bucket(tag)];
  for (auto it = list.begin(); it != list.end();) {
    if ((*it)->done()) {
      it = list.erase(it);
      continue;
    }
    if ((*it)->tag_ == tag && ((*it)->peer_ == kAnyRank || (*it)->peer_ == from)) {
      MessagePtr found = std::move(*it);
      list.erase(it);
      return found;
    }
    ++it;
  }
  return nullptr;
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
  if (frame.size != recv->bytes_ || frame.hash != recv->hash_) {
    answer(from, FrameKind::refuse, frame.id, recv->bytes_, recv->hash_);
    finish(recv, mismatch({{frame.hash, frame.size},
                           {recv->hash_, recv->bytes_},
                           from,
                           rank_,
                           recv->tag_,
                           frame.id}));
  } else if (frame.eager) {
    copy_bytes(recv->data_, payload, recv->bytes_);
    answer(from, FrameKind::ack, frame.id);
    finish(recv);
  } else if (peers_[static_cast<size_t>(from)].lost) {
    finish(recv, lost_error(*recv));
  } else {
    recv->stage_ = Message::Stage::moving;
    recv->id_ = ++received_;
    receiving_.emplace(recv->id_, recv);
    answer(from, FrameKind::clear, frame.id, recv->id_);
  }
}

void Messages::match_own(const MessagePtr& send, const MessagePtr& recv) {
  meet(*recv, rank_);
  std::exception_ptr error;
  if (send->bytes_ != recv->bytes_ || send->hash_ != recv->hash_) {
    error = mismatch({{send->hash_, send->bytes_},
                      {recv->hash_, recv->bytes_},
                      rank_,
                      rank_,
                      send->tag_,
                      send->id_});
  } else {
    copy_bytes(recv->data_, send->data_, recv->bytes_);
  }
  finish(send, error);
  finish(recv, error);
}

}  // namespace lockstep::shm
