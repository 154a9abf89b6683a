#pragma once

#include <c10/core/MemoryFormat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "lockstep/train/model_training.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {

/// DatasetOptions::unpacked of this process: what the thin binary has unpacked while it loaded this
/// library. Filled before a subcommand runs, and only read then.
std::map<std::filesystem::path, std::span<const std::byte>>& unpacked_files();

/// The files of the run's data set are there after this: it downloads them, with --download. Throws
/// as load_dataset does where some are missing. Of data sets that have no download it does nothing.
void fetch_data(const RunConfig& config);

/// Optimizer steps of an epoch of a training loader.
int64_t steps_per_epoch(const RunConfig& config, int64_t batches_per_epoch);

/// What a Trainer is given, and what is told of it.
struct ModelTask {
  std::shared_ptr<ModelTraining> module;
  std::vector<DataLoader> train;  ///< One, or one for each logical shard; none for an evaluation.
  std::vector<DataLoader> validation;
  int64_t parameters = 0;
  int64_t frozen = 0;  ///< Of them, by --freeze.
  int64_t train_samples = 0;
  int64_t test_samples = 0;
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
  StateDict optimizer_state;  ///< Of --load-optimizer.
};

/// Loads the data set and makes model, optimizer and loaders. LibTorch's generators are seeded
/// right before the model is made. Nothing random happens between that and training. So a Python
/// script with torch.manual_seed(S) right before its model has the same weights and dropout masks.
///
/// Without `training` it is for an evaluation: no loader to train from, and no schedule.
ModelTask make_train_task(const RunConfig& config, const World& world, bool training = true);

}  // namespace lockstep
