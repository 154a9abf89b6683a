// The reducer of DistributedDataParallel: an all-reduce, or a hook, for each bucket of gradients.
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/scaled_copy.h"

namespace lockstep::detail {
namespace {

/// Buckets as lists of parameters, in the order in which they are reduced.
using BucketLayout = std::vector<std::vector<size_t>>;

size_t bytes_of(double mebibytes, const char* option) {
  const double bytes = mebibytes * 1024 * 1024;
  if (!(bytes >= 1) || bytes > 1e15) {
    throw UsageError(std::string("DdpOptions::") + option + " is " + std::to_string(mebibytes) +
                     " MiB, expected more than 0");
  }
  return static_cast<size_t>(bytes);
}

/// Of the first bucket, and of all others, which is at least as much.
std::vector<size_t> bucket_caps(const DdpOptions& options) {
  const size_t rest = bytes_of(options.bucket_cap_mb, "bucket_cap_mb");
  return {std::min(rest, bytes_of(options.first_bucket_mb, "first_bucket_mb")), rest};
}

/// Sends the gradients in a narrower type.
AsyncGradientHook compress(at::ScalarType dtype) {
  return [dtype](const ProcessGroup& group, GradientBucket& bucket) {
    // Divided first, as in Python, so that the sum does not overflow.
    at::Tensor narrow = bucket.gradients.to(dtype).div_(static_cast<double>(group.size()));
    return [work = group.all_reduce_async(narrow), narrow, wide = bucket.gradients]() {
      work.wait();
      return wide.copy_(narrow);
    };
  };
}

/// What is done to a bucket in place of the all-reduce; null where nothing is.
AsyncGradientHook hook_of(const DdpOptions& options) {
  if (options.async_custom_hook) return options.async_custom_hook;
  if (options.custom_hook) {
    return [hook = options.custom_hook](const ProcessGroup& group, GradientBucket& bucket) {
      return [result = hook(group, bucket)] { return result; };
    };
  }
  if (options.comm_hook == CommHook::fp16_compress) return compress(at::kHalf);
  if (options.comm_hook == CommHook::bf16_compress) return compress(at::kBFloat16);
  return {};
}

class BucketReducer final : public GradientReducer {
 public:
  BucketReducer(std::vector<ReducedParameter> parameters, const ProcessGroup& group,
                const DdpOptions& options, const char* caller)
      : GradientReducer(group, caller, group.size()),
        options_(options),
        hook_(hook_of(options)),
        parameters_(std::move(parameters)) {
    for (const ReducedParameter& parameter : parameters_) {
      tensors_.push_back(parameter.tensor);
      sparse_.push_back(parameter.sparse_gradient);
    }
    staged_.resize(tensors_.size());
    used_.resize(tensors_.size());
    learns_order_ = options_.static_graph || !options_.find_unused_parameters;
    make_buckets(first_layout());
  }

  ArrivalRules rules() const override {
    return {.may_repeat = options_.static_graph, .may_miss = may_miss()};
  }

  /// A static graph's first round tells of each gradient at its end only.
  void before_forward() override {
    if (!learns_order_ || rounds_ < (options_.static_graph ? 2 : 1)) return;
    make_buckets(layout_by_arrival(agreed_arrivals()));
    learns_order_ = false;
    rebuilt_ = true;
  }

  void reduce_zeros() override {
    begin();
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      sparse_[i] ? buckets_[unit_of_[i]].flat = no_rows(i) : views_[i].zero_();
      staged_[i] = true;
    }
    finish();
  }

  void fill(DdpStatistics& statistics) const override {
    statistics.buckets_rebuilt = rebuilt_;
    for (const Bucket& bucket : buckets_)
      statistics.bucket_bytes.push_back(
          sparse_[bucket.parameters.front()] ? 0 : static_cast<int64_t>(bucket.flat.nbytes()));
  }

 private:
  struct Bucket {
    at::Tensor flat;  ///< Of a sparse gradient: itself.
    std::vector<size_t> parameters;
  };

  bool may_miss() const { return options_.static_graph || options_.find_unused_parameters; }

  /// The buckets that Python's DistributedDataParallel starts with: one for the first step, unless
  /// parameters may go unused. The true order of gradients is known only after that step. A bucket
  /// started early could then cross other collectives of backward.
  BucketLayout first_layout() const {
    std::vector<size_t> caps = bucket_caps(options_);
    if (learns_order_) caps = {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
    auto layout = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors_, caps, sparse_));
    // Backward produces gradients about in the opposite order.
    std::reverse(layout.begin(), layout.end());
    return layout;
  }

  BucketLayout layout_by_arrival(const std::vector<size_t>& order) const {
    std::vector<at::Tensor> tensors;
    for (const size_t index : order) tensors.push_back(tensors_[index]);
    return std::get<0>(c10d::compute_bucket_assignment_by_size(
        tensors, bucket_caps(options_), sparse_, std::vector<int64_t>(order.begin(), order.end())));
  }

  /// On the CPU all buckets lie in one symmetric memory, each from a cache line's start. Gradients
  /// that are views of the old buckets become views of the new ones.
  void make_buckets(const BucketLayout& layout) {
    constexpr int64_t kLine = 64;
    const auto bytes_of = [&](const std::vector<size_t>& bucket) {
      int64_t bytes = 0;
      for (const size_t i : bucket)
        if (!sparse_[i] && tensors_[i].is_cpu())
          bytes += static_cast<int64_t>(tensors_[i].nbytes());
      return (bytes + kLine - 1) / kLine * kLine;
    };
    int64_t total = 0;
    for (const auto& bucket : layout) total += bytes_of(bucket);
    const at::Tensor arena = total > 0 ? group_.symmetric_empty(total, at::kByte) : at::Tensor();
    // Autograd need not know that they are views: it would forbid to detach them in place, as
    // optimizers do.
    const at::AutoDispatchBelowADInplaceOrView untracked;
    std::vector<at::Tensor> views(tensors_.size());
    std::vector<size_t> bucket_of(tensors_.size());
    buckets_.clear();
    int64_t begin = 0;
    for (const auto& members : layout) {
      int64_t elements = 0;
      for (const size_t i : members) {
        elements += tensors_[i].numel();
        bucket_of[i] = buckets_.size();
      }
      buckets_.push_back({{}, members});
      const at::Tensor& first = tensors_[members.at(0)];
      if (sparse_[members.at(0)]) continue;
      const int64_t bytes = elements * static_cast<int64_t>(first.element_size());
      at::Tensor& flat = buckets_.back().flat;
      flat = first.is_cpu() ? arena.narrow(0, begin, bytes).view(first.scalar_type())
                            : at::empty({elements}, first.options().requires_grad(false));
      for (int64_t at = 0; const size_t i : members) {
        views[i] = view_like(flat, at, tensors_[i]);
        at += tensors_[i].numel();
      }
      begin += bytes_of(members);
    }
    if (options_.gradient_as_bucket_view) move_gradients(views);
    views_ = std::move(views);
    std::vector<size_t> order(buckets_.size());
    std::iota(order.begin(), order.end(), 0);
    set_units(std::move(bucket_of), std::move(order));
  }

  void move_gradients(const std::vector<at::Tensor>& views) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      at::Tensor& gradient = tensors_[i].mutable_grad();
      if (sparse_[i] || !gradient.defined() || gradient.layout() != at::kStrided) continue;
      // One that has just come is taken when its own hook runs.
      if (within_backward_ && gradient.const_data_ptr() != views_[i].const_data_ptr()) continue;
      views[i].copy_(gradient.detach());
      gradient = views[i];
    }
  }

  void begin_round() override {
    results_.clear();
    within_backward_ = true;
    before_forward();
    within_backward_ = false;
    if (may_miss()) {
      staged_.assign(tensors_.size(), false);
      used_.assign(tensors_.size(), 0);
    }
    // The gradients of a backward of a context use the buckets. Those that are there stay apart.
    context_ = context_of_this_backward();
    if (!context_ || !options_.gradient_as_bucket_view) return;
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      at::Tensor& gradient = tensors_[i].mutable_grad();
      if (gradient.defined() && gradient.layout() == at::kStrided &&
          gradient.const_data_ptr() == views_[i].const_data_ptr())
        gradient = gradient.detach().clone();
    }
  }

  void stage(size_t index) override {
    if (context_ == context_of_this_backward()) return stage_any(index);
    throw UsageError("DistributedDataParallel, rank " + std::to_string(group_.rank()) +
                         ": the gradient of " + parameters_[index].name +
                         " came in another backward than those before it, and one of the two is "
                         "of an rpc::AutogradContext",
                     "give all parameters their gradients in one context");
  }

  /// Puts a gradient, divided, into its bucket.
  void stage_any(size_t index) {
    const c10::AutoGradMode no_grad(false);
    staged_[index] = true;
    visit(index, [&](at::Tensor& gradient) {
      used_[index] = gradient.defined() ? 1 : 0;
      sparse_[index] ? stage_sparse(index, gradient) : stage_dense(index, gradient);
    });
  }

  void stage_sparse(size_t index, const at::Tensor& gradient) {
    at::Tensor& flat = buckets_[unit_of_[index]].flat;
    if (!gradient.defined()) {
      flat = no_rows(index);
      used_[index] = 1;  // Unused parameters get an empty gradient.
      return;
    }
    if (gradient.layout() != at::kSparse) refuse(index, gradient, "a sparse tensor");
    // Not in place: gradients of a sum share their values.
    flat = hook_ ? gradient.detach().clone() : gradient.detach().div(divisor_);
  }

  void stage_dense(size_t index, at::Tensor& gradient) {
    const at::Tensor& view = views_[index];
    if (!gradient.defined()) {
      view.zero_();
      return;
    }
    if (gradient.layout() != at::kStrided || gradient.scalar_type() != view.scalar_type())
      refuse(index, gradient, view.toString());
    if (gradient.const_data_ptr() == view.const_data_ptr()) {
      if (!hook_) view.div_(divisor_);
      return;
    }
    if (gradient.requires_grad() && !std::exchange(warned_, true))
      log_warning(
          "DistributedDataParallel averages gradients, but not what create_graph would have them "
          "depend on");
    scaled_copy(view, gradient.detach(), hook_ ? 1.0 : 1.0 / divisor_);
    // A context may outlive the bucket.
    if (options_.gradient_as_bucket_view && !context_) gradient = view;
  }

  [[noreturn]] void refuse(size_t index, const at::Tensor& gradient,
                           const std::string& expected) const {
    throw UsageError("DistributedDataParallel, rank " + std::to_string(group_.rank()) +
                         ": the gradient of " + parameters_[index].name + " is " +
                         gradient.toString() + ", expected " + expected + ", as in the first step",
                     "sparse gradients are known by the module whose Embedding says sparse: wrap "
                     "that, or give that to the GradientAverager");
  }

  at::Tensor no_rows(size_t index) const {
    const at::Tensor parameter = tensors_[index].detach();
    std::vector<int64_t> sizes = parameter.sizes().vec();
    sizes.front() = 0;
    return at::sparse_coo_tensor(parameter.new_empty({1, 0}, at::kLong), parameter.new_empty(sizes),
                                 parameter.sizes());
  }

  void reduce(size_t index, bool wait) override {
    Bucket& bucket = buckets_[index];
    if (awaited_[index] > 0) {
      for (const size_t i : bucket.parameters)
        if (!staged_[i]) stage_any(i);
    }
    if (hook_) {
      begin_hook(index);
    } else if (wait) {
      group_.all_reduce(bucket.flat);
    } else {
      under_way_.push_back(group_.all_reduce_async(bucket.flat));
    }
  }

  void begin_hook(size_t index) {
    const c10::AutoGradMode no_grad(false);
    GradientBucket bucket{buckets_[index].flat, {}, index, index + 1 == buckets_.size()};
    for (const size_t i : buckets_[index].parameters) bucket.parameters.push_back(tensors_[i]);
    results_.push_back(hook_(group_, bucket));
  }

  void end_hook(size_t index) {
    at::Tensor& flat = buckets_[index].flat;
    const at::Tensor result = results_[index]();
    if (!result.defined() || result.sizes() != flat.sizes() ||
        result.scalar_type() != flat.scalar_type()) {
      throw UsageError("a gradient hook returned " +
                       (result.defined() ? std::string(result.toString()) + " of " +
                                               std::to_string(result.numel()) + " elements"
                                         : std::string("no tensor")) +
                       ", expected the bucket's " + std::string(flat.toString()) + " of " +
                       std::to_string(flat.numel()) + " elements, one dimension");
    }
    if (result.is_same(flat)) return;
    flat.is_sparse() ? flat = result : flat.copy_(result);
  }

  void deliver() override {
    const c10::AutoGradMode no_grad(false);
    while (!under_way_.empty()) wait_for_oldest();
    for (size_t i = 0; i < results_.size(); ++i) end_hook(i);
    results_.clear();
    if (may_miss()) share_used();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (may_miss() && used_[i] == 0) continue;  // By no rank: it keeps what it has.
      visit(i, [&](at::Tensor& gradient) {
        sparse_[i] ? static_cast<void>(gradient = buckets_[unit_of_[i]].flat)
                   : deliver(i, gradient);
      });
    }
    context_ = nullptr;
    ++rounds_;
  }

  /// Which parameters any rank has a gradient of.
  void share_used() {
    at::Tensor used = at::tensor(used_, at::kInt).to(tensors_.front().device());
    group_.all_reduce(used, ReduceOp::max);
    used = used.cpu();
    std::copy_n(used.const_data_ptr<int32_t>(), used_.size(), used_.begin());
  }

  void deliver(size_t index, at::Tensor& gradient) {
    const at::Tensor& view = views_[index];
    if (context_) {
      gradient = view.clone();  // What came may still be on its way to another worker.
      return;
    }
    if (gradient.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) return;
    if (!gradient.defined()) {
      gradient = options_.gradient_as_bucket_view ? view : view.clone();
    } else if (gradient.const_data_ptr() != view.const_data_ptr()) {
      gradient.copy_(view);
    }
  }

  void visit(size_t index, const std::function<void(at::Tensor&)>& change) {
    visit_gradient(context_, tensors_[index], parameters_[index].name, change);
  }

  const DdpOptions options_;
  const AsyncGradientHook hook_;
  const std::vector<ReducedParameter> parameters_;
  std::vector<at::Tensor> tensors_;  ///< The parameters.
  std::vector<bool> sparse_;         ///< By parameter: its gradient has a bucket of its own.
  std::vector<at::Tensor> views_;    ///< In the buckets, by parameter.
  std::vector<Bucket> buckets_;      ///< In the order of reduction.
  std::vector<bool> staged_;         ///< By parameter, in this round.
  std::vector<int32_t> used_;        ///< By parameter: 1 where this rank has a gradient.
  std::vector<std::function<at::Tensor()>> results_;  ///< Of hooks that run, by bucket.
  int64_t rounds_ = 0;                                ///< That are complete.
  bool rebuilt_ = false;
  DistAutogradContext context_;  ///< Of the gradients that are taken.
  bool within_backward_ = false;
  bool warned_ = false;
};

}  // namespace

std::unique_ptr<GradientReducer> make_bucket_reducer(std::vector<ReducedParameter> parameters,
                                                     const ProcessGroup& group,
                                                     const DdpOptions& options,
                                                     const char* caller) {
  return std::make_unique<BucketReducer>(std::move(parameters), group, options, caller);
}

}  // namespace lockstep::detail
