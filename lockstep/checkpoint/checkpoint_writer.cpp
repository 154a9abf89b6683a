#include "lockstep/checkpoint/checkpoint_writer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <future>
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
  detail::ShardedSave save;
  std::future<std::string> error;  ///< Of a thread, for which its destructor waits.
};

CheckpointWriter::CheckpointWriter(ProcessGroup group, CheckpointFolder folder)
    : group_(std::move(group)), folder_(std::move(folder)) {}

CheckpointWriter::~CheckpointWriter() = default;

bool CheckpointWriter::is_busy_anywhere() {
  const auto now = std::chrono::seconds(0);
  int busy = pending_ && pending_->error.wait_for(now) != std::future_status::ready ? 1 : 0;
  if (group_.size() > 1) group_.all_reduce_values(ReduceOp::max, busy);
  return busy != 0;
}

bool CheckpointWriter::save(const CheckpointShards& shards, CheckpointOverlap overlap) {
  if (overlap == CheckpointOverlap::skip && is_busy_anywhere()) return false;
  if (pending_) pending_->error.wait();
  auto next = std::make_unique<Pending>(Pending{detail::ShardedSave(group_, shards), {}});
  pending_.reset();
  if (overlap == CheckpointOverlap::none) {
    const std::string error = next->save.write(group_, folder_);
    if (!error.empty()) throw CheckpointError(error);
    return true;
  }
  copy(next->save.tensors());
  if (!own_group_ && group_.size() > 1) {
    own_group_ = group_.split(0, group_.rank());
    own_group_.set_timeout(std::max<std::chrono::milliseconds>(kLongestWrite, group_.timeout()));
  }
  const ProcessGroup& group = group_.size() > 1 ? own_group_ : group_;
  next->error = std::async(std::launch::async, [this, &group, &save = next->save] {
    std::string error;
    try {
      error = save.write(group, folder_);
      if (!error.empty() && group.rank() == 0) log_warning(error);
    } catch (const CommError& failure) {
      error = failure.what();  // Training learns of it, too.
    } catch (const std::exception& failure) {
      error = failure.what();
      log_warning(error);
    }
    return error;
  });
  pending_ = std::move(next);
  return true;
}

void CheckpointWriter::finish() {
  const auto finished = std::exchange(pending_, nullptr);
  const std::string error = finished ? finished->error.get() : "";
  if (!error.empty()) throw CheckpointError(error);
}

/// One after the other into the buffer, each where it is aligned for any dtype.
void CheckpointWriter::copy(const std::vector<at::Tensor*>& tensors) {
  constexpr int64_t kAlignment = 64;
  const auto room_of = [](const at::Tensor& tensor) {
    return (static_cast<int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
  };
  int64_t bytes = 0;
  bool pinned = false;
  for (const at::Tensor* tensor : tensors) {
    bytes += room_of(*tensor);
    pinned = pinned || tensor->is_cuda();
  }
  if (!buffer_.defined() || buffer_.numel() < bytes) {
    buffer_.reset();
    buffer_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
  }
  int64_t offset = 0;
  for (at::Tensor* tensor : tensors) {
    at::Tensor copied = buffer_.narrow(0, offset, static_cast<int64_t>(tensor->nbytes()))
                            .view(tensor->scalar_type())
                            .view(tensor->sizes());
    copied.copy_(*tensor);
    offset += room_of(*tensor);
    *tensor = copied;
  }
}

}  // namespace lockstep
