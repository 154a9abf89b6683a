#include "lockstep/parallel/fsdp/withheld_gradients.h"

#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::detail {

WithheldGradients::WithheldGradients(std::vector<at::Tensor> shards, std::string place)
    : place_(std::move(place)) {
  for (at::Tensor& shard : shards) all_.push_back({std::move(shard), {}, {}});
}

WithheldGradients::~WithheldGradients() = default;

void WithheldGradients::withhold() {
  if (std::exchange(withheld_, true)) return;
  const Unwatched unwatched;
  if (memories_.empty()) {
    MemoryWatcher& watcher = *this;
    memories_.reserve(all_.size());
    for (Withheld& one : all_) {
      memories_.emplace_back(watcher, memories_.size(), 1, one.shard.scalar_type(),
                             one.shard.device());
      // Not dense, so that nobody takes its memory without an operation.
      one.stand_in = memories_.back().tensor().expand(one.shard.sizes());
    }
  }
  for (Withheld& one : all_) {
    one.before = std::exchange(one.shard.mutable_grad(), one.stand_in);
  }
}

void WithheldGradients::release() {
  if (!std::exchange(withheld_, false)) return;
  for (Withheld& one : all_) {
    at::Tensor before = std::exchange(one.before, {});
    if (one.shard.grad().is_same(one.stand_in)) one.shard.mutable_grad() = std::move(before);
  }
}

void WithheldGradients::before_use(const std::vector<size_t>&) {
  throw UsageError(place_ + ": a gradient of a shard was used while gradients only add up",
                   "run the last forward and backward of a step outside of no_sync, then step");
}

void WithheldGradients::before_write(size_t, const std::string&) {
  before_use({});
}

}  // namespace lockstep::detail
