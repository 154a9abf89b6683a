#include "lockstep/parallel/pipeline/gradient_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/parallel/scaled_copy.h"

namespace lockstep::detail {
namespace {

/// Apart from the tags of the stages' own messages.
constexpr int kTiedTag = 1 << 21;

at::Tensor gradient_or_zeros(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() ? gradient.contiguous() : at::zeros_like(parameter).contiguous();
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
    places_.push_back(parameter.is_non_overlapping_and_dense()
                          ? flat.as_strided(parameter.sizes(), parameter.strides(), used)
                          : flat.narrow(0, used, parameter.numel()).view(parameter.sizes()));
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

}  // namespace lockstep::detail
