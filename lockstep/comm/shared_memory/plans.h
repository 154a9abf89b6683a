#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/comm/shared_memory/reduction_kernels.h"
#include "lockstep/comm/shared_memory/region.h"
#include "lockstep/comm/shared_memory/shared_group.h"

namespace lockstep::shm {

/// A collective as a program of steps. In each, every rank gives something (`fill`), all arrive,
/// and every rank takes what it needs (`drain`). Cutting it thus lets a call begin on one thread
/// and end on another. All ranks' plans have the same number of steps. Memory belongs to the caller
/// and must outlive the plan.
class Plan {
 public:
  virtual ~Plan() = default;
  virtual int64_t steps() const = 0;
  virtual void fill(int64_t step, SharedGroup& group) = 0;
  virtual void drain(int64_t step, SharedGroup& group) = 0;
};

/// What passes between this rank and each other one.
using Buffers = std::vector<std::span<std::byte>>;

/// In place. Data that fits the direct way is given whole and reduced by every rank. More is shared
/// out. Each rank then reduces its part, and the parts are collected a step later, while the next
/// block is under way.
std::unique_ptr<Plan> all_reduce_plan(const SharedGroup& group, std::byte* data, size_t count,
                                      DataType type, ReduceKernel kernel);
/// The same for `count` elements at `offset` in every rank's part of a region. Each rank reduces
/// its share of them into all parts. Nothing is copied in or out.
std::unique_ptr<Plan> all_reduce_plan(const SharedGroup& group, const Region& region, size_t offset,
                                      size_t count, DataType type, ReduceKernel kernel);
/// Whether all_reduce of this much is done in a region where it lies.
bool pays_in_place(const SharedGroup& group, size_t bytes);
/// As all_reduce, but only the root's data changes.
std::unique_ptr<Plan> reduce_plan(const SharedGroup& group, std::byte* data, size_t count,
                                  DataType type, ReduceKernel kernel, int root);
std::unique_ptr<Plan> broadcast_plan(const SharedGroup& group, std::byte* data, size_t bytes,
                                     int root);
/// `outputs`: one for each rank, `bytes` each. Empty on a rank that takes nothing (gather).
std::unique_ptr<Plan> all_gather_plan(const SharedGroup& group, const std::byte* input,
                                      size_t bytes, std::vector<std::byte*> outputs);
/// `inputs`: one for each rank, `bytes` each. Empty on all but the root.
std::unique_ptr<Plan> scatter_plan(const SharedGroup& group,
                                   const std::vector<const std::byte*>& inputs, std::byte* output,
                                   size_t bytes, int root);
/// `inputs`: one for each rank, `count` elements each.
std::unique_ptr<Plan> reduce_scatter_plan(const SharedGroup& group,
                                          std::vector<const std::byte*> inputs, std::byte* output,
                                          size_t count, DataType type, ReduceKernel kernel);
/// The same of data that lies in a region. At `offset` of every rank's part there are `count`
/// elements for each rank, one rank's after the other's. Each rank reduces its own of all parts
/// into `output`, outside of the region. Nothing is copied. When the call is finished, all ranks
/// have read, and the data may be overwritten.
std::unique_ptr<Plan> reduce_scatter_plan(const SharedGroup& group, const Region& region,
                                          size_t offset, std::byte* output, size_t count,
                                          DataType type, ReduceKernel kernel);
/// `sends[r]` goes to rank r. What comes from it goes into `receives[r]`. Throws what
/// `SharedGroup::differ` throws when two ranks do not agree on how much passes between them.
std::unique_ptr<Plan> all_to_all_plan(const SharedGroup& group, const Call& call, Buffers sends,
                                      Buffers receives, std::chrono::milliseconds timeout);
/// One after the other, as one call. Without any it is a barrier.
std::unique_ptr<Plan> sequence_plan(std::vector<std::unique_ptr<Plan>> plans);

/// Begins a call: its first step is given, and the others are told.
void start(SharedGroup& group, const Call& call, Plan& plan);
/// The rest of it. Throws what SharedGroup throws.
void finish(SharedGroup& group, const Call& call, Plan& plan, std::chrono::milliseconds timeout,
            Waiter waiter = Waiter::thread);

}  // namespace lockstep::shm
