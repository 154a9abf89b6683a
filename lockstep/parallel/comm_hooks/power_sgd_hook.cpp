#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/parallel/averaging/averagers.h"

namespace lockstep {

struct PowerSGDState::Impl {
  PowerSGDOptions options;
  /// numpy's RandomState draws from the same generator.
  std::mt19937 random;  // NOLINT(bugprone-random-generator-seed): seeded by the options.
  std::map<size_t, at::Tensor> errors;  ///< By bucket, as all here.
  std::map<size_t, FlatViews> ps, qs;
  std::map<size_t, at::Tensor> new_errors;  ///< Of the backward that is under way.
  bool overflowed = false;                  ///< In one of its buckets.
  int64_t iter = 0;
  CompressionStats stats;

  /// numpy's RandomState.randint(1'000'000'000).
  uint64_t next_seed() {
    constexpr uint32_t kMask = (1U << 30) - 1, kMost = 999'999'999;
    uint32_t value = kMost + 1;
    while (value > kMost) value = static_cast<uint32_t>(random()) & kMask;
    return value;
  }

  /// False while gradients are still averaged as they are.
  bool started() const { return iter >= options.start_power_sgd_iter; }

  /// `result` has the same values on all ranks. So they agree on whether it overflowed.
  void keep(size_t bucket, const at::Tensor& before, const at::Tensor& result) {
    const bool finite = std::isfinite(at::sum(result, at::kDouble).item<double>());
    overflowed |= !finite;
    if (!finite || !options.warm_start) {
      ps.erase(bucket);
      qs.erase(bucket);
    }
    if (options.use_error_feedback) new_errors[bucket] = before - result;
  }

  /// Whoever scales the loss skips a step whose gradients overflowed: then the errors before it
  /// are still to be sent.
  void finish_bucket(bool is_last) {
    if (!is_last) return;
    ++iter;
    if (!overflowed) new_errors.merge(errors);
    if (!overflowed) errors.swap(new_errors);
    new_errors.clear();
    overflowed = false;
  }
};

namespace {

void orthogonalize_by_gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const int64_t columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm = at::linalg_vector_norm(column, 2, {1}, /*keepdim=*/true);
    column.div_(epsilon == 0 ? norm : norm + epsilon);
    if (i + 1 == columns) return;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_(at::sum(column * rest, {1}, /*keepdim=*/true) * column);
  }
}

/// The columns of each [rows, columns] of a batch of matrices, in place.
void orthogonalize(at::Tensor matrices, double epsilon) {
  const bool half = c10::isReducedFloatingType(matrices.scalar_type());
  if (matrices.size(2) <= 2 || half) return orthogonalize_by_gram_schmidt(matrices, epsilon);
  at::Tensor upper =
      at::empty({matrices.size(0), matrices.size(2), matrices.size(2)}, matrices.options());
  at::linalg_qr_out(matrices, upper, matrices);
}

/// The mean of a bucket over a group, in the background.
std::function<at::Tensor()> start_mean(const ProcessGroup& group, const at::Tensor& gradients) {
  at::Tensor mean = gradients;
  mean.div_(group.size());
  return [work = group.all_reduce_async(mean), mean] {
    work.wait();
    return mean;
  };
}

/// One bucket on its way.
struct Compression {
  std::shared_ptr<PowerSGDState::Impl> state;
  ProcessGroup group;
  bool square;  ///< The bucket is one square matrix.
  size_t index;
  bool is_last;
  int64_t length;
  at::Tensor gradients;                       ///< With zeros behind them, if square.
  at::Tensor before = {};                     ///< A copy of them, with error feedback.
  std::vector<at::Tensor> uncompressed = {};  ///< Views of `gradients`.
  at::Tensor uncompressed_memory = {};
  std::vector<at::Tensor> matrices = {};  ///< [batch, rows, columns], views or stacks of views.
  std::vector<std::vector<at::Tensor>> originals = {};  ///< Of each that is a stack.
  FlatViews ps = {}, qs = {};                           ///< The state's, for all matrices.
  Work uncompressed_work = {}, ps_work = {};

  PowerSGDState::Impl& kept() const { return *state; }
  const PowerSGDOptions& options() const { return kept().options; }

  void pad_to_square() {
    const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(length))));
    const at::Tensor padded = at::zeros({side * side}, gradients.options());
    padded.narrow(0, 0, length).copy_(gradients);
    gradients = padded;
    matrices.push_back(padded.view({1, side, side}));
    originals.emplace_back();
    kept().stats.numel_before += length;
    kept().stats.numel_after += 2 * side * rank_of(matrices[0]);
  }

  void divide_tensors(const GradientBucket& bucket) {
    std::vector<std::pair<std::vector<int64_t>, std::vector<at::Tensor>>> by_shape;
    for (int64_t offset = 0; const at::Tensor& parameter : bucket.parameters) {
      const at::Tensor tensor =
          bucket.gradients.narrow(0, offset, parameter.numel()).view(parameter.sizes());
      offset += parameter.numel();
      const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
      at::Tensor matrix = tensor.view({rows, rows == 0 ? 0 : tensor.numel() / rows});
      const int64_t columns = matrix.size(1);
      const int64_t rank = std::min({rows, columns, options().matrix_approximation_rank});
      const int64_t before_it = rows * columns, after_it = (rows + columns) * rank;
      kept().stats.numel_before += before_it;
      if (static_cast<double>(after_it) * options().min_compression_rate >=
          static_cast<double>(before_it)) {
        kept().stats.numel_after += before_it;
        uncompressed.push_back(tensor);
        continue;
      }
      kept().stats.numel_after += after_it;
      const std::vector<int64_t> shape = matrix.sizes().vec();
      auto same = std::find_if(by_shape.begin(), by_shape.end(),
                               [&](const auto& entry) { return entry.first == shape; });
      if (same == by_shape.end()) same = by_shape.insert(by_shape.end(), {shape, {}});
      same->second.push_back(std::move(matrix));
    }
    for (const auto& [shape, tensors] : by_shape) take_matrices(tensors);
  }

  void take_matrices(const std::vector<at::Tensor>& tensors) {
    if (options().batch_tensors_with_same_shape && tensors.size() > 1) {
      matrices.push_back(at::stack(tensors));
      originals.push_back(tensors);
      return;
    }
    for (const at::Tensor& tensor : tensors) {
      matrices.push_back(tensor.unsqueeze(0));
      originals.emplace_back();
    }
  }

  /// True when the matrices are new and hold no values yet.
  bool find_memory() {
    const bool is_new = !options().warm_start || !kept().ps.contains(index);
    if (is_new) {
      kept().ps[index] = narrow_matrices(1);
      kept().qs[index] = narrow_matrices(2);
    }
    ps = kept().ps[index];
    qs = kept().qs[index];
    return is_new;
  }

  /// With as many rows as `dim` of each matrix has.
  FlatViews narrow_matrices(int64_t dim) const {
    std::vector<at::Tensor> shapes;
    for (const at::Tensor& matrix : matrices) {
      shapes.push_back(at::empty({}, gradients.options())
                           .expand({matrix.size(0), matrix.size(dim), rank_of(matrix)}));
    }
    return flat_views(shapes, [](int64_t elements, const at::TensorOptions& options) {
      return at::empty({elements}, options);
    });
  }

  int64_t rank_of(const at::Tensor& matrix) const {
    return std::min({matrix.size(1), matrix.size(2), options().matrix_approximation_rank});
  }

  void prepare_qs(bool are_new) {
    at::Generator generator;
    if (are_new) generator = at::make_generator<at::CPUGeneratorImpl>(kept().next_seed());
    for (at::Tensor& q : qs.views) {
      if (are_new) q.copy_(at::randn(q.sizes(), generator, at::dtype(q.scalar_type())));
      orthogonalize(q, options().orthogonalization_epsilon);
    }
  }

  /// Not one for both: their last bits differ.
  void multiply(at::Tensor result, const at::Tensor& a, const at::Tensor& b) const {
    if (!square) {
      at::bmm_out(result, a, b);
      return;
    }
    at::Tensor only = result[0];
    at::mm_out(only, a[0], b[0]);
  }

  /// The part before the first communication has an answer.
  void start(const GradientBucket& bucket) {
    if (square) pad_to_square();
    if (options().use_error_feedback) {
      const auto error = kept().errors.find(index);
      if (error != kept().errors.end()) gradients.add_(error->second);
      before = gradients.clone();
    }
    if (!square) divide_tensors(bucket);
    prepare_qs(find_memory());
    for (size_t i = 0; i < matrices.size(); ++i) multiply(ps.views[i], matrices[i], qs.views[i]);
    if (!uncompressed.empty()) {
      uncompressed_memory = at::flatten_dense_tensors(uncompressed);
      uncompressed_work = group.all_reduce_async(uncompressed_memory);
    }
    if (!matrices.empty()) ps_work = group.all_reduce_async(ps.memory[0]);
  }

  at::Tensor finish() {
    const c10::AutoGradMode no_grad(false);
    if (!uncompressed.empty()) {
      uncompressed_work.wait();
      uncompressed_memory.div_(group.size());
      const auto means = at::unflatten_dense_tensors(uncompressed_memory, uncompressed);
      for (size_t i = 0; i < means.size(); ++i) uncompressed[i].copy_(means[i]);
    }
    if (!matrices.empty()) decompress();
    kept().keep(index, before, gradients);
    kept().finish_bucket(is_last);
    return gradients.narrow(0, 0, length);
  }

  void decompress() {
    ps_work.wait();
    for (size_t i = 0; i < matrices.size(); ++i) {
      // The mean would have the same directions.
      orthogonalize(ps.views[i], options().orthogonalization_epsilon);
    }
    for (size_t i = 0; i < matrices.size(); ++i) {
      multiply(qs.views[i], matrices[i].transpose(1, 2), ps.views[i]);
    }
    group.all_reduce(qs.memory[0]);
    qs.memory[0].div_(group.size());
    for (size_t i = 0; i < matrices.size(); ++i) {
      multiply(matrices[i], ps.views[i], qs.views[i].transpose(1, 2));
      for (size_t k = 0; k < originals[i].size(); ++k) originals[i][k].copy_(matrices[i][k]);
    }
  }
};

AsyncGradientHook hook_of(std::shared_ptr<PowerSGDState::Impl> state, bool square) {
  return [state, square](const ProcessGroup& group,
                         GradientBucket& bucket) -> std::function<at::Tensor()> {
    const c10::AutoGradMode no_grad(false);
    if (!state->started()) {
      state->finish_bucket(bucket.is_last);
      return start_mean(group, bucket.gradients);
    }
    const auto way = std::make_shared<Compression>(
        Compression{state, group, square, bucket.index, bucket.is_last, bucket.gradients.numel(),
                    bucket.gradients});
    way->start(bucket);
    return [way] { return way->finish(); };
  };
}

}  // namespace

PowerSGDState::PowerSGDState(const PowerSGDOptions& options) : impl_(std::make_shared<Impl>()) {
  if (options.matrix_approximation_rank < 1 || !(options.min_compression_rate > 0)) {
    throw UsageError("PowerSGDState: matrix_approximation_rank is " +
                     std::to_string(options.matrix_approximation_rank) +
                     " and min_compression_rate " + std::to_string(options.min_compression_rate) +
                     "; expected 1 or more, and more than 0");
  }
  if ((options.use_error_feedback || options.warm_start) && options.start_power_sgd_iter < 2) {
    throw UsageError("PowerSGDState: start_power_sgd_iter is " +
                         std::to_string(options.start_power_sgd_iter) +
                         "; expected 2 or more with error feedback or warm start",
                     "DistributedDataParallel makes its buckets anew after the first backward");
  }
  impl_->options = options;
  impl_->random.seed(options.random_seed);
}

PowerSGDState::~PowerSGDState() = default;

PowerSGDState::CompressionStats PowerSGDState::compression_stats() const {
  CompressionStats stats = impl_->stats;
  if (stats.numel_after > 0) {
    stats.rate = static_cast<double>(stats.numel_before) / static_cast<double>(stats.numel_after);
  }
  return stats;
}

int64_t PowerSGDState::iter() const {
  return impl_->iter;
}

AsyncGradientHook power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  if (!state) throw UsageError("power_sgd_hook: the state is null");
  return hook_of(state->impl_, /*square=*/false);
}

AsyncGradientHook batched_power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  if (!state) throw UsageError("batched_power_sgd_hook: the state is null");
  return hook_of(state->impl_, /*square=*/true);
}

PostLocalSGDState::PostLocalSGDState(const ProcessGroup& group, ProcessGroup given, int64_t start,
                                     bool allreduce)
    : subgroup(given ? std::move(given) : new_subgroup_of_host(group)),
      start_local_sgd_iter(start),
      post_local_gradient_allreduce(allreduce) {
  if (start < 0) {
    throw UsageError("PostLocalSGDState: local SGD starts at backward " + std::to_string(start) +
                     "; expected 0 or more");
  }
}

AsyncGradientHook post_local_sgd_hook(std::shared_ptr<PostLocalSGDState> state) {
  if (!state) throw UsageError("post_local_sgd_hook: the state is null");
  return [state](const ProcessGroup& group, GradientBucket& bucket) -> std::function<at::Tensor()> {
    if (state->iter < state->start_local_sgd_iter) {
      state->iter += bucket.is_last ? 1 : 0;
      return start_mean(group, bucket.gradients);
    }
    if (!state->post_local_gradient_allreduce) {
      return [gradients = bucket.gradients] { return gradients; };
    }
    return start_mean(state->subgroup, bucket.gradients);
  };
}

}  // namespace lockstep
