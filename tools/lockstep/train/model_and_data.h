#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>

#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/transforms.h"
#include "lockstep/models/models.h"
#include "lockstep/train/model_training.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {

/// DatasetOptions::unpacked of this process: what the thin binary has unpacked while it loaded this
/// library. Filled before a subcommand runs, and only read then.
std::map<std::filesystem::path, std::span<const std::byte>>& unpacked_files();

/// The data set of a run, for its model: a text has windows of as many tokens as the model looks
/// at.
DatasetSources open_data(const RunConfig& config);

/// What makes samples fit for the model. Images are normalised with the mean and deviation of their
/// data set, and with --augment cropped and flipped at random in training.
Compose transforms_for(const RunConfig& config, const ModelInfo& info, const SampleSource& source,
                       bool training);

/// What a TorchScript file is trained on decides how.
LossKind loss_of(const ModelInfo& info, const SampleSource& source);

/// Samples of a batch in an evaluation. For models of small images 256: large enough that the cost
/// of a call does not count, and small enough that a ConvNet's activations stay a few MB. What is
/// large for one sample has the batch of training, which is known to fit in memory.
int64_t evaluation_batch(const RunConfig& config, const ModelInfo& info);

/// Throws UsageError when the model cannot take the data set's samples or tell its classes apart.
void check_model_fits(const ModelInfo& model, const SampleSource& source);

/// What a TorchScript file gives is known from a batch only. A copy of the model gets one of zeros,
/// because a traced one would learn from it. Throws UsageError when the output does not fit. Other
/// models pass.
void check_output_fits(const ModelInfo& info, const DataLoader& loader, const SampleSource& source);

}  // namespace lockstep
