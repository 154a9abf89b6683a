// Our own reducer: what c10d::Reducer does for dense gradients on the CPU, with the same buckets
// and the same bits, without what it spends a step on timers, futures and views that it makes anew.
#include <c10/core/GradMode.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/scaled_copy.h"

namespace lockstep::detail {
namespace {

class BucketReducer : public GradientReducer {
 public:
  BucketReducer(const std::vector<ReducedParameter>& parameters, ProcessGroup group,
                const DdpOptions& options)
      : group_(std::move(group)),
        options_(options),
        as_views_(options.gradient_as_bucket_view.value_or(true)),
        divisor_(group_.size()) {
    for (const auto& [name, tensor, sparse] : parameters) {
      names_.push_back(name);
      parameters_.push_back(tensor);
    }
    make_buckets(first_layout(parameters_, std::vector<bool>(parameters_.size()), options_));
  }

  void before_forward(bool) override {
    if (rebuilt_ || order_.size() != parameters_.size()) return;
    // Rank 0's, for all.
    const BucketLayout layout = layout_by_arrival(parameters_, order_, options_);
    make_buckets(group_.broadcast_object(layout, 0).get<BucketLayout>());
    rebuilt_ = true;
    order_ = {};
  }

  void begin() override {
    end_pending();
    within_backward_ = true;
    before_forward(true);
    within_backward_ = false;
    for (Bucket& bucket : buckets_) bucket.pending = bucket.parameters.size();
    if (!rebuilt_) order_.clear();
    next_ = 0;
    begin_in(context_of_this_backward());
  }

  void take(size_t index) override {
    if (context_ != context_of_this_backward()) throw_elsewhere(index);
    if (!rebuilt_) order_.push_back(index);
    stage(index);
    if (--buckets_[bucket_of_[index]].pending == 0) reduce_what_is_ready();
  }

  void set_divisor(int divisor) override { divisor_ = divisor; }

  void reduce_zeros() override {
    const c10::AutoGradMode no_grad(false);
    context_ = nullptr;
    for (Bucket& bucket : buckets_) {
      bucket.flat.zero_();
      group_.all_reduce(bucket.flat);
    }
    for (size_t i = 0; i < parameters_.size(); ++i) deliver(i);
    if (rebuilt_ || order_.size() == parameters_.size()) return;
    // A rank that had no inputs takes part when the buckets are made anew. It has seen no order.
    order_.resize(parameters_.size());
    std::iota(order_.begin(), order_.end(), 0);
  }

  void fill(DdpStatistics& statistics) const override {
    statistics.buckets_rebuilt = rebuilt_;
    for (const Bucket& bucket : buckets_)
      statistics.bucket_bytes.push_back(static_cast<int64_t>(bucket.flat.nbytes()));
  }

 private:
  struct Bucket {
    at::Tensor flat;
    std::vector<size_t> parameters;
    size_t pending = 0;  ///< Gradients that are still to come.
    Work work;
  };

  /// What a backward that threw has begun still writes into the buckets.
  void end_pending() {
    for (Bucket& bucket : buckets_) {
      if (!bucket.work) continue;
      try {
        std::exchange(bucket.work, {}).wait();
      } catch (const Error& error) {  // The group's next call says so again.
        log_debug(std::string("an all-reduce that a backward left behind: ") + error.what());
      }
    }
  }

  /// The gradients of a backward of a context use the buckets. Those that are there stay apart.
  void begin_in(DistAutogradContext context) {
    context_ = std::move(context);
    if (!context_ || !as_views_) return;
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (gradient.defined() && gradient.layout() == at::kStrided &&
          gradient.const_data_ptr() == views_[i].const_data_ptr())
        gradient = gradient.detach().clone();
    }
  }

  /// All buckets lie in one symmetric memory, each from a cache line's start. Gradients that are
  /// views of the old buckets become views of the new ones.
  void make_buckets(const BucketLayout& layout) {
    constexpr int64_t kLine = 64;
    const auto bytes_of = [&](const std::vector<size_t>& bucket) {
      int64_t bytes = 0;
      for (const size_t i : bucket) bytes += static_cast<int64_t>(parameters_[i].nbytes());
      return (bytes + kLine - 1) / kLine * kLine;
    };
    int64_t total = 0;
    for (const auto& bucket : layout) total += bytes_of(bucket);
    const at::Tensor arena = group_.symmetric_empty(total, at::kByte);
    // Autograd need not know that they are views: it would forbid to detach them in place, as
    // optimizers do.
    const at::AutoDispatchBelowADInplaceOrView untracked;
    std::vector<at::Tensor> views(parameters_.size());
    bucket_of_.resize(parameters_.size());
    buckets_.clear();
    int64_t begin = 0;
    for (const auto& members : layout) {
      const at::ScalarType dtype = parameters_[members.at(0)].scalar_type();
      int64_t elements = 0;
      for (const size_t i : members) {
        elements += parameters_[i].numel();
        bucket_of_[i] = buckets_.size();
      }
      const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
      at::Tensor flat = arena.narrow(0, begin, bytes).view(dtype);
      for (int64_t at = 0; const size_t i : members) {
        views[i] = view_like(flat, at, parameters_[i]);
        at += parameters_[i].numel();
      }
      begin += bytes_of(members);
      buckets_.push_back({std::move(flat), members, members.size(), {}});
    }
    if (as_views_) move_gradients(views);
    views_ = std::move(views);
  }

  void move_gradients(const std::vector<at::Tensor>& views) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined() || gradient.layout() != at::kStrided) continue;
      // One that has just come is taken when its own hook runs.
      if (within_backward_ && gradient.const_data_ptr() != views_[i].const_data_ptr()) continue;
      views[i].copy_(gradient.detach());
      gradient = views[i];
    }
  }

  /// Puts a gradient, divided, into its bucket.
  void stage(size_t index) {
    visit_gradient(context_, parameters_[index], names_[index],
                   [&](at::Tensor& gradient) { stage(index, gradient); });
  }
  void stage(size_t index, at::Tensor& gradient) {
    const at::Tensor& view = views_[index];
    const c10::AutoGradMode no_grad(false);
    if (!gradient.defined()) {
      view.zero_();
      return;
    }
    if (gradient.layout() != at::kStrided || gradient.scalar_type() != view.scalar_type())
      throw UsageError("DistributedDataParallel, rank " + std::to_string(group_.rank()) +
                           ": the gradient of " + names_[index] + " is " + gradient.toString() +
                           ", expected " + view.toString() + ", as in the first step",
                       "use DdpOptions::reducer = Reducer::c10d for gradients that are sparse");
    if (gradient.const_data_ptr() == view.const_data_ptr()) {
      view.div_(divisor_);
      return;
    }
    if (gradient.requires_grad() && !warned_) {
      warned_ = true;
      log_warning(
          "DistributedDataParallel averages gradients, but not what create_graph would have them "
          "depend on");
    }
    scaled_copy(view, gradient.detach(), 1.0 / divisor_);
    if (as_views_ && !context_) gradient = view;  // A context may outlive the bucket.
  }

  /// Buckets are reduced in their order, so that all ranks make the same calls.
  void reduce_what_is_ready() {
    for (; next_ < buckets_.size() && buckets_[next_].pending == 0; ++next_) {
      Bucket& bucket = buckets_[next_];
      if (next_ + 1 < buckets_.size()) {
        bucket.work = group_.all_reduce_async(bucket.flat);
      } else {
        group_.all_reduce(bucket.flat);  // Nothing is left to compute meanwhile.
      }
    }
    if (next_ == buckets_.size()) finish();
  }

  void finish() {
    for (Bucket& bucket : buckets_) {
      if (bucket.work) std::exchange(bucket.work, {}).wait();
    }
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < parameters_.size(); ++i) deliver(i);
    context_ = nullptr;
  }

  void deliver(size_t index) {
    visit_gradient(context_, parameters_[index], names_[index],
                   [&](at::Tensor& gradient) { deliver(index, gradient); });
  }
  void deliver(size_t index, at::Tensor& gradient) {
    const at::Tensor& view = views_[index];
    if (context_) {
      gradient = view.clone();  // What came may still be on its way to another worker.
      return;
    }
    if (gradient.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) return;
    if (!gradient.defined()) {
      gradient = as_views_ ? view : view.clone();
    } else if (gradient.const_data_ptr() != view.const_data_ptr()) {
      gradient.copy_(view);
    }
  }

  [[noreturn]] void throw_elsewhere(size_t index) const {
    throw UsageError("DistributedDataParallel, rank " + std::to_string(group_.rank()) +
                         ": the gradient of " + names_[index] +
                         " came in another backward than those before it, and one of the two is "
                         "of an rpc::AutogradContext",
                     "give all parameters their gradients in one context");
  }

  const ProcessGroup group_;
  const DdpOptions options_;
  const bool as_views_;
  int divisor_;  ///< Of gradients, before they are summed.
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> views_;  ///< In the buckets, by parameter.
  std::vector<size_t> bucket_of_;  ///< By parameter.
  std::vector<Bucket> buckets_;    ///< In the order of reduction.
  std::vector<size_t> order_;      ///< In which gradients came, until the buckets follow it.
  size_t next_ = 0;                ///< The first bucket that is not being reduced.
  bool rebuilt_ = false;
  DistAutogradContext context_;  ///< Of the gradients that are taken.
  bool within_backward_ = false;
  bool warned_ = false;
};

}  // namespace

std::unique_ptr<GradientReducer> make_bucket_reducer(
    const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
    const DdpOptions& options) {
  return std::make_unique<BucketReducer>(parameters, group, options);
}

}  // namespace lockstep::detail
