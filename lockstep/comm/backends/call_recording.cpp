// How a call shows in LibTorch's traces: torch::profiler and the callbacks of RecordFunction.
#include <ATen/record_function.h>

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "lockstep/comm/backends/tensor_backend.h"

#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define LOCKSTEP_RECORD_CALL(...) RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, call.async)
#else  // The events of LibTorch 2.11 do not say whether a call is asynchronous.
#define LOCKSTEP_RECORD_CALL RECORD_PARAM_COMMS_DATA
#endif

namespace lockstep::backends {
namespace {

/// LibTorch's names where they are others than ours.
std::string title_of(Operation operation) {
  if (operation == Operation::all_reduce_sparse) return "sparse_all_reduce";
  if (operation == Operation::recv_any) return "recvAnySource";
  return std::string(operation_name(operation));
}

int64_t elements_of(const Tensors& tensors) {
  int64_t elements = 0;
  for (const auto& tensor : tensors) elements += tensor.numel();
  return elements;
}

/// From one of the group's ranks to the next, in the default group; -1 where that differs.
int stride_of(const RankNames& ranks) {
  const int stride = ranks.size() > 1 ? ranks[1] - ranks[0] : 1;
  for (size_t i = 1; i < ranks.size(); ++i)
    if (ranks[i] - ranks[i - 1] != stride) return -1;
  return stride;
}

/// What kineto writes into a trace as the sizes of a call: an event of its own.
void record_sizes(const Request& call, const GroupNames& names, int rank) {
  const Tensors& outputs = call.outputs.empty() ? call.inputs : call.outputs;
  const Tensors& shown = call.inputs.empty() ? outputs : call.inputs;
  LOCKSTEP_RECORD_CALL(int64_t{0}, std::make_tuple(names.group, std::string()), call.inputs,
                       outputs, rank, title_of(call.operation), elements_of(call.inputs),
                       elements_of(outputs), shown.empty() ? at::kByte : shown[0].scalar_type(),
                       call.input_splits, call.output_splits, names.ranks.at(0),
                       stride_of(names.ranks), static_cast<int>(names.ranks.size()));
}

}  // namespace

void TensorBackend::show(Request& call) const {
  if (!at::hasCallbacks()) return;
  call.title =
      (recorded_as_.empty() ? getBackendName() : recorded_as_) + ":" + title_of(call.operation);
  record_sizes(call, *names_, getRank());
}

}  // namespace lockstep::backends
