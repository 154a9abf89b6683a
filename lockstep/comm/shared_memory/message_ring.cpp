#include "lockstep/comm/shared_memory/message_ring.h"

#include <cstring>

#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::shm {
namespace {

constexpr size_t kLine = 64;

/// Small payloads share the frame's cache line; pieces of large ones start at one.
size_t payload_offset(FrameKind kind) {
  return kind == FrameKind::data ? kLine : sizeof(Frame);
}

size_t frame_bytes(const Frame& frame) {
  if (frame.kind == FrameKind::pad) return frame.bytes;
  return (payload_offset(frame.kind) + frame.bytes + kLine - 1) / kLine * kLine;
}

}  // namespace

void Mailbox::ring() {
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  doorbell.fetch_add(1, std::memory_order_seq_cst);
  wake_all(doorbell);
}

size_t ring_capacity(size_t memory) {
  return (memory - sizeof(RingHeader)) / kLine * kLine;
}

void RingEnd::attach(std::byte* memory, size_t bytes) {
  header_ = reinterpret_cast<RingHeader*>(memory);
  ring_ = memory + sizeof(RingHeader);
  capacity_ = ring_capacity(bytes);
}

bool RingWriter::room(size_t bytes) {
  if (position_ + bytes - read_ <= capacity_) return true;
  read_ = header_->read.load(std::memory_order_acquire);
  if (position_ + bytes - read_ <= capacity_) return true;
  // Either the reader sees the flag after it has made room, or the room is seen here.
  header_->writer_waits.store(1, std::memory_order_seq_cst);
  read_ = header_->read.load(std::memory_order_seq_cst);
  if (position_ + bytes - read_ <= capacity_) {
    unblock();
    return true;
  }
  waiting_.store(read_ + 1, std::memory_order_seq_cst);
  return false;
}

std::byte* RingWriter::put(const Frame& frame) {
  const size_t bytes = frame_bytes(frame);
  const size_t rest = capacity_ - offset_;
  const bool wraps = bytes > rest;
  if (!room(wraps ? rest + bytes : bytes)) return nullptr;
  if (waiting()) unblock();
  if (wraps) {
    Frame pad{};
    pad.kind = FrameKind::pad;
    pad.bytes = static_cast<uint32_t>(rest);
    std::memcpy(ring_ + offset_, &pad, sizeof(pad));
    position_ += rest;
    offset_ = 0;
  }
  std::byte* place = ring_ + offset_;
  std::memcpy(place, &frame, sizeof(frame));
  position_ += bytes;
  step(bytes);
  return place + payload_offset(frame.kind);
}

void RingWriter::unblock() {
  if (header_) header_->writer_waits.store(0, std::memory_order_relaxed);
  waiting_.store(0, std::memory_order_seq_cst);
}

bool RingWriter::publish() {
  if (published_ == position_) return false;
  published_ = position_;
  header_->written.store(position_, std::memory_order_seq_cst);
  return true;
}

bool RingWriter::moved() const {
  const uint64_t waiting = waiting_.load(std::memory_order_seq_cst);
  if (waiting == 0) return false;
  return waiting == kAgain || header_->read.load(std::memory_order_seq_cst) + 1 != waiting;
}

const Frame* RingReader::next() {
  while (true) {
    const uint64_t position = position_.load(std::memory_order_relaxed);
    if (position == written_) {
      written_ = header_->written.load(std::memory_order_acquire);
      if (position == written_) return nullptr;
    }
    const auto* frame = reinterpret_cast<const Frame*>(ring_ + offset_);
    if (frame->kind != FrameKind::pad) return frame;
    pop(*frame);
  }
}

const std::byte* RingReader::payload(const Frame& frame) const {
  return reinterpret_cast<const std::byte*>(&frame) + payload_offset(frame.kind);
}

void RingReader::pop(const Frame& frame) {
  const size_t bytes = frame_bytes(frame);
  step(bytes);
  position_.store(position_.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

bool RingReader::release() {
  released_ = position_.load(std::memory_order_relaxed);
  header_->read.store(released_, std::memory_order_seq_cst);
  return header_->writer_waits.load(std::memory_order_seq_cst) != 0;
}

}  // namespace lockstep::shm
