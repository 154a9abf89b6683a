#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/call_queue.h"
#include "lockstep/comm/shared_memory/messages.h"
#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::shm {

/// One collective of this rank, and how it is done.
///
/// A call that need not be finished at once is begun by its caller. The caller then looks for the
/// others for as long as a hand-over to the queue's thread would take. When they have all come,
/// nothing that it waits for depends on their programs any more. So finishing it in the caller
/// cannot dead-lock, whatever the order in which ranks call into several groups. Else the thread
/// goes on with it.
class ShmWork final : public backends::TensorWork {
 public:
  /// An asynchronous call that moves more than `inline_bytes` is left to the thread at once.
  ShmWork(SharedGroup& group, size_t inline_bytes, backends::Request&& request,
          std::shared_ptr<const backends::GroupNames> names)
      : TensorWork(group.rank(), std::move(request), std::move(names)),
        group_(group),
        inline_bytes_(inline_bytes) {}

  uint64_t hash() const override;
  bool run_here() override;
  void run_later() override;

  /// Several are done one after the other.
  void add(Plan plan) {
    if (plan_) return further_.push_back(std::move(plan));
    plan_ = std::move(plan);
  }
  /// Once, when all have been added.
  void close();
  /// Of the data, where all ranks must use the same part of the same memory.
  void set_region(RegionOffset region) { region_ = std::move(region); }

 private:
  SharedGroup& group_;
  const size_t inline_bytes_;
  bool begun_ = false;  ///< The others have been told.
  Plan plan_;
  std::vector<Plan> further_;
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
