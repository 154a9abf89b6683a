#include "lockstep/checkpoint/checkpoint_writer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/sharded_save.h"

namespace lockstep {
namespace {

constexpr const char* kOverlaps[] = {"none", "wait", "skip"};
/// Another rank's disk may be slow. One that is lost is noticed sooner.
constexpr std::chrono::hours kLongestWrite{1};

}  // namespace

CheckpointOverlap checkpoint_overlap(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kOverlaps[i]) return static_cast<CheckpointOverlap>(i);
  }
  throw UsageError(
      unknown_word("checkpoint overlap", name, {std::begin(kOverlaps), std::end(kOverlaps)}));
}

struct CheckpointWriter::Pending {
  explicit Pending(detail::ShardedSave what) : save(std::move(what)) {}
  detail::ShardedSave save;
  std::string error;
  std::atomic<bool> done = false;
  std::thread thread;
};

CheckpointWriter::CheckpointWriter(ProcessGroup group, CheckpointFolder folder)
    : group_(std::move(group)), folder_(std::move(folder)) {}

CheckpointWriter::~CheckpointWriter() {
  join();
}

void CheckpointWriter::join() {
  if (pending_ && pending_->thread.joinable()) pending_->thread.join();
}

bool CheckpointWriter::is_busy_anywhere() {
  int busy = pending_ && !pending_->done ? 1 : 0;
  if (group_.size() > 1) group_.all_reduce_values(ReduceOp::max, busy);
  return busy != 0;
}

bool CheckpointWriter::save(const CheckpointShards& shards, CheckpointOverlap overlap) {
  if (overlap == CheckpointOverlap::skip && is_busy_anywhere()) return false;
  join();
  auto next = std::make_unique<Pending>(detail::ShardedSave(group_, shards));
  pending_ = std::move(next);
  if (overlap == CheckpointOverlap::none) {
    pending_->error = pending_->save.write(group_, folder_);
    finish();
    return true;
  }
  copy(pending_->save.tensors());
  if (!own_group_ && group_.size() > 1) {
    own_group_ = group_.split(0, group_.rank());
    own_group_.set_timeout(std::max<std::chrono::milliseconds>(kLongestWrite, group_.timeout()));
  }
  const ProcessGroup& group = group_.size() > 1 ? own_group_ : group_;
  pending_->thread = std::thread([this, &group, pending = pending_.get()] {
    try {
      pending->error = pending->save.write(group, folder_);
      if (!pending->error.empty() && group.rank() == 0) log_warning(pending->error);
    } catch (const CommError& failure) {
      pending->error = failure.what();  // Training learns of it, too.
    } catch (const std::exception& failure) {
      pending->error = failure.what();
      log_warning(pending->error);
    }
    pending->done = true;
  });
  return true;
}

void CheckpointWriter::finish() {
  join();
  const auto finished = std::exchange(pending_, nullptr);
  if (finished && !finished->error.empty()) throw CheckpointError(finished->error);
}

/// One after the other into the buffer, each where it is aligned for any dtype.
void CheckpointWriter::copy(std::map<size_t, at::Tensor>& tensors) {
  constexpr int64_t kAlignment = 64;
  const auto room_of = [](const at::Tensor& tensor) {
    return (static_cast<int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
  };
  int64_t bytes = 0;
  bool pinned = false;
  for (const auto& [index, tensor] : tensors) {
    bytes += room_of(tensor);
    pinned = pinned || tensor.is_cuda();
  }
  if (!buffer_.defined() || buffer_.numel() < bytes) {
    buffer_.reset();
    buffer_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
  }
  int64_t offset = 0;
  for (auto& [index, tensor] : tensors) {
    at::Tensor copied = buffer_.narrow(0, offset, static_cast<int64_t>(tensor.nbytes()))
                            .view(tensor.scalar_type())
                            .view(tensor.sizes());
    copied.copy_(tensor);
    offset += room_of(tensor);
    tensor = copied;
  }
}

}  // namespace lockstep
