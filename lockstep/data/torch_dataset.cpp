#include "lockstep/data/torch_dataset.h"

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

SampleSpec spec_of(const at::Tensor& sample) {
  return {sample.sizes().vec(), sample.scalar_type()};
}

}  // namespace

std::vector<at::Tensor> rows_of(const at::Tensor& stacked) {
  if (!stacked.defined() || stacked.dim() == 0) return {};
  return stacked.unbind();
}

void ExampleSource::inspect(int64_t size) {
  if (size < 1)
    throw DataError("data set '" + name_ + "' has no samples, or does not say how many");
  const Examples first = fetch({0});
  const auto spec = [&](const char* part, const std::vector<at::Tensor>& tensors) {
    if (tensors.size() != 1 || !tensors[0].defined())
      throw DataError("data set '" + name_ + "' gave no " + part + " for sample 0");
    return spec_of(tensors[0]);
  };
  data_spec_ = spec("data", first.data);
  target_spec_ = spec("target", first.target);
  size_ = size;
}

void ExampleSource::read(std::span<const int64_t> indices, const at::Tensor& data,
                         const at::Tensor& target) {
  const Examples examples = fetch({indices.begin(), indices.end()});
  const auto copy = [&](const char* part, const std::vector<at::Tensor>& from,
                        const SampleSpec& spec, const at::Tensor& to) {
    if (from.size() != indices.size())
      throw DataError("data set '" + name_ + "' gave " + std::to_string(from.size()) +
                      " samples for " + std::to_string(indices.size()) + " indices");
    for (size_t i = 0; i < from.size(); ++i) {
      if (!from[i].defined() || spec_of(from[i]) != spec)
        throw DataError("data set '" + name_ + "': the " + part + " of sample " +
                        std::to_string(indices[i]) + " is " +
                        (from[i].defined() ? spec_of(from[i]).describe() : "missing") +
                        ", but that of sample 0 is " + spec.describe());
      to.select(0, static_cast<int64_t>(i)).copy_(from[i]);
    }
  };
  copy("data", examples.data, data_spec_, data);
  copy("target", examples.target, target_spec_, target);
}

}  // namespace lockstep::detail
