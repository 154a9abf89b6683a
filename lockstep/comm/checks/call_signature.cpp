#include "lockstep/comm/checks/call_signature.h"

#include <algorithm>
#include <array>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/base/bytes.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 23> kOperationNames = {
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_sparse",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "symmetric_empty",
    "a batch of calls",
    "send",
    "recv",
    "recv_any",
};
static_assert(kOperationNames.size() == static_cast<size_t>(Operation::recv_any) + 1);

/// In c10d's order.
constexpr std::array<std::string_view, 9> kReductionNames = {
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
static_assert(kReductionNames.size() == size_t{c10d::ReduceOp::PREMUL_SUM} + 1);

}  // namespace

std::string reduction_name(int reduction) {
  const auto index = static_cast<size_t>(reduction);
  if (index >= kReductionNames.size()) return "reduction " + std::to_string(reduction);
  return std::string(kReductionNames[index]);
}

namespace {

template <class Range>
std::string bracketed(const Range& numbers) {
  std::vector<std::string> parts;
  for (int64_t number : numbers) parts.push_back(std::to_string(number));
  return "[" + join(parts, ", ") + "]";
}

std::string number_of(int rank, const RankNames& names) {
  const bool known = rank >= 0 && rank < static_cast<int>(names.size());
  return std::to_string(known ? names[static_cast<size_t>(rank)] : rank);
}

std::string describe_all(const TensorSignatures& tensors) {
  if (tensors.empty()) return "no tensor";
  if (tensors.size() == 1) return describe(tensors[0]);
  const bool alike = std::all_of(tensors.begin(), tensors.end(),
                                 [&](const TensorSignature& t) { return t == tensors[0]; });
  if (alike) return std::to_string(tensors.size()) + " x " + describe(tensors[0]);
  std::vector<std::string> parts;
  for (const auto& tensor : tensors) parts.push_back(describe(tensor));
  return "(" + join(parts, ", ") + ")";
}

/// "reduce(sum, root 1)", "send(to rank 1)", "barrier".
std::string head(const CallSignature& call, const RankNames& names) {
  std::vector<std::string> arguments;
  if (call.reduction >= 0) arguments.push_back(reduction_name(call.reduction));
  if (call.root >= 0) {
    const std::string_view label = call.operation == Operation::send   ? "to rank "
                                   : call.operation == Operation::recv ? "from rank "
                                                                       : "root ";
    arguments.push_back(std::string(label) + number_of(call.root, names));
  }
  std::string text(operation_name(call.operation));
  if (!arguments.empty()) text += "(" + join(arguments, ", ") + ")";
  return text;
}

void write(ByteWriter& out, const TensorSignatures& tensors) {
  out.count(tensors.size());
  for (const auto& tensor : tensors) {
    out.number(tensor.dtype);
    out.numbers(tensor.shape);
  }
}

TensorSignatures read_tensors(ByteReader& in) {
  TensorSignatures tensors;
  in.times([&] {
    const auto dtype = in.number<c10::ScalarType>();
    tensors.push_back({dtype, at::DimVector(in.numbers<int64_t>())});
  });
  return tensors;
}

}  // namespace

std::string_view operation_name(Operation operation) {
  return kOperationNames.at(static_cast<size_t>(operation));
}

TensorSignature signature_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {c10::ScalarType::Undefined, {}};
  return {tensor.scalar_type(), at::DimVector(tensor.sizes())};
}

TensorSignatures signatures_of(at::ArrayRef<at::Tensor> tensors) {
  TensorSignatures result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(signature_of(tensor));
  return result;
}

RankNames names_or_numbers(RankNames names, int size) {
  for (int rank = static_cast<int>(names.size()); rank < size; ++rank) names.push_back(rank);
  return names;
}

std::string rank_list(const std::vector<int>& group_ranks, const RankNames& names) {
  if (group_ranks.empty()) return "no rank";
  std::vector<std::string> parts;
  for (int rank : group_ranks) parts.push_back(number_of(rank, names));
  if (parts.size() == 1) return "rank " + parts[0];
  const std::string last = parts.back();
  parts.pop_back();
  return "ranks " + join(parts, ", ") + " and " + last;
}

std::string describe(const TensorSignature& tensor) {
  return std::string(c10::getDtypeNames(tensor.dtype).first) + " " + bracketed(tensor.shape);
}

std::string describe(const CallSignature& call, const RankNames& names) {
  std::string text = head(call, names);
  if (!call.inputs.empty()) text += " of " + describe_all(call.inputs);
  if (!call.outputs.empty()) text += " into " + describe_all(call.outputs);
  if (!call.input_splits.empty()) text += ", input splits " + bracketed(call.input_splits);
  if (!call.output_splits.empty()) text += ", output splits " + bracketed(call.output_splits);
  if (!call.origin.empty()) text += " (" + call.origin + ")";
  return text;
}

std::string called(const std::vector<int>& ranks, const CallSignature& call, const RankNames& names,
                   const std::string& group) {
  return rank_list(ranks, names) + " called " + describe(call, names) + " as collective " +
         std::to_string(call.sequence) + " of group '" + group + "'";
}

std::string encode(const CallSignature& call) {
  ByteWriter out;
  out.number(call.operation);
  out.number(call.reduction);
  out.number(call.root);
  out.number(call.sequence);
  write(out, call.inputs);
  write(out, call.outputs);
  out.numbers(call.input_splits);
  out.numbers(call.output_splits);
  out.text(call.origin);
  return out.bytes();
}

CallSignature decode(std::string_view bytes) {
  ByteReader in(bytes);
  CallSignature call;
  call.operation = in.number<Operation>();
  in.expect(call.operation <= Operation::recv_any);
  call.reduction = in.number<int>();
  call.root = in.number<int>();
  call.sequence = in.number<uint64_t>();
  call.inputs = read_tensors(in);
  call.outputs = read_tensors(in);
  call.input_splits = in.numbers<int64_t>();
  call.output_splits = in.numbers<int64_t>();
  call.origin = in.text();
  if (!in.ok() || !in.at_end())
    throw CommError("what another rank called cannot be read",
                    "run the same version of Lockstep on all ranks");
  return call;
}

}  // namespace lockstep
