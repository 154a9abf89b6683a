#include "lockstep/base/call_origin.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/scaled_copy.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"

namespace lockstep {
namespace {

using detail::bytes_of;

/// What DDP's hooks know to reduce in.
CommHook hook_of(std::optional<at::ScalarType> dtype, const std::vector<at::Tensor>& parameters) {
  if (!dtype || (!parameters.empty() && *dtype == parameters.front().scalar_type()))
    return CommHook::none;
  if (*dtype == at::kHalf) return CommHook::fp16_compress;
  if (*dtype == at::kBFloat16) return CommHook::bf16_compress;
  throw UsageError(std::string("zero1: StrategyOptions::reduce_dtype is ") + c10::toString(*dtype),
                   "use float16, bfloat16 or none");
}

/// What is packed and sent at a time, of all ranks together. It stays in the cache between the two,
/// and is little beside a model's state.
constexpr int64_t kPackBytes = 1 << 20;
constexpr size_t kInFlight = 2;

/// Averages gradients while backward runs, each part on the rank that updates it alone (stage 2 of
/// ZeRO). A bucket's whole gradients are given up as soon as they have been sent. One thread at a
/// time, and one backward at a time.
class ShardReducer : public detail::GradientReducer {
 public:
  /// `parameters`: those of the optimizer's that need a gradient. `dtype`: to reduce in, in place
  /// of the gradients' own. A rank's optimizer must outlive this.
  ShardReducer(detail::ShardedOptimizer& optimizer,
               const std::vector<detail::ReducedParameter>& parameters, std::string what,
               std::optional<at::ScalarType> dtype)
      : optimizer_(optimizer), what_(std::move(what)), dtype_(dtype) {
    const detail::ParameterShards& shards = optimizer_.shards();
    names_.resize(shards.parameters().size());
    cuts_.resize(names_.size());
    means_.resize(shards.layout().size());
    order_.resize(means_.size());
    std::iota(order_.begin(), order_.end(), 0);
    for (const detail::ReducedParameter& parameter : parameters) {
      const auto& all = shards.parameters();
      const auto same = [&](const at::Tensor& other) { return other.is_same(parameter.tensor); };
      indices_.push_back(std::find_if(all.begin(), all.end(), same) - all.begin());
      names_.at(indices_.back()) = parameter.name;
    }
  }

  void before_forward(bool) override {
    optimizer_.follow_parameters();
    agree_on_order();
  }
  void begin() override {
    if (has_means_ && !told_kept_ && version_ != parts_version()) {
      told_kept_ = true;
      log_warning(
          what_ +
          ": gradients add up to those of before the last step, which were not cleared. Call "
          "the strategy's zero_grad(); the module's own does not reach shards");
    }
    agree_on_order();
    sent_.clear();
    pending_.clear();
    for (const detail::ShardBucket& bucket : optimizer_.shards().layout())
      pending_.push_back(bucket.parameters.size());
    if (!ordered_) arrived_.clear();
    next_ = 0;
  }
  void take(size_t index) override {
    const size_t bucket = optimizer_.shards().place(indices_[index]).bucket;
    if (--pending_[bucket] > 0) return;
    if (!ordered_) arrived_.push_back(bucket);
    reduce_what_is_ready();
  }

  /// This rank's means, as vectors: what `step` uses. They may have zeros between parameters.
  std::vector<at::Tensor> gradients() const {
    return has_means_ ? means_ : std::vector<at::Tensor>();
  }
  /// Forgets them. Their memory is kept for the next step.
  void drop_gradients() {
    has_means_ = false;
    optimizer_.drop_gradients();
  }
  int64_t gradient_bytes() const { return bytes_of(means_); }

 private:
  /// A part of a bucket on its way.
  struct Sent {
    Work work;
    at::Tensor source;  ///< All ranks' parts.
    at::Tensor result;
    at::Tensor target;  ///< Of `result`, where that is another tensor.
    bool adds = false;
  };

  void agree_on_order() {
    if (ordered_ || arrived_.size() != order_.size()) return;
    // Rank 0's, so that all ranks make the same calls.
    order_ = optimizer_.shards().group().broadcast_object(arrived_, 0).get<std::vector<size_t>>();
    ordered_ = true;
  }
  void reduce_what_is_ready() {
    const c10::AutoGradMode no_grad(false);
    for (; next_ < order_.size() && pending_[order_[next_]] == 0; ++next_) reduce(order_[next_]);
    if (next_ == order_.size()) finish();
  }
  void reduce(size_t index) {
    const at::AutoDispatchBelowADInplaceOrView untracked;
    const detail::ParameterShards& shards = optimizer_.shards();
    const detail::ShardBucket& bucket = shards.layout()[index];
    const ProcessGroup& group = shards.group();
    const auto options =
        shards.parameters()[bucket.parameters.front()].options().requires_grad(false);
    const auto sent_options =
        options.dtype(dtype_.value_or(c10::typeMetaToScalarType(options.dtype())));
    const bool narrowed = sent_options.dtype() != options.dtype();
    std::vector<at::Tensor> gradients;
    for (const size_t parameter : bucket.parameters)
      gradients.push_back(ordered_gradient(parameter));
    const bool last = index == order_.back();
    const int64_t share = bucket.bounds[1], ranks = group.size();
    at::Tensor& mean = means_[index];
    if (!mean.defined()) mean = at::empty({share}, options);
    const auto element = static_cast<int64_t>(sent_options.dtype().itemsize());
    const int64_t most =
        std::max(detail::kCut, kPackBytes / element / ranks / detail::kCut * detail::kCut);
    for (int64_t begin = 0; begin < share; begin += most) {
      const int64_t count = std::min(most, share - begin);
      receive(kInFlight - 1);
      Sent sent;
      sent.source = at::empty({ranks * count}, sent_options);
      for (int64_t rank = 0; rank < ranks; ++rank)
        pack(bucket, gradients, rank * share + begin, rank * share + begin + count,
             sent.source.narrow(0, rank * count, count));
      const CallOrigin origin("gradients", "ZeRO");
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
  /// The parameter's gradient as a vector in the order of the parameter's memory.
  at::Tensor ordered_gradient(size_t index) const {
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
  void pack(const detail::ShardBucket& bucket, const std::vector<at::Tensor>& gradients,
            int64_t begin, int64_t end, const at::Tensor& target) const {
    const auto& offsets = bucket.offsets;
    const double share = 1.0 / optimizer_.shards().group().size();
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
      detail::scaled_copy(target.narrow(0, from - begin, to - from),
                          gradient.narrow(0, from - offsets[k], to - from), share);
      at = to;
    }
    if (at < end) target.narrow(0, at - begin, end - at).zero_();
  }
  /// Waits for the oldest, until at most so many are on their way.
  void receive(size_t most_in_flight) {
    while (sent_.size() > most_in_flight) {
      Sent sent = std::move(sent_.front());
      sent_.pop_front();
      if (sent.work) sent.work.wait();
      if (sent.target.is_same(sent.result)) continue;
      sent.adds ? sent.target.add_(sent.result) : sent.target.copy_(sent.result);
    }
  }
  uint64_t parts_version() const {
    uint64_t version = 0;
    for (const at::Tensor& part : optimizer_.shards().parts()) version += part._version();
    return version;
  }
  void finish() {
    receive(0);
    const at::AutoDispatchBelowADInplaceOrView untracked;
    const detail::ParameterShards& shards = optimizer_.shards();
    const int rank = shards.group().rank();
    for (size_t i = 0; i < cuts_.size(); ++i) {
      const at::Tensor& part = shards.parts()[i];
      if (part.numel() == 0) continue;
      if (!cuts_[i].defined()) {
        const auto [bucket, offset] = shards.place(i);
        const int64_t begin = offset + shards.part(rank, i).begin -
                              shards.layout()[bucket].bounds[static_cast<size_t>(rank)];
        cuts_[i] = means_[bucket].as_strided(part.sizes(), part.strides(), begin);
      }
      part.mutable_grad() = cuts_[i];
    }
    has_means_ = true;
    version_ = parts_version();
  }

  detail::ShardedOptimizer& optimizer_;
  std::vector<std::string> names_;  ///< By parameter of the optimizer, as all that follows.
  std::vector<size_t> indices_;     ///< Of the parameters that need a gradient.
  const std::string what_;
  const std::optional<at::ScalarType> dtype_;
  std::vector<size_t> pending_;    ///< Gradients that are still to come, by bucket.
  std::vector<size_t> order_;      ///< In which buckets are reduced.
  std::vector<size_t> arrived_;    ///< The order in which the first backward filled them.
  bool ordered_ = false;           ///< `order_` is that of the first backward.
  std::vector<at::Tensor> means_;  ///< This rank's share of each bucket.
  std::vector<at::Tensor> cuts_;   ///< Of `means_`, as the optimizer's parts; by parameter.
  bool has_means_ = false;
  uint64_t version_ = 0;  ///< Of the parts, when they got their gradients: a step changes it.
  bool told_kept_ = false;
  std::deque<Sent> sent_;
  size_t next_ = 0;  ///< The first of `order_` that has not been sent.
};

class ZeroStrategy : public detail::WholeModelStrategy {
 public:
  ZeroStrategy(const StrategySetup& setup, int stage)
      : WholeModelStrategy("zero" + std::to_string(stage), setup),
        optimizer_(parameters(), setup.make_optimizer, group(), name(),
                   /*small_buckets=*/stage == 2) {
    if (stage == 1) {
      DdpOptions options;
      options.comm_hook = hook_of(setup.options.reduce_dtype, parameters());
      average_gradients(options);
    } else {
      average_gradients({}, [&](const auto& parameters) {
        auto reducer = std::make_unique<ShardReducer>(optimizer_, parameters, name(),
                                                      setup.options.reduce_dtype);
        reducer_ = reducer.get();
        return reducer;
      });
    }
  }
  /// The reducer uses the optimizer.
  ~ZeroStrategy() override { drop_reducer(); }

  std::vector<at::Tensor> gradients() const override {
    return reducer_ ? reducer_->gradients() : WholeModelStrategy::gradients();
  }
  bool has_sharded_gradients() const override { return reducer_ != nullptr; }
  double clip_grad_norm(double max_norm) override {
    if (!reducer_) return WholeModelStrategy::clip_grad_norm(max_norm);
    return detail::clip_shards(reducer_->gradients(), max_norm, group());
  }

  void update(const StepScale& scale) override {
    if (!reducer_) optimizer_.take_gradients();
    optimizer_.step(scale);
    if (!reducer_) optimizer_.drop_gradients();
  }
  void zero_grad() override {
    WholeModelStrategy::zero_grad();
    if (reducer_) reducer_->drop_gradients();
  }

  StateDict optimizer_state() override {
    return optimizer_.spread().gather(optimizer_.local().state());
  }
  std::vector<TensorShard> optimizer_shards() override {
    return optimizer_.spread().shards(optimizer_.local().state());
  }
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() override {
    return optimizer_.spread().needed();
  }
  void load_optimizer_state(const StateDict& state) override { optimizer_.load_state(state); }

  StateBytes state_bytes() const override {
    const int64_t shards = reducer_ ? reducer_->gradient_bytes() : 0;
    return {bytes_of(parameters()), shards + bytes_of(WholeModelStrategy::gradients()),
            bytes_of(optimizer().state())};
  }

 private:
  Optimizer& optimizer() const override { return optimizer_.local(); }

  detail::ShardedOptimizer optimizer_;
  ShardReducer* reducer_ = nullptr;  ///< Of stage 2; the base owns it.
};

}  // namespace

std::unique_ptr<Strategy> make_zero1_strategy(const StrategySetup& setup) {
  return std::make_unique<ZeroStrategy>(setup, 1);
}

std::unique_ptr<Strategy> make_zero2_strategy(const StrategySetup& setup) {
  return std::make_unique<ZeroStrategy>(setup, 2);
}

}  // namespace lockstep
