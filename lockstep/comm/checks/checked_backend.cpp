#include "lockstep/comm/checks/checked_backend.h"

#include <ATen/core/ivalue.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <type_traits>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/env.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/settings.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_work.h"
#include "lockstep/comm/checks/failure_report.h"
#include "lockstep/comm/checks/flight_recorder.h"
#include "lockstep/comm/checks/observed_call.h"
#include "lockstep/comm/checks/p2p_checks.h"
#include "lockstep/comm/checks/rank_checks.h"
#include "lockstep/comm/checks/shared_elements.h"

namespace lockstep {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Milliseconds = std::chrono::milliseconds;

constexpr uint64_t kFirstCollectives = 10;  ///< Compared at `info`.

bool is_flat(const Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous();
}

/// All tensors of the lists, one list after the other.
Tensors flattened(const TensorLists& lists) {
  Tensors result;
  for (const auto& list : lists) result.insert(result.end(), list.begin(), list.end());
  return result;
}

/// What a call shows of itself.
struct Arguments {
  c10::ArrayRef<Tensor> inputs = {};
  c10::ArrayRef<Tensor> outputs = {};
  const TensorLists* input_lists = nullptr;   ///< In place of the inputs.
  const TensorLists* output_lists = nullptr;  ///< In place of the outputs.
  const std::vector<int64_t>* input_splits = nullptr;
  const std::vector<int64_t>* output_splits = nullptr;

  /// What becomes of the call, where that is a list.
  Tensors results(Operation operation) const {
    if (operation == Operation::all_reduce_coalesced) return inputs.vec();
    return output_lists ? flattened(*output_lists) : outputs.size() > 1 ? outputs.vec() : Tensors();
  }

  void describe(CallSignature& call) const {
    call.inputs = input_lists ? signatures_of(flattened(*input_lists)) : signatures_of(inputs);
    call.outputs = output_lists ? signatures_of(flattened(*output_lists)) : signatures_of(outputs);
    if (input_splits) call.input_splits = *input_splits;
    if (output_splits) call.output_splits = *output_splits;
  }
};

class CheckedBackend final : public c10d::Backend {
 public:
  CheckedBackend(BackendPtr inner, const StorePtr& store, CheckedBackendOptions options)
      : c10d::Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        options_(std::move(options)),
        context_(options_.context ? options_.context
                                  : std::make_shared<CheckContext>(
                                        store, getRank(), getSize(), options_.global_ranks,
                                        options_.group_name, options_.timeout)),
        checks_(*context_, comparison_limit()),
        p2p_checks_(context_, checks_) {
    if (options_.recorded)
      recorded_as_ = FlightRecorder::of_process().add_group(
          context_->group(), inner_->getBackendName(), context_->names(), getRank());
    // While the store is there: a rank whose end takes it along is then known.
    if (comparison_limit() > 0 || options_.misses_deaths) context_->remember_identities();
  }

  bool has_abandoned_work() const { return context_->has_abandoned_work(); }

  const BackendPtr& inner() const { return inner_; }
  void set_observer(std::shared_ptr<CallObserver> observer) { observer_ = std::move(observer); }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return inner_->supportsTensorAlloc(device);
  }
  void setTimeout(Milliseconds timeout) override {
    inner_->setTimeout(timeout);
    context_->set_timeout(timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return collective(Operation::broadcast, opts, {.inputs = tensors},
                      [&] { return inner_->broadcast(tensors, opts); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return collective(Operation::all_reduce, opts, {.inputs = tensors},
                      [&] { return inner_->allreduce(tensors, opts); });
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return collective(Operation::all_reduce_sparse, opts, {.inputs = tensors},
                      [&] { return inner_->allreduce_sparse(tensors, opts); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return collective(Operation::all_reduce_coalesced, opts, {.inputs = tensors},
                      [&] { return inner_->allreduce_coalesced(tensors, opts); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return collective(Operation::reduce, opts, {.inputs = tensors},
                      [&] { return inner_->reduce(tensors, opts); });
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    Tensors given = apart_from(flattened(outputs), inputs, own_place(outputs));
    return collective(Operation::all_gather, opts, {.inputs = given, .output_lists = &outputs},
                      [&] { return inner_->allgather(outputs, given, opts); });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    Tensor given = apart_from(output, input, own_place(output, input));
    return collective(Operation::all_gather_into_tensor, opts, {.inputs = given, .outputs = output},
                      [&] { return inner_->_allgather_base(output, given, opts); });
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    Tensors given = apart_from(flattened(outputs), inputs);
    return collective(Operation::all_gather_coalesced, opts, {.inputs = given},
                      [&] { return inner_->allgather_coalesced(outputs, given, opts); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    Tensors given = apart_from(outputs, inputs);
    return collective(
        Operation::all_gather_into_tensor_coalesced, opts, {.inputs = given, .outputs = outputs},
        [&] { return inner_->allgather_into_tensor_coalesced(outputs, given, opts); });
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    Tensors given = apart_from(flattened(outputs), inputs, own_place(outputs));
    return collective(
        Operation::gather, opts,
        {.inputs = given, .output_lists = getRank() == opts.rootRank ? &outputs : nullptr},
        [&] { return inner_->gather(outputs, given, opts); });
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& opts) override {
    TensorLists given = lists_apart_from(outputs, inputs);
    return collective(
        Operation::scatter, opts,
        {.outputs = outputs, .input_lists = getRank() == opts.rootRank ? &given : nullptr},
        [&] { return inner_->scatter(outputs, given, opts); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    TensorLists given = lists_apart_from(outputs, inputs);
    return collective(Operation::reduce_scatter, opts, {.outputs = outputs, .input_lists = &given},
                      [&] { return inner_->reduce_scatter(outputs, given, opts); });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    const void* place = own_place(input, output);
    const bool in_place = place && output.const_data_ptr() == place;
    Tensor given = in_place ? input : apart_from(output, input);
    return collective(Operation::reduce_scatter_tensor, opts, {.inputs = given, .outputs = output},
                      [&] { return inner_->_reduce_scatter_base(output, given, opts); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    Tensors given = apart_from(outputs, inputs);
    return collective(
        Operation::reduce_scatter_tensor_coalesced, opts, {.inputs = given, .outputs = outputs},
        [&] { return inner_->reduce_scatter_tensor_coalesced(outputs, given, opts); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    Tensor given = apart_from(output, input);
    return collective(
        Operation::all_to_all_single, opts,
        {.inputs = given,
         .outputs = output,
         .input_splits = &input_splits,
         .output_splits = &output_splits},
        [&] { return inner_->alltoall_base(output, given, output_splits, input_splits, opts); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    Tensors given = apart_from(outputs, inputs);
    return collective(Operation::all_to_all, opts, {.inputs = given, .outputs = outputs},
                      [&] { return inner_->alltoall(outputs, given, opts); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return collective(Operation::barrier, opts, {}, [&] { return inner_->barrier(opts); });
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    collective(Operation::monitored_barrier, opts, {}, [&] {
      inner_->monitoredBarrier(opts, wait_all_ranks);
      return WorkPtr();
    });
  }

  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return point_to_point(Operation::send, tensors, dst, tag,
                          [this, dst, tag](Tensors& t) { return inner_->send(t, dst, tag); });
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return point_to_point(Operation::recv, tensors, src, tag,
                          [this, src, tag](Tensors& t) { return inner_->recv(t, src, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return point_to_point(Operation::recv_any, tensors, -1, tag,
                          [this, tag](Tensors& t) { return inner_->recvAnysource(t, tag); });
  }

  void startCoalescing() override {
    inner_->startCoalescing();
    coalescing_ = true;
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return converted([&] {
      return issued({.operation = Operation::coalesced}, c10d::kUnsetTimeout,
                    [&] { return inner_->endCoalescing(); });
    });
  }

  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void enableCollectivesTiming() override { inner_->enableCollectivesTiming(); }
  c10d::ErrorType getError() override { return inner_->getError(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return inner_->getMemAllocator(); }
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    return converted([&] { return inner_->allocateTensor(size, options); });
  }
  void abort() override {
    tell_end(Failure::Kind::gave_up);
    inner_->abort();
  }
  void shutdown() override {
    tell_end(Failure::Kind::closed);
    inner_->shutdown();
  }

 private:
  void tell_end(Failure::Kind kind) { context_->tell_end(kind, steps()); }
  int64_t steps() const { return options_.steps ? options_.steps->load() : 0; }

  /// How many of the group's first collectives are compared.
  uint64_t comparison_limit() const {
    if (getSize() == 1 || options_.debug == DebugLevel::off) return 0;
    if (options_.debug == DebugLevel::detail) return RankChecks::kAll;
    return options_.needs_comparison ? kFirstCollectives : 0;
  }

  Milliseconds timeout_of(Milliseconds given) const {
    return given.count() > 0 ? given : context_->timeout();
  }

  /// Where all that this rank gives may lie: backends take it from its place among the results.
  const void* own_place(const TensorLists& outputs) const {
    const auto me = static_cast<size_t>(getRank());
    const bool has = outputs.size() == 1 && me < outputs[0].size() && is_flat(outputs[0][me]);
    return has ? outputs[0][me].const_data_ptr() : nullptr;
  }
  /// Likewise of `part`, of which `whole` has one a rank.
  const void* own_place(const Tensor& whole, const Tensor& part) const {
    if (!is_flat(whole) || !is_flat(part)) return nullptr;
    return static_cast<const std::byte*>(whole.const_data_ptr()) +
           static_cast<size_t>(getRank()) * part.nbytes();
  }
  static TensorLists lists_apart_from(const Tensors& outputs, const TensorLists& inputs) {
    TensorLists lists;
    for (const auto& list : inputs) lists.push_back(apart_from(outputs, list));
    return lists;
  }

  /// Makes a call by `issue`, with a note in the flight recorder where that is wanted. Its error,
  /// and those of its work, become ours.
  template <class Issue>
  WorkPtr issued(const CallSignature& call, Milliseconds timeout, Issue issue) {
    FlightRecorder& recorder = FlightRecorder::of_process();
    const bool noted = recorded_as_ && call.operation != Operation::coalesced;
    const uint64_t number = noted ? recorder.begin(*recorded_as_, call) : 0;
    const auto begun = c10::make_scope_exit([noted] {
      if (noted) FlightRecorder::begun();
    });
    WorkPtr work;
    try {
      work = issue();
    } catch (...) {
      const auto error =
          translate_failure(std::current_exception(), *context_, call, timeout_of(timeout));
      recorder.end(number, error);
      std::rethrow_exception(error);
    }
    if (!work) recorder.end(number, nullptr);
    if (!work || options_.names_failures) return work;
    return make_checked_work(std::move(work), context_, call, timeout_of(timeout),
                             options_.misses_deaths);
  }

  /// Runs a call. The caller gets its error, and that of the work which it gives, as
  /// CheckedBackendOptions::convert has it.
  template <class Call>
  auto converted(Call call) -> decltype(call()) {
    if (!options_.convert) return call();
    try {
      if constexpr (std::is_same_v<decltype(call()), WorkPtr>) {
        WorkPtr work = call();
        if (!work) return work;
        return make_translated_work(std::move(work), options_.convert);
      } else {
        return call();
      }
    } catch (...) {
      std::rethrow_exception(options_.convert(std::current_exception()));
    }
  }

  template <class CallOptions, class Issue>
  WorkPtr collective(Operation operation, const CallOptions& opts, const Arguments& arguments,
                     Issue issue) {
    return converted([&] {
      expect_apart(operation, arguments.results(operation));
      CallSignature call{.operation = operation, .sequence = ++sequence_};
      if constexpr (requires { opts.reduceOp; })
        call.reduction = static_cast<int>(opts.reduceOp.op_);
      if constexpr (requires { opts.rootRank; }) call.root = static_cast<int>(opts.rootRank);
      arguments.describe(call);
      // Else the works know it.
      if (!options_.names_failures) call.origin = CallOrigin::current().text(steps());
      const auto run = [&] {
        return issued(call, opts.timeout, [&] {
          if (checks_.compares(call.sequence)) checks_.compare(call, timeout_of(opts.timeout));
          return issue();
        });
      };
      return observer_ ? observed(call, run) : run();
    });
  }

  /// Tells the observer of a collective that `run` makes.
  template <class Run>
  WorkPtr observed(const CallSignature& call, Run run) {
    ObservedCall seen;
    seen.operation = call.operation;
    for (const auto& input : call.inputs) {
      seen.bytes +=
          c10::multiply_integers(input.shape) * static_cast<int64_t>(c10::elementSize(input.dtype));
    }
    const std::shared_ptr<CallObserver> observer = observer_;
    observer->call_begins();
    seen.begin = std::chrono::steady_clock::now();
    WorkPtr work;
    try {
      work = run();
    } catch (...) {
      seen.returned = seen.end = std::chrono::steady_clock::now();
      observer->call_ended(seen, /*failed=*/true);
      throw;
    }
    seen.returned = std::chrono::steady_clock::now();
    tell_end(observer, seen, work);
    return work;
  }

  static void tell_end(const std::shared_ptr<CallObserver>& observer, ObservedCall seen,
                       const WorkPtr& work) {
    seen.end = seen.returned;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    if (work && !work->isCompleted()) {
      try {
        future = work->getFuture();
      } catch (const c10::Error&) {
        // A backend whose works have none: what is known is when the call came back.
      }
    }
    if (!future) return observer->call_ended(seen, work && work->exception());
    future->addCallback(
        [observer, seen](c10::ivalue::Future& done) mutable {
          seen.end = std::chrono::steady_clock::now();
          observer->call_ended(seen, done.hasError());
        },
        /*uses_future=*/false);
  }

  template <class Issue>
  WorkPtr point_to_point(Operation operation, Tensors& tensors, int peer, int tag, Issue issue) {
    return converted([&] {
      const bool compared = options_.needs_comparison && !coalescing_ && tensors.size() == 1 &&
                            tensors[0].is_cpu() && checks_.compares(1);
      CallSignature call{.operation = operation, .root = peer, .sequence = sequence_};
      (operation == Operation::send ? call.inputs : call.outputs) = signatures_of(tensors);
      const auto issue_checked = [&](Tensors& data) {
        return issued(call, c10d::kUnsetTimeout, [&] { return issue(data); });
      };
      return compared ? p2p_checks_.run(call, tensors, tag, issue_checked) : issue_checked(tensors);
    });
  }

  const BackendPtr inner_;
  const CheckedBackendOptions options_;
  const std::shared_ptr<CheckContext> context_;
  RankChecks checks_;
  std::optional<size_t> recorded_as_;  ///< FlightRecorder::add_group.
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> coalescing_{false};
  std::shared_ptr<CallObserver> observer_;
  P2PChecks p2p_checks_;
};

}  // namespace

DebugLevel debug_level() {
  // PyTorch's OFF is its default and asks for nothing; only its DETAIL is a wish.
  const std::string torch = to_lower(env_string("TORCH_DISTRIBUTED_DEBUG").value_or(""));
  const std::string level = debug_setting().value_or(torch == "detail" ? torch : "info");
  return level == "off"      ? DebugLevel::off
         : level == "detail" ? DebugLevel::detail
                             : DebugLevel::info;
}

void announce_checks(c10d::Store& store, int rank, const std::string& group_name,
                     DebugLevel debug) {
  const std::string prefix = check_prefix(group_name) + "/";
  store.set(prefix + announcement_key(rank), process_identity());
  if (debug == DebugLevel::off) RankChecks::switch_off(store, prefix);
}

/// Gloo and the store's client write to sockets without MSG_NOSIGNAL. (A Python process never sees
/// it: Python ignores the signal from the start.)
static void ignore_broken_pipes() {
  struct sigaction current {};
  sigaction(SIGPIPE, nullptr, &current);
  const bool by_default = (current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == SIG_DFL;
  if (by_default) std::signal(SIGPIPE, SIG_IGN);
}

BackendPtr make_checked_backend(BackendPtr inner, StorePtr store, CheckedBackendOptions options) {
  ignore_broken_pipes();
  return c10::make_intrusive<CheckedBackend>(std::move(inner), store, std::move(options));
}

bool has_abandoned_work(const c10d::Backend& backend) {
  const auto* checked = dynamic_cast<const CheckedBackend*>(&backend);
  return checked && checked->has_abandoned_work();
}

BackendPtr unchecked_backend(const BackendPtr& backend) {
  auto* checked = dynamic_cast<CheckedBackend*>(backend.get());
  return checked ? checked->inner() : backend;
}

void set_call_observer(c10d::Backend& backend, std::shared_ptr<CallObserver> observer) {
  auto* checked = dynamic_cast<CheckedBackend*>(&backend);
  TORCH_CHECK(checked, "set_call_observer: not a decorated backend");
  checked->set_observer(std::move(observer));
}

}  // namespace lockstep
