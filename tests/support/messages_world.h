#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/messages.h"
#include "tests/support/run_ranks.h"

namespace lockstep::shm {

/// What tests must know of its inside.
struct MessagesProbe {
  Messages& messages;
  int size() const { return messages.size_; }
  size_t eager_bytes() const { return messages.eager_; }
  size_t chunk_bytes() const { return messages.chunk_; }
  bool parked() const { return messages.parked_; }
  /// Announcements that wait for their receives.
  size_t unreceived() const {
    const std::lock_guard lock(messages.mutex_);
    size_t count = 0;
    for (const auto& list : messages.arrived_) count += list.size();
    return count;
  }
};

}  // namespace lockstep::shm

namespace lockstep::shm::messages_world {

using lockstep::test::expect_ok;
using lockstep::test::rethrow_first;
using lockstep::test::run_ranks;

/// A call for tests: fits any other of the same `kind`.
class PlainCall : public Call {
 public:
  PlainCall(std::string text, uint64_t kind) : text_(std::move(text)), kind_(kind) {}
  uint64_t hash() const override { return kind_; }
  std::string text() const override { return text_; }

 private:
  std::string text_;
  uint64_t kind_;
};

inline std::string judge_plainly(const Disagreement& d) {
  const auto side = [](const Disagreement::Side& one) {
    return std::to_string(one.bytes) + " bytes of kind " + std::to_string(one.hash);
  };
  return "rank " + std::to_string(d.sender) + " sent " + side(d.send) + " as message " +
         std::to_string(d.number) + " with tag " + std::to_string(d.tag) + ", but rank " +
         std::to_string(d.receiver) + " received " + side(d.recv);
}

/// All ranks of a group in this process, each with its own mapping of the segment. Its slots are
/// small, so that little data takes many steps.
class World {
 public:
  explicit World(int size, size_t message_bytes = 64 << 10, size_t slot_bytes = 4096)
      : groups_(static_cast<size_t>(size)), messages_(static_cast<size_t>(size)) {
    std::promise<std::string> name;
    const std::shared_future<std::string> told = name.get_future().share();
    const Meeting meeting{[&](const std::string& value) { name.set_value(value); },
                          [&] { return told.get(); }};
    rethrow_first(run_ranks(size, [&](int rank) {
      SharedGroupOptions group;
      group.rank = rank;
      group.size = size;
      group.message_bytes = message_bytes;
      group.slot_bytes = slot_bytes;
      const auto at = static_cast<size_t>(rank);
      groups_[at] = std::make_unique<SharedGroup>(group, meeting);
      messages_[at] = std::make_unique<Messages>(*groups_[at], judge_plainly);
    }));
  }
  ~World() {
    for (int rank = 0; rank < static_cast<int>(groups_.size()); ++rank) leave(rank);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Messages& operator[](int rank) { return *messages_[static_cast<size_t>(rank)]; }
  SharedGroup& group(int rank) { return *groups_[static_cast<size_t>(rank)]; }
  /// The rank closes the group.
  void leave(int rank) {
    messages_[static_cast<size_t>(rank)].reset();
    groups_[static_cast<size_t>(rank)].reset();
  }

 private:
  std::vector<std::unique_ptr<SharedGroup>> groups_;
  std::vector<std::unique_ptr<Messages>> messages_;
};

using Bytes = std::vector<unsigned char>;

/// Content that shows a byte that is missing, doubled or of another message.
inline Bytes pattern(size_t size, uint64_t seed) {
  Bytes bytes(size);
  uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
  for (auto& byte : bytes) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    byte = static_cast<unsigned char>(state >> 56);
  }
  return bytes;
}

struct Wish {
  int tag = 0;
  std::chrono::milliseconds timeout{20'000};
  uint64_t kind = 1;
  std::function<void()> then = {};  ///< MessageCall::finished.
};

inline MessageCall call_of(Bytes& bytes, const Wish& wish, const std::string& what) {
  MessageCall call;
  call.tag = wish.tag;
  call.data = bytes.data();
  call.bytes = bytes.size();
  call.timeout = wish.timeout;
  if (wish.then) call.finished = [then = wish.then](const std::exception_ptr&) { then(); };
  call.call = std::make_shared<PlainCall>(
      what + " of " + std::to_string(bytes.size()) + " bytes of kind " + std::to_string(wish.kind),
      wish.kind);
  return call;
}
inline MessagePtr isend(Messages& from, int to, Bytes& bytes, const Wish& wish = {}) {
  return from.post_send(to, call_of(bytes, wish, "send(to rank " + std::to_string(to) + ")"));
}
inline MessagePtr irecv(Messages& to, int from, Bytes& bytes, const Wish& wish = {}) {
  return to.post_recv(from, call_of(bytes, wish, "recv(from rank " + std::to_string(from) + ")"));
}
inline constexpr std::chrono::milliseconds kLong{20'000};

/// False when it has not come true in that time.
inline bool comes_true(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

/// How two processes meet that have both ends of a pipe.
inline Meeting meeting_over(const std::array<int, 2>& pipe) {
  return {[pipe](const std::string& value) {
            const auto size = static_cast<uint32_t>(value.size());
            const bool told = write(pipe[1], &size, sizeof(size)) == sizeof(size) &&
                              write(pipe[1], value.data(), size) == ssize_t{size};
            if (!told) throw std::runtime_error("pipe");
          },
          [pipe] {
            uint32_t size = 0;
            if (read(pipe[0], &size, sizeof(size)) != sizeof(size))
              throw std::runtime_error("pipe");
            std::string value(size, '\0');
            if (read(pipe[0], value.data(), size) != ssize_t{size})
              throw std::runtime_error("pipe");
            return value;
          }};
}

}  // namespace lockstep::shm::messages_world
