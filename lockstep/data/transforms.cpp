#include "lockstep/data/transforms.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/data/transform_runner.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const Transform& transform, const SampleSpec& input,
                         const std::string& expected) {
  throw UsageError(transform.name() + " got samples of " + input.describe() + ", expected " +
                   expected);
}

using Table = std::array<float, 256>;

/// The float of each byte value, by the very operations that torchvision's ToTensor and Normalize
/// apply to a tensor, so that looking it up gives their bits.
Table make_table(bool normalized, double mean, double std) {
  at::Tensor values = at::arange(256, at::kByte).to(at::kFloat).div(255);
  if (normalized) values.sub_(at::tensor(mean, at::kFloat)).div_(at::tensor(std, at::kFloat));
  Table table;
  std::copy_n(values.const_data_ptr<float>(), table.size(), table.begin());
  return table;
}

/// The next row's bytes are asked for while this one is converted: rows of a shuffled batch lie far
/// apart, where the processor does not foresee them. Inlined always: GCC takes a function that only
/// prefetches for one without an effect and drops the call.
[[gnu::always_inline]] inline void prefetch_row(const RowView& rows, int64_t i) {
  constexpr int64_t kCacheLine = 64;
  if (i >= rows.size()) return;
  for (int64_t at = 0; at < rows.row_bytes(); at += kCacheLine) __builtin_prefetch(rows[i] + at);
}

void look_up(const Table& table, const uint8_t* __restrict from, float* __restrict to,
             int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t k = 0; k < 8; ++k) to[i + k] = table[from[i + k]];
  }
  for (; i < count; ++i) to[i] = table[from[i]];
}

void normalize_floats(const float* __restrict from, float* __restrict to, int64_t count, float mean,
                      float std) {
  for (int64_t i = 0; i < count; ++i) to[i] = (from[i] - mean) / std;
}

/// ToTensor and Normalize; with no mean and std, ToTensor alone.
class ToFloat : public Transform {
 public:
  ToFloat() : tables_{make_table(false, 0, 1)} {}
  ToFloat(std::vector<double> mean, std::vector<double> std)
      : mean_(std::move(mean)), std_(std::move(std)) {
    if (mean_.empty() || mean_.size() != std_.size())
      throw UsageError("normalize got " + std::to_string(mean_.size()) + " means and " +
                       std::to_string(std_.size()) + " standard deviations, expected as many of " +
                       "both: one, or one a channel");
    for (size_t c = 0; c < std_.size(); ++c) {
      if (!std::isfinite(mean_[c]) || !std::isfinite(std_[c]) || static_cast<float>(std_[c]) == 0)
        throw UsageError("normalize got mean " + std::to_string(mean_[c]) + " and std " +
                         std::to_string(std_[c]) +
                         ", expected finite numbers and a std other than 0");
      tables_.push_back(make_table(true, mean_[c], std_[c]));
    }
  }

  std::string name() const override { return normalizes() ? "normalize" : "to_float"; }

  SampleSpec output(const SampleSpec& input) const override {
    const size_t dims = input.shape.size();
    SampleSpec result{input.shape, at::kFloat};
    if (input.dtype == at::kByte) {
      if (dims != 2 && dims != 3) refuse(*this, input, "uint8 images [H, W] or [C, H, W]");
      if (dims == 2) result.shape.insert(result.shape.begin(), 1);
    } else if (input.dtype != at::kFloat) {
      refuse(*this, input, "uint8 or float32");
    }
    if (mean_.size() > 1 && (result.shape.empty() || result.shape[0] != int64_t(mean_.size())))
      refuse(*this, input, std::to_string(mean_.size()) + " channels, one for each mean");
    return result;
  }

  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext&) const override {
    auto* to = out.mutable_data_ptr<float>();
    const int64_t parts = static_cast<int64_t>(tables_.size());
    const int64_t plane = input.numel() / parts;
    for (int64_t i = 0; i < rows.size(); ++i) {
      prefetch_row(rows, i + 1);
      for (int64_t c = 0; c < parts; ++c, to += plane) {
        if (input.dtype == at::kByte)
          look_up(tables_[c], reinterpret_cast<const uint8_t*>(rows[i]) + c * plane, to, plane);
        else
          convert(c, reinterpret_cast<const float*>(rows[i]) + c * plane, to, plane);
      }
    }
  }

 private:
  bool normalizes() const { return !mean_.empty(); }
  void convert(int64_t channel, const float* from, float* to, int64_t count) const {
    if (normalizes())
      normalize_floats(from, to, count, static_cast<float>(mean_[channel]),
                       static_cast<float>(std_[channel]));
    else
      std::copy_n(from, count, to);
  }

  std::vector<double> mean_;
  std::vector<double> std_;
  std::vector<Table> tables_;  ///< One a mean.
};

class Reshape : public Transform {
 public:
  explicit Reshape(std::vector<int64_t> shape, bool flat = false)
      : shape_(std::move(shape)), flat_(flat) {}
  std::string name() const override { return flat_ ? "flatten" : "reshape"; }
  SampleSpec output(const SampleSpec& input) const override {
    SampleSpec result{flat_ ? std::vector<int64_t>{input.numel()} : shape_, input.dtype};
    if (result.numel() != input.numel())
      refuse(*this, input, std::to_string(result.numel()) + " elements for " + result.describe());
    return result;
  }
  void apply(const RowView& rows, const SampleSpec&, const at::Tensor& out,
             const TransformContext&) const override {
    rows.gather_into(out);
  }
  bool is_reshape() const override { return true; }

 private:
  std::vector<int64_t> shape_;
  bool flat_;
};

class BatchTransform : public Transform {
 public:
  BatchTransform(std::string name, std::function<at::Tensor(const at::Tensor&)> function)
      : name_(std::move(name)), function_(std::move(function)) {}
  std::string name() const override { return name_; }
  SampleSpec output(const SampleSpec& input) const override {
    const at::Tensor result = call(at::zeros(input.batch_shape(1), input.dtype));
    return SampleSpec::of_rows(result);
  }
  void apply(const RowView& rows, const SampleSpec& input, const at::Tensor& out,
             const TransformContext&) const override {
    const at::Tensor batch = at::empty(input.batch_shape(rows.size()), input.dtype);
    rows.gather_into(batch);
    const at::Tensor result = call(batch);
    if (result.sizes() != out.sizes() || result.scalar_type() != out.scalar_type())
      throw UsageError("transform '" + name_ + "' returned " + c10::str(result.sizes()) + " of " +
                       c10::toString(result.scalar_type()) + ", but " + c10::str(out.sizes()) +
                       " of " + c10::toString(out.scalar_type()) + " for the same kind of samples");
    out.copy_(result);
  }

 private:
  at::Tensor call(const at::Tensor& batch) const {
    at::Tensor result = function_(batch);
    if (!result.defined() || result.dim() < 1 || result.size(0) != batch.size(0))
      throw UsageError("transform '" + name_ + "' must return one row for each of the batch's " +
                       std::to_string(batch.size(0)) + " rows");
    return result;
  }
  std::string name_;
  std::function<at::Tensor(const at::Tensor&)> function_;
};

}  // namespace

TransformPtr normalize(std::vector<double> mean, std::vector<double> std) {
  return std::make_shared<ToFloat>(std::move(mean), std::move(std));
}

TransformPtr to_float() {
  return std::make_shared<ToFloat>();
}

TransformPtr flatten() {
  return std::make_shared<Reshape>(std::vector<int64_t>{}, true);
}

TransformPtr reshape(std::vector<int64_t> shape) {
  return std::make_shared<Reshape>(std::move(shape));
}

TransformPtr batch_transform(std::string name,
                             std::function<at::Tensor(const at::Tensor&)> function) {
  return std::make_shared<BatchTransform>(std::move(name), std::move(function));
}

SampleSpec Compose::output(const SampleSpec& input) const {
  SampleSpec spec = input;
  for (const TransformPtr& transform : transforms_) spec = transform->output(spec);
  return spec;
}

at::Tensor Compose::operator()(const at::Tensor& batch, uint64_t seed, int64_t epoch) const {
  const at::Tensor input = batch.contiguous();
  TransformRunner runner(*this, SampleSpec::of_rows(input));
  at::Tensor out = at::empty(runner.output().batch_shape(input.size(0)), runner.output().dtype);
  std::vector<int64_t> rows(input.size(0));
  std::iota(rows.begin(), rows.end(), 0);
  runner.run(RowView(input, rows), out, seed, epoch, rows);
  return out;
}

}  // namespace lockstep
