// What goes through the rings: the protocol in messages.h.
#include <algorithm>
#include <bit>
#include <utility>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {
namespace {

/// How much data one turn writes: others want the mutex too, and what has come must be read.
constexpr size_t kTurnBytes = 256 << 10;

}  // namespace

Mailbox& Messages::mailbox(int rank) {
  return *reinterpret_cast<Mailbox*>(group_.messages(rank, size_));
}

template <class Visit>
bool Messages::any_opened(Visit visit) {
  for (int first = 0; first < size_; first += 64) {
    uint64_t opened =
        mailbox_->opened[static_cast<size_t>(first) / 64].load(std::memory_order_seq_cst);
    for (; opened != 0; opened &= opened - 1)
      if (visit(first + std::countr_zero(opened))) return true;
  }
  return false;
}

bool Messages::look() {
  if (any_opened([&](int rank) { return peers_[static_cast<size_t>(rank)].in.filled(); }))
    return true;
  if (blocked_.load(std::memory_order_seq_cst) == 0) return false;
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.out.moved(); });
}

bool Messages::progress() {
  bool any = false;
  any_opened([&](int rank) {
    any |= drain(rank);
    return false;
  });
  if (blocked_.load(std::memory_order_relaxed) == 0) return any;
  for (int rank = 0; rank < size_; ++rank)
    if (peers_[static_cast<size_t>(rank)].out.moved()) any |= flush(rank);
  return any;
}

bool Messages::drain(int rank) {
  RingReader& in = peers_[static_cast<size_t>(rank)].in;
  const auto release = [&] {
    if (in.release()) mailbox(rank).ring();
  };
  size_t seen = 0;
  while (const Frame* frame = in.next()) {
    handle(rank, *frame, in.payload(*frame));
    in.pop(*frame);
    if (in.unreleased() < chunk_) continue;
    seen += in.unreleased();
    release();
    if (seen >= kTurnBytes) break;
  }
  if (in.unreleased() > 0) {
    seen += in.unreleased();
    release();
  }
  if (seen > 0) flush(rank);
  return seen > 0;
}

void Messages::handle(int rank, const Frame& frame, const std::byte* payload) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  switch (frame.kind) {
    case FrameKind::announce:
      if (const MessagePtr recv = take_posted(rank, frame.tag)) {
        match(rank, frame, payload, recv);
      } else {
        arrived_[bucket(frame.tag)].push_back({rank, frame, {payload, payload + frame.bytes}});
      }
      break;
    case FrameKind::ack:
      if (const MessagePtr send = take_answered(peer, frame.id)) finish(send);
      break;
    case FrameKind::clear:
      on_clear(rank, frame);
      break;
    case FrameKind::data:
      on_data(frame, payload);
      break;
    case FrameKind::refuse:
      on_refuse(rank, frame);
      break;
    case FrameKind::abort:
      if (const MessagePtr recv = take(receiving_, frame.id))
        finish(recv, std::make_exception_ptr(PeerLostError(text_of(*recv) +
                                                           " cannot finish: " + group_.name(rank) +
                                                           " has given its send up")));
      break;
    case FrameKind::pad:
      break;
  }
}

void Messages::on_clear(int rank, const Frame& frame) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const MessagePtr send = take_answered(peer, frame.id);
  if (!send) return;
  send->other_id_ = frame.size;
  send->moving_ = true;
  peer.sending.push_back(send);
  ++owed_;
}

void Messages::on_refuse(int rank, const Frame& frame) {
  const MessagePtr send = take_answered(peers_[static_cast<size_t>(rank)], frame.id);
  if (!send) return;
  finish(send, mismatch({{send->hash_, send->call_.bytes},
                         {frame.hash, frame.size},
                         rank_,
                         rank,
                         send->call_.tag,
                         send->id_}));
}

void Messages::on_data(const Frame& frame, const std::byte* payload) {
  const auto found = receiving_.find(frame.id);
  if (found == receiving_.end()) return;
  Message& recv = *found->second;
  if (!recv.done()) copy_bytes(recv.data() + recv.moved_, payload, frame.bytes);
  recv.moved_ += frame.bytes;
  if (recv.moved_ == recv.call_.bytes) finish(take(receiving_, frame.id));
}

void Messages::answer(int rank, FrameKind kind, uint64_t id, uint64_t size, uint64_t hash) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.lost) return;
  peer.answers.push_back(
      {.kind = kind, .bytes = 0, .tag = 0, .eager = 0, .id = id, .size = size, .hash = hash});
  ++owed_;
}

bool Messages::flush(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.lost || (peer.answers.empty() && peer.announcing.empty() && peer.sending.empty()))
    return false;
  const bool blocked = peer.out.waiting();
  open(rank);
  if (flush_answers(peer) && flush_announcements(peer) && flush_data(rank, peer) &&
      peer.out.waiting())
    peer.out.unblock();
  publish(rank);
  blocked_.fetch_add((peer.out.waiting() ? 1 : 0) - (blocked ? 1 : 0), std::memory_order_seq_cst);
  return true;
}

bool Messages::flush_answers(Peer& peer) {
  while (!peer.answers.empty()) {
    if (!peer.out.put(peer.answers.front())) return false;
    peer.answers.pop_front();
    --owed_;
  }
  return true;
}

bool Messages::flush_announcements(Peer& peer) {
  while (!peer.announcing.empty()) {
    const MessagePtr next = peer.announcing.front();
    if (!next->done() && !write_announcement(peer, *next)) return false;
    peer.announcing.pop_front();
    if (next->done()) take_answered(peer, next->id_);  // Given up before it was announced.
  }
  return true;
}

bool Messages::write_announcement(Peer& peer, const Message& message) {
  Frame frame{};
  frame.kind = FrameKind::announce;
  frame.eager = message.call_.bytes <= eager_ ? 1 : 0;
  frame.bytes = frame.eager ? static_cast<uint32_t>(message.call_.bytes) : 0;
  frame.tag = message.call_.tag;
  frame.id = message.id_;
  frame.size = message.call_.bytes;
  frame.hash = message.hash_;
  std::byte* place = peer.out.put(frame);
  if (!place) return false;
  copy_bytes(place, message.call_.data, frame.bytes);
  return true;
}

bool Messages::flush_data(int rank, Peer& peer) {
  size_t written = 0;
  while (!peer.sending.empty()) {
    const MessagePtr send = peer.sending.front();
    Frame frame{};
    frame.id = send->other_id_;
    if (send->done()) {  // Given up.
      frame.kind = FrameKind::abort;
      if (!peer.out.put(frame)) return false;
      peer.sending.pop_front();
      --owed_;
      continue;
    }
    if (written >= kTurnBytes) {
      peer.out.again();
      return false;
    }
    frame.kind = FrameKind::data;
    frame.bytes = static_cast<uint32_t>(std::min(chunk_, send->call_.bytes - send->moved_));
    std::byte* place = peer.out.put(frame);
    if (!place) return false;
    copy_bytes(place, send->data() + send->moved_, frame.bytes);
    send->moved_ += frame.bytes;
    written += frame.bytes;
    publish(rank);
    if (send->moved_ < send->call_.bytes) continue;
    finish(send);
    peer.sending.pop_front();
    --owed_;
  }
  return true;
}

void Messages::open(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.opened) return;
  peer.opened = true;
  const auto me = static_cast<size_t>(rank_);
  mailbox(rank).opened[me / 64].fetch_or(uint64_t{1} << me % 64, std::memory_order_seq_cst);
}

void Messages::publish(int rank) {
  if (peers_[static_cast<size_t>(rank)].out.publish()) mailbox(rank).ring();
}

}  // namespace lockstep::shm
