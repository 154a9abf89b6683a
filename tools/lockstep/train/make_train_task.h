#pragma once

#include <memory>

#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/train/train_task.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {

/// Samples of a batch in an evaluation. It is large enough that the cost of a call does not count,
/// and small enough that a ConvNet's activations stay a few MB.
inline constexpr int64_t kEvaluationBatch = 256;

/// Throws UsageError when the model cannot take the data set's samples or tell its classes apart.
void check_model_fits(const ModelInfo& model, const TensorDataset& dataset);

/// This rank's share of a part of a data set, made fit for the model.
std::unique_ptr<DataLoader> make_loader(const RunConfig& config, const World& world,
                                        const TensorDataset& dataset, bool training);

/// Loads the data set and makes model, optimizer and loaders. LibTorch's generators are seeded
/// right before the model is made. Nothing random happens between that and training. So a Python
/// script with torch.manual_seed(S) right before its model has the same weights and dropout masks.
TrainTask make_train_task(const RunConfig& config, const World& world);

/// The same for an evaluation: a model with the weights of `config.load_weights`, and no optimizer.
TrainTask make_evaluation_task(const RunConfig& config, const World& world);

}  // namespace lockstep
