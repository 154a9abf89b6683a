#include "lockstep/parallel/pipeline/gradient_exchange.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "lockstep/optim/clip.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/scaled_copy.h"

namespace lockstep::detail {
namespace {

/// Apart from the tags of the stages' own messages.
constexpr int kTiedTag = 1 << 21;

at::Tensor gradient_or_zeros(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() ? gradient.contiguous() : at::zeros_like(parameter).contiguous();
}

/// In which norms are added up. A norm of float16 gradients need not fit into float16.
at::ScalarType norm_dtype(const StageTensors& tensors) {
  std::optional<at::ScalarType> widest;
  for (const StageTensor& parameter : tensors.parameters()) {
    if (!parameter.tensor.requires_grad()) continue;
    const at::ScalarType own = parameter.tensor.scalar_type();
    const at::ScalarType dtype = own == at::kHalf ? at::kFloat : own;
    widest = widest ? c10::promoteTypes(*widest, dtype) : dtype;
  }
  return widest.value_or(at::kFloat);
}

}  // namespace

GradientExchange::GradientExchange(const StageTensors& tensors, ProcessGroup pipeline,
                                   ProcessGroup data_parallel)
    : tensors_(tensors), pipeline_(std::move(pipeline)), data_parallel_(std::move(data_parallel)) {}

/// A sum that each of its stages has must go into the next one once only.
void GradientExchange::begin() {
  if (!std::exchange(summed_, false)) return;
  const int me = pipeline_.rank();
  for (const StageTensor& parameter : tensors_.parameters()) {
    if (parameter.ranks.size() > 1 && parameter.is_on(me) && parameter.owner() != me)
      parameter.tensor.mutable_grad().reset();
  }
}

void GradientExchange::run() {
  const at::NoGradGuard no_grad;
  if (tensors_.has_tied()) sum_tied();
  summed_ = true;
  if (data_parallel_ && data_parallel_.size() > 1) average();
}

/// The first rank that has a tied parameter sums in the order of ranks, so all get the same bits.
void GradientExchange::sum_tied() {
  const int me = pipeline_.rank();
  for (size_t i = 0; i < tensors_.parameters().size(); ++i) {
    const StageTensor& parameter = tensors_.parameters()[i];
    if (parameter.ranks.size() == 1 || !parameter.is_on(me) || !parameter.tensor.requires_grad()) {
      continue;
    }
    const int tag = kTiedTag + static_cast<int>(i);
    at::Tensor sum = gradient_or_zeros(parameter.tensor);
    if (me != parameter.owner()) {
      pipeline_.send(sum, parameter.owner(), tag);
      pipeline_.recv(sum, parameter.owner(), tag);
    } else {
      at::Tensor other = at::empty_like(sum);
      for (const int rank : parameter.ranks) {
        if (rank == me) continue;
        pipeline_.recv(other, rank, tag);
        sum.add_(other);
      }
      for (const int rank : parameter.ranks) {
        if (rank != me) pipeline_.send(sum, rank, tag);
      }
    }
    parameter.tensor.mutable_grad() = sum;
  }
}

void GradientExchange::lay_out(const std::vector<at::Tensor>& parameters) {
  std::map<at::ScalarType, int64_t> elements;
  for (const at::Tensor& parameter : parameters) {
    elements[parameter.scalar_type()] += parameter.numel();
  }
  flat_.clear();
  std::map<at::ScalarType, std::pair<at::Tensor, int64_t>> parts;
  for (const auto& [dtype, count] : elements) {
    flat_.push_back(data_parallel_.symmetric_empty(count, dtype));
    parts[dtype] = {flat_.back(), 0};
  }
  places_.clear();
  for (const at::Tensor& parameter : parameters) {
    auto& [flat, used] = parts[parameter.scalar_type()];
    // In the parameter's own order of memory, which fused optimizers want.
    places_.push_back(view_like(flat, used, parameter));
    used += parameter.numel();
  }
  laid_out_ = parameters;
}

/// As DistributedDataParallel: each rank divides its own, then all are summed.
void GradientExchange::average() {
  std::vector<at::Tensor> parameters;
  for (const size_t i : tensors_.own()) {
    const at::Tensor& parameter = tensors_.parameters()[i].tensor;
    if (parameter.grad().defined()) parameters.push_back(parameter);
  }
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  if (!std::equal(parameters.begin(), parameters.end(), laid_out_.begin(), laid_out_.end(), same)) {
    lay_out(parameters);
  }
  const double share = 1.0 / data_parallel_.size();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    const bool in_place = gradient.const_data_ptr() == places_[i].const_data_ptr();
    in_place ? static_cast<void>(places_[i].mul_(share)) : scaled_copy(places_[i], gradient, share);
  }
  for (at::Tensor& flat : flat_) data_parallel_.all_reduce(flat);
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = places_[i];
}

double GradientExchange::clip_grad_norm(c10::Device device, double max_norm) const {
  if (pipeline_.size() == 1) return lockstep::clip_grad_norm(tensors_.own_parameters(), max_norm);
  constexpr int64_t kCountedElsewhere = -1;
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> numbers;
  for (const size_t i : tensors_.own()) {
    const StageTensor& parameter = tensors_.parameters()[i];
    if (!parameter.tensor.grad().defined()) continue;
    gradients.push_back(parameter.tensor.grad());
    const bool is_owner = parameter.owner() == pipeline_.rank();
    numbers.push_back(is_owner ? static_cast<int64_t>(i) : kCountedElsewhere);
  }
  // Each rank puts its own norms into a table of zeros, and a sum over the ranks, which changes no
  // bit, puts them together. Row 0: the norms. Row 1: whether there is one.
  return clip_gradients(gradients, max_norm, [&](const auto& norms, const auto& places) {
    const auto count = static_cast<int64_t>(tensors_.parameters().size());
    at::Tensor table = at::zeros({2, count}, at::TensorOptions(device).dtype(at::kDouble));
    for (size_t i = 0; i < norms.size(); ++i) {
      const int64_t number = numbers[places[i]];
      if (number == kCountedElsewhere) continue;
      table[0][number].copy_(norms[i]);
      table[1][number].fill_(1);
    }
    pipeline_.all_reduce(table);
    const at::Tensor all = table[0].masked_select(table[1].gt(0)).to(norm_dtype(tensors_));
    return at::linalg_vector_norm(all, 2.0);
  });
}

}  // namespace lockstep::detail
