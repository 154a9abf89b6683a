#pragma once

#include <chrono>
#include <coroutine>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/reduction_kernels.h"
#include "lockstep/comm/shared_memory/region.h"
#include "lockstep/comm/shared_memory/shared_group.h"

namespace lockstep::shm {

/// A collective as a coroutine. In each of its steps every rank gives something, suspends until all
/// have arrived, and takes what it needs. So a call may begin on one thread and end on another. All
/// ranks' plans have the same number of steps, at least one. Group and memory belong to the caller
/// and must outlive the plan.
class Plan {
 public:
  struct promise_type {
    Plan get_return_object() { return Plan(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { throw; }
  };

  Plan() = default;
  Plan(Plan&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Plan& operator=(Plan&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Plan() {
    if (handle_) handle_.destroy();
  }

  explicit operator bool() const { return handle_ != nullptr; }
  /// Takes what the last step needs, if there was one, and gives what the next does. False when
  /// there is none.
  bool next() {
    handle_.resume();
    return !handle_.done();
  }

 private:
  using Handle = std::coroutine_handle<promise_type>;
  explicit Plan(Handle handle) : handle_(handle) {}

  Handle handle_;
};

/// What passes between this rank and each other one.
using Buffers = std::vector<std::span<std::byte>>;

/// In place. Data that fits the direct way is given whole and reduced by every rank. More is shared
/// out. Each rank then reduces its part, and the parts are collected a step later, while the next
/// block is under way.
Plan all_reduce_plan(SharedGroup& group, std::byte* data, size_t bytes, ReduceKernel kernel);
/// The same for `bytes` at `offset` in every rank's part of a region. Each rank reduces its share
/// of them into all parts. Nothing is copied in or out.
Plan all_reduce_plan(SharedGroup& group, const Region& region, size_t offset, size_t bytes,
                     ReduceKernel kernel);
/// Whether all_reduce of this much is done in a region where it lies.
bool pays_in_place(const SharedGroup& group, size_t bytes);
/// As all_reduce, but only the root's data changes.
Plan reduce_plan(SharedGroup& group, std::byte* data, size_t bytes, ReduceKernel kernel, int root);
Plan broadcast_plan(SharedGroup& group, std::byte* data, size_t bytes, int root);
/// `outputs`: one for each rank, `bytes` each. Empty on a rank that takes nothing (gather).
Plan all_gather_plan(SharedGroup& group, const std::byte* input, size_t bytes,
                     std::vector<std::byte*> outputs);
/// `inputs`: one for each rank, `bytes` each. Empty on all but the root.
Plan scatter_plan(SharedGroup& group, const std::vector<const std::byte*>& inputs,
                  std::byte* output, size_t bytes, int root);
/// `inputs`: one for each rank, `bytes` each.
Plan reduce_scatter_plan(SharedGroup& group, std::vector<const std::byte*> inputs,
                         std::byte* output, size_t bytes, ReduceKernel kernel);
/// The same of data that lies in a region. At `offset` of every rank's part there are `bytes` for
/// each rank, one rank's after the other's. Each rank reduces its own of all parts into `output`,
/// outside of the region. Nothing is copied. When the call is finished, all ranks have read, and
/// the data may be overwritten.
Plan reduce_scatter_plan(SharedGroup& group, const Region& region, size_t offset, std::byte* output,
                         size_t bytes, ReduceKernel kernel);
/// `sends[r]` goes to rank r. What comes from it goes into `receives[r]`. Throws what
/// `SharedGroup::differ` throws when two ranks do not agree on how much passes between them.
Plan all_to_all_plan(SharedGroup& group, const Call& call, Buffers sends, Buffers receives,
                     std::chrono::milliseconds timeout);
/// One after the other, as one call. Without any it is a barrier.
Plan sequence_plan(std::vector<Plan> plans);

/// Begins a call: its first step is given, and the others are told.
void start(SharedGroup& group, const Call& call, Plan& plan);
/// The rest of it. Throws what SharedGroup throws.
void finish(SharedGroup& group, const Call& call, Plan& plan, std::chrono::milliseconds timeout,
            Waiter waiter = Waiter::thread);

}  // namespace lockstep::shm
