#include "lockstep/data/transform_runner.h"

#include <ATen/ops/empty.h>

#include "lockstep/base/random.h"

namespace lockstep {

TransformRunner::TransformRunner(const Compose& transforms, const SampleSpec& input)
    : output_(input) {
  uint64_t ordinal = 0;
  for (const TransformPtr& transform : transforms.transforms()) {
    SampleSpec next = transform->output(output_);
    if (!transform->is_reshape()) steps_.push_back({transform, output_, next, ordinal, {}});
    output_ = std::move(next);
    ++ordinal;
  }
}

void TransformRunner::run(const RowView& rows, const at::Tensor& out, uint64_t seed, int64_t epoch,
                          std::span<const int64_t> indices) {
  if (steps_.empty()) return rows.gather_into(out);
  const int64_t count = rows.size();
  while (static_cast<int64_t>(iota_.size()) < count) iota_.push_back(int64_t(iota_.size()));
  const at::Tensor* from = nullptr;
  for (Step& step : steps_) {
    const bool last = &step == &steps_.back();
    if (!last && (!step.scratch.defined() || step.scratch.size(0) < count))
      step.scratch = at::empty(step.output.batch_shape(count), step.output.dtype);
    const at::Tensor to =
        last ? out.view(step.output.batch_shape(count)) : step.scratch.narrow(0, 0, count);
    const TransformContext context{KeyedRandom(seed, step.ordinal).next(), epoch, indices};
    const std::span<const int64_t> all(iota_.data(), static_cast<size_t>(count));
    step.transform->apply(from ? RowView(*from, all) : rows, step.input, to, context);
    from = &step.scratch;
  }
}

}  // namespace lockstep
