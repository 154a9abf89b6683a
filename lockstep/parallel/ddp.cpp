#include "lockstep/parallel/ddp.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/reducer.h"

namespace lockstep::detail {
namespace {

/// What outlives a DdpCore while a graph that passed its sink still waits for backward.
struct SinkState {
  c10d::Reducer* reducer = nullptr;  ///< Null once the DdpCore is gone.
  bool delay_all_reduce = false;     ///< A static graph before its first backward.
};

/// Copies the outputs of forward, so that backward passes here whichever of them the loss uses. The
/// unused ones then send undefined gradients to their parameters, whose hooks fire all the same,
/// and the reducer can finish. In a static graph's first backward it also asks the reducer to
/// communicate only after everything is computed.
class Sink : public torch::autograd::Function<Sink> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const std::shared_ptr<SinkState>& state,
                                                at::TensorList outputs) {
    context->set_materialize_grads(false);
    context->saved_data["state"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(state));
    torch::autograd::variable_list copies;
    for (const at::Tensor& output : outputs) copies.push_back(output.clone());
    return copies;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto holder = context->saved_data["state"].toCapsule();
    const auto& state = static_cast<Holder&>(*holder).state;
    if (state->delay_all_reduce) {
      state->delay_all_reduce = false;
      torch::autograd::Engine::get_default_engine().queue_callback([state] {
        if (state->reducer != nullptr) state->reducer->delay_all_reduce();
      });
    }
    gradients.insert(gradients.begin(), at::Tensor());
    return gradients;
  }

 private:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<SinkState> s) : state(std::move(s)) {}
    std::shared_ptr<SinkState> state;
  };
};

c10::intrusive_ptr<c10d::ProcessGroup> native_of(const ProcessGroup& group) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group.native());
}

bool changes_bits(const DdpOptions& options) {
  return options.custom_hook || options.async_custom_hook ||
         options.comm_hook == CommHook::fp16_compress ||
         options.comm_hook == CommHook::bf16_compress;
}

/// The parameters that the reducer's message lists: "... did not receive grad for rank 1: 4 5".
std::string missing_names(const std::string& message,
                          const std::vector<ReducedParameter>& parameters) {
  const size_t at = message.find("did not receive grad for rank");
  const size_t colon = at == std::string::npos ? at : message.find(": ", at);
  if (colon == std::string::npos) return {};
  const size_t end = message.find('\n', colon);
  std::vector<std::string> names;
  for (const std::string& word : split(message.substr(colon + 2, end - colon - 2), ' ')) {
    const auto index = parse_int(word);
    if (index && *index >= 0 && *index < static_cast<int64_t>(parameters.size())) {
      names.push_back(parameters[*index].name);
    }
  }
  return join(names, ", ");
}

}  // namespace

class DdpCore::Impl {
 public:
  Impl(ModuleState state, const ProcessGroup& group, const DdpOptions& options)
      : rank_(group.rank()),
        static_graph_(options.static_graph),
        find_unused_(options.find_unused_parameters && !options.static_graph),
        parameters_(state.reduced),
        sink_(std::make_shared<SinkState>()) {
    if (options.broadcast_buffers) {
      for (const NamedTensor& item : state.buffers) buffers_.push_back(item.tensor);
    }
    if (options.init_sync) {
      check_same_state(state, group);
      std::vector<at::Tensor> tensors;
      for (const NamedTensor& item : state.parameters) tensors.push_back(item.tensor.detach());
      tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
      broadcast_tensors(tensors, group);
    }
    reducer_ = make_reducer(parameters_, native_of(group), options);
    // The reducer uses its logger without asking whether it has one when unused parameters change.
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    register_hook(*reducer_, group, options);
    if (static_graph_) reducer_->set_static_graph();
    sink_->reducer = reducer_.get();
    sink_->delay_all_reduce = static_graph_;
  }

  ~Impl() {
    sink_->reducer = nullptr;
    try {
      logger_.reset();
      reducer_.reset();
    } catch (const std::exception& error) {
      log_warning(std::string("closing DistributedDataParallel: ") + error.what());
    }
  }

  void before_forward(const ProcessGroup& group, bool synchronizing) {
    translate([&] {
      if (c10::GradMode::is_enabled()) {
        if (synchronizing) reducer_->prepare_for_forward();
        if (reducer_->rebuild_buckets()) rebuilt_ = true;
      }
    });
    if (sync_buffers_) broadcast_tensors(buffers_, group);
  }

  bool wants_outputs() const {
    return c10::GradMode::is_enabled() && (find_unused_ || sink_->delay_all_reduce);
  }

  void after_forward(std::vector<at::Tensor>& outputs, bool synchronizing) {
    const bool will_reduce = synchronizing && c10::GradMode::is_enabled();
    // After a forward whose gradients stay local the buffers stay local too, as in Python.
    sync_buffers_ = will_reduce;
    if (will_reduce) {
      translate([&] {
        reducer_->prepare_for_backward(find_unused_ ? outputs : std::vector<at::Tensor>{});
      });
    }
    if (wants_outputs()) pass_sink(outputs);
  }

  void fill(DdpStatistics& statistics) const {
    statistics.buckets_rebuilt = rebuilt_;
    for (const auto& bucket : reducer_->get_grad_buckets(/*return_zero_tensors=*/false)) {
      const at::Tensor& buffer = bucket.getBuffer();
      statistics.bucket_bytes.push_back(
          buffer.defined() ? buffer.numel() * static_cast<int64_t>(buffer.element_size()) : 0);
    }
  }

 private:
  void pass_sink(std::vector<at::Tensor>& outputs) {
    std::vector<at::Tensor> passing;
    std::vector<size_t> places;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].grad_fn()) continue;
      passing.push_back(outputs[i]);
      places.push_back(i);
    }
    if (passing.empty()) return;
    const auto passed = Sink::apply(sink_, at::TensorList(passing));
    for (size_t i = 0; i < places.size(); ++i) outputs[places[i]] = passed[i];
  }

  /// The reducer's complaint about parameters without a gradient, in our words and with names.
  template <class F>
  void translate(F&& call) const {
    try {
      call();
    } catch (const c10::Error& error) {
      const std::string message = error.what_without_backtrace();
      if (message.find("Expected to have finished reduction") == std::string::npos) throw;
      const std::string names = missing_names(message, parameters_);
      throw UsageError("DistributedDataParallel, rank " + std::to_string(rank_) +
                           ": the last backward gave no gradient to " +
                           (names.empty() ? "some parameters" : "these parameters: " + names),
                       "set DdpOptions::find_unused_parameters (or static_graph, when they are the "
                       "same in every step), or make the loss depend on every output of forward");
    }
  }

  int rank_;
  bool static_graph_;
  bool find_unused_;
  bool rebuilt_ = false;
  bool sync_buffers_ = true;
  std::vector<ReducedParameter> parameters_;
  std::vector<at::Tensor> buffers_;
  std::shared_ptr<SinkState> sink_;
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
};

DdpCore::DdpCore(torch::nn::Module& module, ProcessGroup group, const DdpOptions& options)
    : group_(std::move(group)) {
  if (!group_) {
    throw UsageError("DistributedDataParallel: the process group is null",
                     "ranks that are not in a group must not wrap a module with it");
  }
  ModuleState state = find_module_state(module, options.ignored);
  for (const ReducedParameter& parameter : state.reduced) elements_ += parameter.tensor.numel();
  active_ = group_.size() > 1 || changes_bits(options);
  if (active_) impl_ = std::make_unique<Impl>(std::move(state), group_, options);
}

DdpCore::~DdpCore() = default;

void DdpCore::before_forward() {
  count_forward();
  impl_->before_forward(group_, synchronizing_);
}

bool DdpCore::wants_outputs() const {
  return impl_->wants_outputs();
}

void DdpCore::after_forward(std::vector<at::Tensor>& outputs) {
  impl_->after_forward(outputs, synchronizing_);
}

DdpStatistics DdpCore::statistics() const {
  DdpStatistics statistics;
  statistics.iterations = iterations_;
  statistics.parameters = elements_;
  if (impl_) impl_->fill(statistics);
  return statistics;
}

}  // namespace lockstep::detail
