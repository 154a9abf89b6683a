// LibTorch's reducer: for the options and devices that our own leaves to it.
#include <ATen/core/ivalue.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <type_traits>
#include <unordered_map>

#include "lockstep/autograd/backward_hook.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/gradient_reducer.h"

namespace lockstep::detail {
namespace {

/// How many forwards' outputs a backward has passed. Outlives the reducer while a graph waits for
/// backward.
struct Passage {
  int64_t backward = -1;
  int64_t forwards = 0;
};
using Passed = std::shared_ptr<Passage>;

/// Copies the outputs of forward, so that backward passes here whichever of them the loss uses. The
/// unused ones then send undefined gradients to their parameters, whose hooks fire all the same,
/// and the reducer can finish.
class Sink : public torch::autograd::Function<Sink> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const Passed& passed, at::TensorList outputs) {
    context->set_materialize_grads(false);
    context->saved_data["passed"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(passed));
    torch::autograd::variable_list copies;
    for (const at::Tensor& output : outputs) copies.push_back(output.clone());
    return copies;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto holder = context->saved_data["passed"].toCapsule();
    Passage& passage = *static_cast<Holder&>(*holder).passed;
    if (std::exchange(passage.backward, current_backward()) != passage.backward)
      passage.forwards = 0;
    ++passage.forwards;
    gradients.insert(gradients.begin(), at::Tensor());
    return gradients;
  }

 private:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Passed p) : passed(std::move(p)) {}
    Passed passed;
  };
};

c10::intrusive_ptr<c10d::ProcessGroup> native_of(const ProcessGroup& group) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group.native());
}

/// The Reducer's constructor has grown: some releases of LibTorch want the caps of single buckets
/// after the other arguments.
template <class Reducer, class... Args>
std::unique_ptr<Reducer> construct(Args&&... args) {
  if constexpr (std::is_constructible_v<Reducer, Args...>) {
    return std::make_unique<Reducer>(std::forward<Args>(args)...);
  } else {
    return std::make_unique<Reducer>(std::forward<Args>(args)..., std::vector<int64_t>{});
  }
}

/// LibTorch's reducer with the buckets that Python's DistributedDataParallel gives it, and without
/// a hook. The only place that knows the constructor's arguments, which differ between LibTorch's
/// versions.
std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<ReducedParameter>& parameters,
                                            const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                            const DdpOptions& options) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  std::unordered_map<size_t, std::string> names;
  for (const ReducedParameter& parameter : parameters) {
    names[tensors.size()] = parameter.name;
    tensors.push_back(parameter.tensor);
    sparse.push_back(parameter.sparse_gradient);
  }
  const std::vector<size_t> caps = bucket_caps(options);
  BucketLayout buckets = first_layout(tensors, sparse, options);
  const bool skip_unused = false, python_reducer = false;
  return construct<c10d::Reducer>(std::move(tensors), std::move(buckets), group, std::move(sparse),
                                  static_cast<int64_t>(caps[1]), options.find_unused_parameters,
                                  options.gradient_as_bucket_view.value_or(false), std::move(names),
                                  static_cast<int64_t>(caps[0]), skip_unused, python_reducer);
}

using Future = c10::ivalue::Future;

/// A hook of our own kind. The future that the reducer gets is complete at once and holds only the
/// bucket's number; the hook's second part runs when the reducer asks for the result.
class Hook : public c10d::CommHookInterface {
 public:
  Hook(ProcessGroup group, AsyncGradientHook hook)
      : group_(std::move(group)), hook_(std::move(hook)) {}

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    GradientBucket ours{bucket.getBuffer(), bucket.getParameters(), bucket.getIndex(),
                        bucket.isLast()};
    if (pending_.size() <= ours.index) pending_.resize(ours.index + 1);
    pending_[ours.index] = {bucket.getBuffer(), hook_(group_, ours)};
    auto future = c10::make_intrusive<Future>(c10::IntType::get());
    future->markCompleted(c10::IValue(static_cast<int64_t>(ours.index)));
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    Pending pending = std::move(pending_.at(result.toInt()));
    at::Tensor gradients = pending.finish();
    if (!gradients.defined() || gradients.sizes() != pending.local.sizes() ||
        gradients.scalar_type() != pending.local.scalar_type()) {
      throw UsageError("a gradient hook returned " +
                       (gradients.defined() ? std::string(gradients.toString()) + " of " +
                                                  std::to_string(gradients.numel()) + " elements"
                                            : std::string("no tensor")) +
                       ", expected the bucket's " + std::string(pending.local.toString()) + " of " +
                       std::to_string(pending.local.numel()) + " elements, one dimension");
    }
    return gradients.contiguous();
  }

 private:
  struct Pending {
    at::Tensor local;
    std::function<at::Tensor()> finish;
  };
  ProcessGroup group_;
  AsyncGradientHook hook_;
  std::vector<Pending> pending_;  ///< By the bucket's index.
};

AsyncGradientHook as_async(GradientHook hook) {
  return [hook = std::move(hook)](const ProcessGroup& group, GradientBucket& bucket) {
    return [result = hook(group, bucket)] { return result; };
  };
}

/// Sends the gradients as bfloat16. (LibTorch has this for fp16 only.)
std::function<at::Tensor()> start_bf16(const ProcessGroup& group, GradientBucket& bucket) {
  // Divided first, as in Python, so that the sum does not overflow.
  at::Tensor narrow = bucket.gradients.to(at::kBFloat16).div_(static_cast<double>(group.size()));
  return [work = group.all_reduce_async(narrow), narrow, wide = bucket.gradients]() mutable {
    work.wait();
    return wide.copy_(narrow);
  };
}

/// The options' hook that is none of LibTorch's; null where there is none.
AsyncGradientHook hook_of(const DdpOptions& options) {
  if (options.async_custom_hook) return options.async_custom_hook;
  if (options.custom_hook) return as_async(options.custom_hook);
  return options.comm_hook == CommHook::bf16_compress ? start_bf16 : AsyncGradientHook();
}

class C10dReducer : public GradientReducer {
 public:
  C10dReducer(const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
              const DdpOptions& options)
      : group_(group),
        find_unused_(options.find_unused_parameters && !options.static_graph),
        static_(options.static_graph),
        delays_(static_),
        parameters_(parameters),
        reducer_(make_reducer(parameters_, native_of(group), options)) {
    // The reducer uses its logger without asking whether it has one when unused parameters change.
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    register_hook(options);
    if (options.static_graph) reducer_->set_static_graph();
  }

  ~C10dReducer() override {
    try {
      logger_.reset();
      reducer_.reset();
    } catch (const std::exception& error) {
      log_warning(std::string("closing DistributedDataParallel: ") + error.what());
    }
  }

  ArrivalRules rules() const override {
    return {.may_repeat = static_, .may_miss = static_ || find_unused_};
  }

  bool has_hooks() const override { return true; }

  void before_forward(bool synchronizing) override {
    if (!synchronizing && delays_ && c10::GradMode::is_enabled()) {
      throw UsageError(
          "static_graph: the first step's gradients are to be averaged, so that the "
          "reducer sees the graph; this forward is within no_sync()",
          "make one forward and backward outside of no_sync() first");
    }
    // Once for each backward: a static graph's first iteration is counted by it.
    if (synchronizing && !prepared_) reducer_->prepare_for_forward();
    if (reducer_->rebuild_buckets()) rebuilt_ = true;
  }

  bool wants_outputs() const override { return c10::GradMode::is_enabled() && find_unused_; }

  void before_backward(std::vector<at::Tensor>& outputs, bool synchronizing) override {
    if (synchronizing) prepare(outputs);
    if (wants_outputs()) pass_sink(outputs);
  }

  void begin() override {
    if (!prepared_) {
      if (find_unused_) throw_unknown_graph();
      before_forward(true);
      prepare({});
    }
    prepared_ = false;
    if (rules().may_miss) fill_sparse();
  }

  /// A sparse gradient is divided in place, and those of a sum share their values.
  void take(size_t index) override {
    const ReducedParameter& parameter = parameters_[index];
    if (!parameter.sparse_gradient) return;
    visit_gradient(
        context_of_this_backward(), parameter.tensor, parameter.name,
        [](at::Tensor& gradient) { gradient = gradient.defined() ? gradient.clone() : gradient; });
  }

  void end_backward() override {
    if (std::exchange(delays_, false)) reducer_->delay_all_reduce();
  }

  int64_t used_forwards() const override { return find_unused_ ? passed_->forwards : 1; }

  void set_divisor(int divisor) override {
    reducer_->set_forward_pass_work_handle(c10::make_intrusive<Told>(divisor),
                                           /*useStaticWorldSize=*/false);
  }

  void reduce_zeros() override {
    const c10::AutoGradMode no_grad(false);
    auto buckets = reducer_->get_grad_buckets(/*return_zero_tensors=*/true);
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (auto& bucket : buckets) futures.push_back(reducer_->run_comm_hook(bucket));
    for (size_t i = 0; i < buckets.size(); ++i) {
      futures[i]->waitAndThrow();
      const c10::IValue& value = futures[i]->constValue();
      deliver(buckets[i], hook_              ? hook_->parseHookResult(value)
                          : value.isTensor() ? value.toTensor()
                                             : value.toTensorVector().at(0));
    }
    if (find_unused_) {
      std::vector<at::Tensor> used{reducer_->get_local_used_map_on_device()};
      group_.native().allreduce(used)->wait();
    }
    reducer_->push_rebuilt_params_for_all_indices();
  }

  void fill(DdpStatistics& statistics) const override {
    statistics.buckets_rebuilt = rebuilt_;
    for (const auto& bucket : reducer_->get_grad_buckets(/*return_zero_tensors=*/false)) {
      const at::Tensor& buffer = bucket.getBuffer();
      statistics.bucket_bytes.push_back(buffer.defined() ? buffer.numel() * buffer.element_size()
                                                         : 0);
    }
  }

 private:
  /// A work that is done, with the number of ranks by which gradients are to be divided.
  class Told : public c10d::Work {
   public:
    explicit Told(int ranks)
        : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {
      future_->markCompleted(std::vector<at::Tensor>{at::full({1}, ranks, at::kFloat)});
    }
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

   private:
    c10::intrusive_ptr<c10::ivalue::Future> future_;
  };

  void register_hook(const DdpOptions& options) {
    if (const AsyncGradientHook hook = hook_of(options)) {
      auto own = std::make_unique<Hook>(group_, hook);
      hook_ = own.get();
      reducer_->register_comm_hook(std::move(own));
    } else if (options.comm_hook == CommHook::allreduce) {
      reducer_->register_builtin_comm_hook(c10d::BuiltinCommHookType::ALLREDUCE);
    } else if (options.comm_hook == CommHook::fp16_compress) {
      reducer_->register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
    }
  }

  /// A bucket's mean becomes the gradients of its parameters.
  static void deliver(c10d::GradBucket& bucket, const at::Tensor& flat) {
    int64_t at = 0;
    for (const at::Tensor& parameter : bucket.getParameters()) {
      const at::Tensor mean = view_like(flat, at, parameter);
      at += parameter.numel();
      at::Tensor& gradient = parameter.mutable_grad();
      gradient.defined() ? gradient.copy_(mean) : gradient = mean.clone();
    }
  }

  void prepare(const std::vector<at::Tensor>& outputs) {
    reducer_->prepare_for_backward(find_unused_ ? outputs : std::vector<at::Tensor>{});
    prepared_ = true;
  }

  /// The reducer takes no undefined gradient for a sparse one: unused parameters get empty ones.
  void fill_sparse() const {
    for (const ReducedParameter& parameter : parameters_) {
      at::Tensor& gradient = parameter.tensor.mutable_grad();
      if (!parameter.sparse_gradient || gradient.defined()) continue;
      std::vector<int64_t> sizes = parameter.tensor.sizes().vec();
      sizes.front() = 0;
      const at::Tensor rows = parameter.tensor.detach().new_empty({1, 0}, at::kLong);
      gradient = at::sparse_coo_tensor(rows, parameter.tensor.detach().new_empty(sizes),
                                       parameter.tensor.sizes());
    }
  }

  void pass_sink(std::vector<at::Tensor>& outputs) {
    std::vector<at::Tensor> passing;
    std::vector<size_t> places;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].grad_fn()) continue;
      passing.push_back(outputs[i]);
      places.push_back(i);
    }
    if (passing.empty()) return;
    const auto passed = Sink::apply(passed_, at::TensorList(passing));
    for (size_t i = 0; i < places.size(); ++i) outputs[places[i]] = passed[i];
  }

  [[noreturn]] void throw_unknown_graph() const {
    throw UsageError("DistributedDataParallel, rank " + std::to_string(group_.rank()) +
                         ": a backward of a forward after which another one ran, or a second "
                         "one of one forward: find_unused_parameters knows the graph of the "
                         "last forward only",
                     "run the backward of each forward before the next forward, or add their "
                     "losses up for one backward");
  }

  ProcessGroup group_;
  const bool find_unused_;
  const bool static_;
  bool delays_;            ///< A static graph before its first backward has ended.
  bool prepared_ = false;  ///< For a backward that has not begun.
  bool rebuilt_ = false;
  std::vector<ReducedParameter> parameters_;
  const Passed passed_ = std::make_shared<Passage>();
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
  Hook* hook_ = nullptr;  ///< One of our own kind. The reducer owns it.
};

}  // namespace

std::unique_ptr<GradientReducer> make_c10d_reducer(const std::vector<ReducedParameter>& parameters,
                                                   const ProcessGroup& group,
                                                   const DdpOptions& options) {
  return std::make_unique<C10dReducer>(parameters, group, options);
}

}  // namespace lockstep::detail
