#include "lockstep/train/batch_feed.h"

#include <ATen/ops/zeros.h>

#include "lockstep/base/error.h"

namespace lockstep::detail {

Batch example_batch(const DataLoader& loader, int64_t samples) {
  const auto zeros = [samples](const SampleSpec& spec) {
    return at::zeros(spec.batch_shape(samples), at::device(c10::kCPU).dtype(spec.dtype));
  };
  Batch batch;
  batch.data = zeros(loader.data_spec());
  batch.target = zeros(loader.target_spec());
  return batch;
}

void check_loaders(size_t count) {
  if (count > 0) return;
  throw UsageError("a Trainer was given an empty list of loaders",
                   "give one loader, or one for each of this rank's logical shards");
}

bool drop_padding(Batch& batch) {
  const int64_t rows = batch.size() - batch.padding;
  if (rows == 0 || batch.padding == 0) return rows > 0;
  batch.data = batch.data.narrow(0, 0, rows);
  batch.target = batch.target.narrow(0, 0, rows);
  batch.padding = 0;
  return true;
}

}  // namespace lockstep::detail
