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
  explicit MetricsFile(std::filesystem::path path) : path_(std::move(path)) {}

  /// Opens the file. When training goes on from a checkpoint, the rows up to there stay. Else the
  /// file is emptied, with a warning where it held rows. While this lives, no other process can
  /// open the file so. Throws SystemError naming the file, and Error when another process writes to
  /// it. A device, a pipe or /dev/stdout is only written to.
  void on_start(Trainer& trainer) override;
  /// The same for training that goes on after `step` steps and `epochs` whole epochs.
  void open_at(int64_t step, int64_t epochs);
  void on_log(Trainer& trainer, const LogResult& result) override;
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;

 private:
  void open();
  void lock();
  void write(const nlohmann::ordered_json& row);
  std::filesystem::path path_;
  UniqueFd fd_;
};

/// Throws Error when a MetricsFile of this name could not be written. Changes nothing.
void check_metrics_file(const std::filesystem::path& path);

}  // namespace lockstep
