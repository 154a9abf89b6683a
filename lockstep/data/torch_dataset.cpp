#include "lockstep/data/torch_dataset.h"

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

SampleSpec spec_of(const at::Tensor& sample) {
  return {sample.sizes().vec(), sample.scalar_type()};
}

}  // namespace

void ExampleSource::inspect(int64_t size) {
  if (size < 1)
    throw DataError("data set '" + name_ + "' has no samples, or does not say how many");
  const Examples first = fetch({0});
  const auto one = [&](const char* part, const std::vector<at::Tensor>& tensors) {
    if (tensors.size() != 1 || !tensors[0].defined() || (first.stacked && tensors[0].dim() == 0))
      throw DataError("data set '" + name_ + "' gave no " + part + " for sample 0");
    return first.stacked ? SampleSpec::of_rows(tensors[0]) : spec_of(tensors[0]);
  };
  data_spec_ = one("data", first.data);
  target_spec_ = one("target", first.target);
  size_ = size;
}

void ExampleSource::read(std::span<const int64_t> indices, const at::Tensor& data,
                         const at::Tensor& target) {
  const std::vector<size_t> wanted(indices.begin(), indices.end());
  const Examples examples = fetch(wanted);
  const auto copy = [&](const char* part, const std::vector<at::Tensor>& from,
                        const SampleSpec& spec, const at::Tensor& to) {
    const auto check = [&](const at::Tensor& tensor, const std::string& which) {
      if (!tensor.defined())
        throw DataError("data set '" + name_ + "' gave no " + part + " for " + which);
      const bool row = examples.stacked && tensor.dim() > 0;
      const SampleSpec found = row ? SampleSpec::of_rows(tensor) : spec_of(tensor);
      if (found == spec) return;
      throw DataError("data set '" + name_ + "': the " + part + " of " + which + " is " +
                      found.describe() + ", but that of sample 0 is " + spec.describe());
    };
    const auto count = [&](int64_t found) {
      if (found == static_cast<int64_t>(wanted.size())) return;
      throw DataError("data set '" + name_ + "' gave " + std::to_string(found) + " samples for " +
                      std::to_string(wanted.size()) + " indices");
    };
    if (examples.stacked) {
      check(from.at(0), "a batch that starts with sample " + std::to_string(wanted.at(0)));
      count(from[0].size(0));
      to.copy_(from[0]);
      return;
    }
    count(static_cast<int64_t>(from.size()));
    for (size_t i = 0; i < from.size(); ++i) {
      check(from[i], "sample " + std::to_string(wanted[i]));
      to.select(0, static_cast<int64_t>(i)).copy_(from[i]);
    }
  };
  if (data.defined()) copy("data", examples.data, data_spec_, data);
  copy("target", examples.target, target_spec_, target);
}

}  // namespace lockstep::detail
