#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/shared_memory/messages.h"
#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::shm {

/// One collective of this rank, and how it is done.
class ShmWork final : public backends::TensorWork {
 public:
  using TensorWork::TensorWork;

  uint64_t hash() const override;

  /// Several are done one after the other.
  void add(Plan plan) { plans_.push_back(std::move(plan)); }
  /// Once, when all have been added.
  void close();
  Plan& plan() { return plan_; }
  /// Of the data, where all ranks must use the same part of the same memory.
  void set_region(RegionOffset region) { region_ = std::move(region); }
  bool begun = false;  ///< The others have been told.

 private:
  std::vector<Plan> plans_;
  Plan plan_;
  RegionOffset region_;
};

/// The text for a send and a receive that met and do not fit.
std::string judge_messages(const Disagreement& disagreement, const backends::GroupNames& names);

/// A send or a receive of one tensor. Any thread may wait. The thread that waits does the work.
class ShmMessageWork final : public backends::TensorWork {
 public:
  using TensorWork::TensorWork;
  /// Once: posts the message. The future's callbacks run in a thread of `queue`, which must outlive
  /// `messages`.
  void begin(Messages& messages, backends::CallQueue& queue, int tag);

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return message_->source(); }
  uint64_t hash() const override;
  std::string text() const override;

 private:
  const at::Tensor& tensor() const;

  int tag_ = 0;
  MessagePtr message_;
};

}  // namespace lockstep::shm
