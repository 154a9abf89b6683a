#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "lockstep/train/callback.h"

namespace lockstep {

/// Writes metrics as JSON lines, each a whole line at once. Add it on rank 0 alone.
/// - a row for every log, and for the rest of each epoch (split "train": the steps since the
///   previous row or since the resume),
/// - a row for every evaluation (split "test").
///
/// Keys: step, epoch (from 1, as it is shown), split, loss, accuracy (null for regression), lr,
/// samples_per_s, seconds, and the other metrics of the module (Metrics::values) by name. Seconds
/// are counted from the start of training in the process that wrote the row, or from when its ranks
/// last met again. A number that is not
/// finite is written as null. Where checkpoints were saved since the last row, `save_seconds` is
/// for how long they held up training.
class MetricsFile : public Callback {
 public:
  explicit MetricsFile(std::filesystem::path path);
  ~MetricsFile() override;

  /// Opens the file. If training resumes from a checkpoint, the rows up to it stay. Else the file
  /// is emptied, with a warning if it held rows. While this object lives, no other MetricsFile can
  /// open the file. Throws SystemError naming the file, and Error when another process writes to
  /// it. A device, a pipe or /dev/stdout is only written to.
  void on_start(Trainer& trainer) override;
  void on_log(Trainer& trainer, const LogResult& result) override;
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;

  /// on_start of a run that goes on after `step` steps and `epochs` whole epochs.
  void open_at(int64_t step, int64_t epochs);

 private:
  class File;
  std::unique_ptr<File> file_;
};

/// Throws Error when a MetricsFile of this name could not be written. Changes nothing.
void check_metrics_file(const std::filesystem::path& path);

}  // namespace lockstep
