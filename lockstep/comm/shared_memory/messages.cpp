#include "lockstep/comm/shared_memory/messages.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/messages_lock.h"

namespace lockstep::shm {
namespace {

constexpr size_t kNotLive = SIZE_MAX;
/// Of a message's pieces: while one is copied out, the next is copied in.
constexpr size_t kMostOfPiece = 32 << 10;
/// Tags that have come and gone are forgotten when there are more.
constexpr size_t kTagsKept = 1024;

}  // namespace

uint64_t Messages::Table::add(MessagePtr message) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  slots_[index].message = std::move(message);
  return uint64_t{slots_[index].generation} << 32 | index;
}

MessagePtr* Messages::Table::find(uint64_t id) {
  const auto index = static_cast<uint32_t>(id);
  if (index >= slots_.size() || slots_[index].generation != id >> 32) return nullptr;
  return &slots_[index].message;
}

MessagePtr Messages::Table::take(uint64_t id) {
  MessagePtr* found = find(id);
  if (!found) return nullptr;
  const auto index = static_cast<uint32_t>(id);
  ++slots_[index].generation;
  free_.push_back(index);
  return std::exchange(*found, nullptr);
}

Messages::Messages(SharedGroup& group, MessagesOptions options)
    : group_(group),
      options_(std::move(options)),
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
  eager_ = std::min(options_.eager_bytes, ring_capacity(memory) / 8 - kLine);
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

void Messages::expect_thread(const MessagePtr& message) {
  // Also where the message is done: its answer may wait for room.
  if (start_or_wake_thread() || message->done()) return;
  finish(message,
         std::make_exception_ptr(CommError(
             text_of(*message) + " cannot go on: no thread can be started for it",
             "does a limit of processes or memory stand in the way: `ulimit -u`, `ulimit -v`?")));
}

MessagePtr Messages::post_send(int dst, MessageCall call) {
  MessagePtr message = make(true, dst, std::move(call));
  Lock lock(*this);
  if (!admit(message)) return message;
  Peer& peer = peers_[static_cast<size_t>(dst)];
  message->number_ = ++peer.number;
  if (dst == rank_) {
    if (const MessagePtr recv = take_posted(dst, message->tag_)) {
      match_own(message, recv);
    } else {
      arrived_[bucket(message->tag_)].push_back({dst, {}, {}, message});
    }
  } else if (peer.lost) {
    finish(message, lost_error(*message));
  } else {
    // find: a new tag must not be entered before it counts.
    const auto same = peer.unanswered_of.find(message->tag_);
    const bool none_of_tag = same == peer.unanswered_of.end() || same->second == 0;
    if (peer.unanswered < options_.announced || none_of_tag) {
      grant(peer, message);
    } else {
      peer.withheld.push_back(message);
    }
    flush(dst);
  }
  expect_thread(message);
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
  expect_thread(message);
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

void Messages::grant(Peer& peer, MessagePtr message) {
  ++peer.unanswered;
  ++unanswered_;
  ++peer.unanswered_of[message->tag_];
  message->id_ = peer.sends.add(message);
  peer.announcing.push_back(std::move(message));
}

void Messages::answered(Peer& peer, int tag) {
  --peer.unanswered;
  --unanswered_;
  const int left = --peer.unanswered_of[tag];
  if (peer.unanswered_of.size() > kTagsKept)
    std::erase_if(peer.unanswered_of, [](const auto& entry) { return entry.second == 0; });
  auto& withheld = peer.withheld;
  while (!withheld.empty() && (withheld.front()->done() || peer.unanswered < options_.announced)) {
    const MessagePtr next = withheld.front();
    withheld.pop_front();
    if (!next->done()) grant(peer, next);
  }
  if (left > 0 || withheld.empty()) return;
  const auto next = std::find_if(withheld.begin(), withheld.end(), [&](const MessagePtr& message) {
    return message->tag_ == tag && !message->done();
  });
  if (next == withheld.end()) return;
  // Not yet granted above: those of a tag are granted in their order.
  if (peer.unanswered_of[tag] > 0) return;
  grant(peer, *next);
  withheld.erase(next);
}

MessagePtr Messages::take_answered(Peer& peer, uint64_t id) {
  MessagePtr send = peer.sends.take(id);
  if (send) answered(peer, send->tag_);
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
    refuse(from, frame, recv);
  } else if (frame.eager) {
    copy_bytes(recv->data_, payload, recv->bytes_);
    answer(from, FrameKind::ack, frame.id);
    finish(recv);
  } else if (peers_[static_cast<size_t>(from)].lost) {
    finish(recv, lost_error(*recv));
  } else {
    recv->stage_ = Message::Stage::moving;
    recv->id_ = receiving_.add(recv);
    answer(from, FrameKind::clear, frame.id, recv->id_);
  }
}

void Messages::refuse(int from, const Frame& frame, const MessagePtr& recv) {
  recv->stage_ = Message::Stage::disputed;
  if (peers_[static_cast<size_t>(from)].lost) {
    finish(recv, untold_mismatch(*recv));
    return;
  }
  recv->id_ = receiving_.add(recv);
  answer(from, FrameKind::refuse, frame.id, recv->id_, encoded(*recv));
}

void Messages::match_own(const MessagePtr& send, const MessagePtr& recv) {
  meet(*recv, rank_);
  std::exception_ptr error;
  if (send->bytes_ != recv->bytes_ || send->hash_ != recv->hash_) {
    error = mismatch({encoded(*send), encoded(*recv), rank_, rank_, send->tag_, send->number_});
  } else {
    copy_bytes(recv->data_, send->data_, recv->bytes_);
  }
  finish(send, error);
  finish(recv, error);
}

}  // namespace lockstep::shm
