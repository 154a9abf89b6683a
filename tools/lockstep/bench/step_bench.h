#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/data/loader.h"
#include "lockstep/models/models.h"
#include "lockstep/train/model_training.h"
#include "lockstep/train/step_profiler.h"
#include "lockstep/train/trained_part.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {

/// A model with the same weights each time.
std::shared_ptr<Model> seeded_model(const std::string& name);

/// What a benchmark of training steps works with, and the step itself: a model, an optimizer and a
/// strategy, as `lockstep train` would have them.
class StepBench {
 public:
  /// `config` names model, batch_size, strategy, optimizer and precision. A collective.
  StepBench(const PlainJson& config, const World& world);

  /// A batch that stays, as the Python twin's.
  void draw_batch();
  /// `kept`: what this rank keeps when it keeps most, after backward.
  void step(StateBytes* kept = nullptr);
  /// So many steps, each with a new batch from a loader, as `lockstep train` has them. A
  /// collective.
  StepProfile profile(DataLoader& loader, int64_t steps, const StepProfilerOptions& options = {});
  /// A loader of this rank's share of the samples.
  DataLoader make_loader(const TensorDataset& dataset) const;
  /// Random samples that fit the model, so many for each data share.
  TensorDataset random_samples(int64_t of_each) const;

  int64_t parameters() const;
  int64_t batch_size() const { return batch_; }
  Strategy& strategy() const { return part_->strategy(); }

 private:
  void profiled_step(StepProfiler& profiler, DataLoader& loader);
  BatchWork work();
  void update();
  at::Tensor criterion(const at::Tensor& output, const at::Tensor& target) const;
  void take_batch(DataLoader& loader);
  at::Tensor draw_targets(int64_t samples) const;

  const ModelInfo info_;
  const int64_t batch_;
  const c10::Device device_;
  std::shared_ptr<Model> model_;
  at::MemoryFormat format_ = at::MemoryFormat::Contiguous;
  std::shared_ptr<ModelTraining> module_;
  std::unique_ptr<detail::TrainedPart> part_;
  at::Tensor x_;
  at::Tensor y_;
  int64_t epoch_ = 0;  ///< Of the loader.
};

}  // namespace lockstep::tool
