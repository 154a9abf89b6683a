#include "lockstep/rpc/ring_link.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "lockstep/base/copy_bytes.h"
#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::rpc::detail {
namespace {

/// So many messages of one worker are taken in one turn: the others have a turn as well.
constexpr int kTurn = 64;

}  // namespace

RingLink::RingLink(std::unique_ptr<shm::SharedGroup> group)
    : group_(std::move(group)), peers_(static_cast<size_t>(group_->size())) {
  const size_t memory = group_->message_bytes();
  static_assert(sizeof(Inbox) <= 4096);
  inbox_ = &inbox(rank());
  for (int other = 0; other < size(); ++other) {
    if (other == rank()) continue;
    Peer& peer = peers_[static_cast<size_t>(other)];
    peer.out.attach(group_->messages(rank(), other), memory);
    peer.in.attach(group_->messages(other, rank()), memory);
  }
}

RingLink::Inbox& RingLink::inbox(int rank) const {
  return *reinterpret_cast<Inbox*>(group_->messages(rank, rank));
}

void RingLink::wake_waiter(Inbox& inbox, uint32_t waiter) {
  inbox.bells[waiter].fetch_add(1, std::memory_order_seq_cst);
  shm::wake_all(inbox.bells[waiter]);
}

void RingLink::ring(int rank) {
  Inbox& other = inbox(rank);
  if (other.lookers.load(std::memory_order_seq_cst) > 0) return;
  const uint32_t waiters = other.waiters.load(std::memory_order_seq_cst);
  if (waiters != 0) wake_waiter(other, static_cast<uint32_t>(std::countr_zero(waiters)));
}

void RingLink::wake(Waiter waiter) {
  if (inbox_->waiters.load(std::memory_order_seq_cst) & 1U << waiter) wake_waiter(*inbox_, waiter);
}

void RingLink::sleep(Waiter waiter, const std::function<bool()>& enough,
                     std::chrono::nanoseconds limit) {
  inbox_->waiters.fetch_or(1U << waiter, std::memory_order_seq_cst);
  const uint32_t seen = inbox_->bells[waiter].load(std::memory_order_seq_cst);
  if (!enough() && !look()) shm::sleep_on(inbox_->bells[waiter], seen, limit);
  inbox_->waiters.fetch_and(~(1U << waiter), std::memory_order_seq_cst);
}

bool RingLink::send(int to, const FastHead& head, std::string_view bytes) {
  Peer& peer = peers_[static_cast<size_t>(to)];
  if (bytes.size() > kMostBytes) return false;
  shm::Frame frame{};
  frame.kind = shm::FrameKind::announce;
  frame.bytes = static_cast<uint32_t>(bytes.size());
  frame.tag = static_cast<int32_t>(head.kind);
  frame.id = head.number;
  {
    const std::lock_guard lock(peer.mutex);
    if (peer.lost) return false;
    std::byte* place = peer.out.put(frame);
    if (!place) {
      peer.out.unblock();
      return false;
    }
    copy_bytes(place, bytes.data(), bytes.size());
    peer.out.publish();
  }
  ring(to);
  return true;
}

bool RingLink::look() const {
  for (int other = 0; other < size(); ++other) {
    if (other != rank() && peers_[static_cast<size_t>(other)].in.filled()) return true;
  }
  return false;
}

void RingLink::take(FastCatch& caught) {
  const std::unique_lock lock(taking_, std::try_to_lock);
  if (!lock) return;
  for (int other = 0; other < size(); ++other) {
    if (other != rank()) take_from(other, caught.messages);
  }
}

void RingLink::take_from(int rank, std::vector<FastMessage>& messages) {
  shm::RingReader& in = peers_[static_cast<size_t>(rank)].in;
  for (int left = kTurn; left > 0; --left) {
    const shm::Frame* frame = in.next();
    if (!frame) break;
    const auto* bytes = reinterpret_cast<const char*>(in.payload(*frame));
    messages.push_back(
        {rank, {static_cast<uint32_t>(frame->tag), frame->id}, std::string(bytes, frame->bytes)});
    in.pop(*frame);
  }
  if (in.unreleased() > 0) in.release();
}

void RingLink::lose(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const std::lock_guard lock(peer.mutex);
  peer.lost = true;
}

}  // namespace lockstep::rpc::detail
