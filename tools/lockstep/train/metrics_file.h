#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "lockstep/base/file.h"
#include "lockstep/train/callback.h"

namespace lockstep {

/// Writes metrics as JSON lines, each a whole line at once, for rank 0:
/// - a row for every log and for the rest of each epoch (split "train": the steps since the row
///   before it or the resumption),
/// - a row for every evaluation (split "test").
///
/// Keys: step, epoch (from 1, as it is shown), split, loss, accuracy (null for regression), lr,
/// samples_per_s, and seconds. Seconds count since training began in the process that wrote the
/// row. A loss that is not finite is null.
class MetricsFile : public Callback {
 public:
  /// Opens the file: empties it, or, when training goes on from a checkpoint of `step` after
  /// `epochs` whole epochs, keeps the rows up to there. Throws SystemError naming the file.
  MetricsFile(const std::filesystem::path& path, bool resumed, int64_t step, int64_t epochs);

  void on_log(Trainer& trainer, const LogResult& result) override;
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;

 private:
  void write(const nlohmann::ordered_json& row);
  std::filesystem::path path_;
  UniqueFd fd_;
};

}  // namespace lockstep
