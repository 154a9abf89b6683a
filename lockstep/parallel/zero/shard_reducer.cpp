#include "lockstep/parallel/zero/shard_reducer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/scaled_copy.h"

namespace lockstep::detail {
namespace {

/// What is packed and sent at a time, of all ranks together. It stays in the cache between the two,
/// and is little beside a model's state.
constexpr int64_t kPackBytes = 1 << 20;
constexpr size_t kInFlight = 2;

}  // namespace

ShardReducer::ShardReducer(ShardedOptimizer& optimizer,
                           const std::vector<ReducedParameter>& parameters, std::string what,
                           std::optional<at::ScalarType> dtype)
    : optimizer_(optimizer),
      what_(std::move(what)),
      dtype_(dtype),
      divisor_(optimizer.shards().group().size()) {
  const ParameterShards& shards = optimizer_.shards();
  bucket_of_.resize(shards.parameters().size());
  names_.resize(bucket_of_.size());
  cuts_.resize(bucket_of_.size());
  means_.resize(shards.layout().size());
  order_.resize(means_.size());
  std::iota(order_.begin(), order_.end(), 0);
  for (size_t bucket = 0; bucket < means_.size(); ++bucket) {
    for (const size_t index : shards.layout()[bucket].parameters) bucket_of_[index] = bucket;
  }
  for (const ReducedParameter& parameter : parameters) {
    const auto& all = shards.parameters();
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter.tensor); };
    indices_.push_back(std::find_if(all.begin(), all.end(), same) - all.begin());
    names_.at(indices_.back()) = parameter.name;
  }
}

void ShardReducer::before_forward(bool) {
  optimizer_.follow_parameters();
  agree_on_order();
}

void ShardReducer::agree_on_order() {
  if (ordered_ || arrived_.size() != order_.size()) return;
  // Rank 0's, so that all ranks make the same calls.
  order_ = optimizer_.shards().group().broadcast_object(arrived_, 0).get<std::vector<size_t>>();
  ordered_ = true;
}

uint64_t ShardReducer::parts_version() const {
  uint64_t version = 0;
  for (const at::Tensor& part : optimizer_.shards().parts()) version += part._version();
  return version;
}

void ShardReducer::begin() {
  if (has_means_ && !told_kept_ && version_ != parts_version()) {
    told_kept_ = true;
    log_warning(what_ +
                ": gradients add up to those of before the last step, which were not cleared. Call "
                "the strategy's zero_grad(); the module's own does not reach shards");
  }
  agree_on_order();
  sent_.clear();
  pending_.clear();
  for (const ShardBucket& bucket : optimizer_.shards().layout())
    pending_.push_back(bucket.parameters.size());
  if (!ordered_) arrived_.clear();
  next_ = 0;
}

void ShardReducer::take(size_t index) {
  const size_t bucket = bucket_of_[indices_[index]];
  if (--pending_[bucket] > 0) return;
  if (!ordered_) arrived_.push_back(bucket);
  reduce_what_is_ready();
}

void ShardReducer::reduce_what_is_ready() {
  const c10::AutoGradMode no_grad(false);
  for (; next_ < order_.size() && pending_[order_[next_]] == 0; ++next_) reduce(order_[next_]);
  if (next_ == order_.size()) finish();
}

void ShardReducer::reduce_zeros() {
  begin();
  std::fill(pending_.begin(), pending_.end(), 0);
  for (const at::Tensor& parameter : optimizer_.shards().parameters())
    parameter.mutable_grad().reset();
  reduce_what_is_ready();
  if (!ordered_) arrived_ = order_;
}

/// The parameter's gradient as a vector in the order of the parameter's memory.
at::Tensor ShardReducer::ordered_gradient(size_t index) const {
  const at::Tensor& parameter = optimizer_.shards().parameters()[index];
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return {};
  if (gradient.layout() != at::kStrided)
    throw UsageError(
        what_ + ": the gradient of " + names_[index] + " is sparse, and cannot be cut into parts",
        "make it dense (sparse=false of an embedding), or use the strategy ddp");
  return elements_like(gradient, parameter);
}

/// Elements [begin, end) of a bucket, divided. What no parameter has is 0.
void ShardReducer::pack(const ShardBucket& bucket, const std::vector<at::Tensor>& gradients,
                        int64_t begin, int64_t end, const at::Tensor& target) const {
  const auto& offsets = bucket.offsets;
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), begin);
  int64_t at = begin;
  for (auto k = static_cast<size_t>(after - offsets.begin()) - 1;
       k < offsets.size() && offsets[k] < end; ++k) {
    const at::Tensor& gradient = gradients[k];
    if (!gradient.defined()) continue;
    const int64_t from = std::max(begin, offsets[k]);
    const int64_t to = std::min(end, offsets[k] + gradient.numel());
    if (from >= to) continue;
    if (at < from) target.narrow(0, at - begin, from - at).zero_();
    scaled_copy(target.narrow(0, from - begin, to - from),
                gradient.narrow(0, from - offsets[k], to - from), 1.0 / divisor_);
    at = to;
  }
  if (at < end) target.narrow(0, at - begin, end - at).zero_();
}

void ShardReducer::reduce(size_t index) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const ParameterShards& shards = optimizer_.shards();
  const ShardBucket& bucket = shards.layout()[index];
  const ProcessGroup& group = shards.group();
  const auto options =
      shards.parameters()[bucket.parameters.front()].options().requires_grad(false);
  const auto sent_options =
      options.dtype(dtype_.value_or(c10::typeMetaToScalarType(options.dtype())));
  const bool narrowed = sent_options.dtype() != options.dtype();
  std::vector<at::Tensor> gradients;
  for (const size_t parameter : bucket.parameters) gradients.push_back(ordered_gradient(parameter));
  const bool last = index == order_.back();
  const int64_t share = bucket.bounds[1], ranks = group.size();
  at::Tensor& mean = means_[index];
  if (!mean.defined()) mean = at::empty({share}, options);
  const auto element = static_cast<int64_t>(sent_options.dtype().itemsize());
  const int64_t most = std::max(kCut, kPackBytes / element / ranks / kCut * kCut);
  for (int64_t begin = 0; begin < share; begin += most) {
    const int64_t count = std::min(most, share - begin);
    receive(kInFlight - 1);
    Sent sent;
    sent.source = at::empty({ranks * count}, sent_options);
    for (int64_t rank = 0; rank < ranks; ++rank)
      pack(bucket, gradients, rank * share + begin, rank * share + begin + count,
           sent.source.narrow(0, rank * count, count));
    sent.target = mean.narrow(0, begin, count);
    sent.adds = has_means_;
    sent.result = narrowed || sent.adds ? at::empty({count}, sent_options) : sent.target;
    if (last) {
      group.reduce_scatter_tensor(sent.result, sent.source);  // Nothing is left to compute.
    } else {
      sent.work = group.reduce_scatter_tensor_async(sent.result, sent.source);
    }
    sent_.push_back(std::move(sent));
  }
  for (const size_t parameter : bucket.parameters)
    shards.parameters()[parameter].mutable_grad().reset();
}

/// Waits for the oldest, until at most so many are on their way.
void ShardReducer::receive(size_t most_in_flight) {
  while (sent_.size() > most_in_flight) {
    Sent sent = std::move(sent_.front());
    sent_.pop_front();
    if (sent.work) sent.work.wait();
    if (sent.target.is_same(sent.result)) continue;
    sent.adds ? sent.target.add_(sent.result) : sent.target.copy_(sent.result);
  }
}

void ShardReducer::finish() {
  receive(0);
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const ParameterShards& shards = optimizer_.shards();
  const int rank = shards.group().rank();
  for (size_t i = 0; i < cuts_.size(); ++i) {
    const at::Tensor& part = shards.parts()[i];
    if (part.numel() == 0) continue;
    if (!cuts_[i].defined()) {
      const size_t bucket = bucket_of_[i];
      const ShardBucket& layout = shards.layout()[bucket];
      const auto place = std::find(layout.parameters.begin(), layout.parameters.end(), i);
      const int64_t offset = layout.offsets[static_cast<size_t>(place - layout.parameters.begin())];
      const int64_t begin =
          offset + shards.part(rank, i).begin - layout.bounds[static_cast<size_t>(rank)];
      cuts_[i] = means_[bucket].as_strided(part.sizes(), part.strides(), begin);
    }
    part.mutable_grad() = cuts_[i];
  }
  has_means_ = true;
  version_ = parts_version();
}

void ShardReducer::fill(DdpStatistics& statistics) const {
  statistics.buckets_rebuilt = ordered_;
  for (const ShardBucket& bucket : optimizer_.shards().layout()) {
    const auto& like = optimizer_.shards().parameters()[bucket.parameters.front()];
    statistics.bucket_bytes.push_back(bucket.bounds.back() * like.element_size());
  }
}

void ShardReducer::drop_gradients() {
  has_means_ = false;
  optimizer_.drop_gradients();
}

}  // namespace lockstep::detail
