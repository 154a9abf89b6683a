#include "lockstep/data/dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

void check(const TensorDataset& dataset) {
  const auto fail = [&](const std::string& what) {
    throw DataError("data set '" + dataset.name + "': " + what);
  };
  const std::pair<const char*, const at::Tensor*> parts[] = {{"data", &dataset.data},
                                                             {"targets", &dataset.targets}};
  for (const auto& [part, tensor] : parts) {
    const std::string name = part;
    if (!tensor->defined()) fail(name + " is missing");
    if (!tensor->device().is_cpu())
      fail(name + " is on " + tensor->device().str() + ", expected the CPU");
    if (tensor->dim() < 1) fail(name + " is a single number, expected one row a sample");
    if (tensor->size(0) > 0 && !tensor->select(0, 0).is_contiguous())
      fail(name + " has rows that are not contiguous; call contiguous() on it");
    if (tensor->is_conj() || tensor->is_neg() || tensor->_is_zerotensor())
      fail(name + " is lazily conjugated or negated, or has no memory; call clone() on it");
  }
  if (dataset.data.size(0) != dataset.targets.size(0))
    fail(std::to_string(dataset.data.size(0)) + " samples, but " +
         std::to_string(dataset.targets.size(0)) + " targets");
}

class TensorSource : public SampleSource {
 public:
  explicit TensorSource(TensorDataset dataset) : dataset_(std::move(dataset)) { check(dataset_); }

  std::string name() const override { return dataset_.name; }
  int64_t size() const override { return dataset_.size(); }
  SampleSpec data_spec() const override { return SampleSpec::of_rows(dataset_.data); }
  SampleSpec target_spec() const override { return SampleSpec::of_rows(dataset_.targets); }
  int64_t num_classes() const override { return dataset_.num_classes; }
  std::vector<std::string> classes() const override { return dataset_.classes; }
  std::unique_ptr<SampleSource> clone() const override {
    return std::make_unique<TensorSource>(*this);
  }
  const at::Tensor* rows() const override { return &dataset_.data; }
  void read(std::span<const int64_t> indices, const at::Tensor& data,
            const at::Tensor& target) override {
    if (data.defined()) RowView(dataset_.data, indices).gather_into(data);
    RowView(dataset_.targets, indices).gather_into(target);
  }

 private:
  TensorDataset dataset_;
};

}  // namespace

SampleSpec SampleSpec::of_rows(const at::Tensor& rows) {
  return {rows.sizes().slice(1).vec(), rows.scalar_type()};
}

int64_t SampleSpec::numel() const {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

std::vector<int64_t> SampleSpec::batch_shape(int64_t rows) const {
  std::vector<int64_t> batch{rows};
  batch.insert(batch.end(), shape.begin(), shape.end());
  return batch;
}

std::string SampleSpec::describe() const {
  return std::string(c10::getDtypeNames(dtype).first) + " " + c10::str(at::IntArrayRef(shape));
}

RowView::RowView(const at::Tensor& source, std::span<const int64_t> rows)
    : rows_(rows),
      base_(static_cast<const std::byte*>(source.const_data_ptr())),
      row_bytes_(source.size(0) ? static_cast<int64_t>(source.nbytes()) / source.size(0) : 0),
      step_(source.stride(0) * source.element_size()) {}

void RowView::gather_into(const at::Tensor& out) const {
  auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
  if (row_bytes_ == sizeof(int64_t)) {  // class indices: spare the call for each
    for (int64_t i = 0; i < size(); ++i) std::memcpy(to + i * 8, (*this)[i], 8);
    return;
  }
  for (int64_t i = 0; i < size(); ++i) std::memcpy(to + i * row_bytes_, (*this)[i], row_bytes_);
}

TensorDataset read_all(SampleSource& source) {
  constexpr int64_t kSamplesAtOnce = 1024;
  const auto make = [&](const SampleSpec& spec) {
    return at::empty(spec.batch_shape(source.size()), spec.dtype);
  };
  TensorDataset dataset;
  dataset.name = source.name();
  dataset.data = make(source.data_spec());
  dataset.targets = make(source.target_spec());
  std::vector<int64_t> indices;
  for (int64_t begin = 0; begin < source.size(); begin += kSamplesAtOnce) {
    indices.resize(std::min(kSamplesAtOnce, source.size() - begin));
    std::iota(indices.begin(), indices.end(), begin);
    const auto count = static_cast<int64_t>(indices.size());
    source.read(indices, dataset.data.narrow(0, begin, count),
                dataset.targets.narrow(0, begin, count));
  }
  dataset.classes = source.classes();
  dataset.num_classes = source.num_classes();
  if (dataset.num_classes == 0 && dataset.targets.scalar_type() == at::kLong &&
      dataset.targets.dim() == 1)
    dataset.num_classes = dataset.targets.max().item<int64_t>() + 1;
  return dataset;
}

std::unique_ptr<SampleSource> tensor_source(TensorDataset dataset) {
  return std::make_unique<TensorSource>(std::move(dataset));
}

}  // namespace lockstep
