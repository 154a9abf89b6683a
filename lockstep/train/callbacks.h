#pragma once

#include <filesystem>
#include <functional>
#include <limits>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/train/callback.h"

namespace lockstep {

/// Saves checkpoints: every `every_n_steps` steps (0: never within an epoch), after each epoch, and
/// when a signal ends the run. Add it on every rank, after the callbacks whose values it is to
/// keep.
class Checkpointer : public Callback {
 public:
  /// Called with the checkpoint that was saved because a signal ends the run.
  using OnInterruptSaved = std::function<void(const std::filesystem::path& latest)>;
  /// By default training goes on while a checkpoint is written.
  Checkpointer(CheckpointFolder folder, int64_t every_n_steps, OnInterruptSaved saved = {},
               CheckpointOverlap overlap = CheckpointOverlap::wait)
      : folder_(std::move(folder)),
        every_n_steps_(every_n_steps),
        saved_(std::move(saved)),
        overlap_(overlap) {}
  /// Sets the folder's checkpoints of later steps aside where training goes on from an earlier one.
  void on_start(Trainer& trainer) override;
  void on_step(Trainer& trainer, const StepResult& result) override;
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;
  void on_interrupt(Trainer& trainer, int signal_number) override;

 private:
  CheckpointFolder folder_;
  int64_t every_n_steps_;
  OnInterruptSaved saved_;
  CheckpointOverlap overlap_;
};

/// Prints a line every `log_every_n_steps` steps and after each epoch, with all metrics. Rank 0
/// prints; the others may have it too. A Trainer by itself prints nothing.
class PrintProgress : public Callback {
 public:
  /// Gets each line, without its newline.
  using Print = std::function<void(const std::string& line)>;
  /// Without `print` lines go to standard output.
  explicit PrintProgress(Print print = {});
  void on_log(Trainer& trainer, const LogResult& result) override;
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;
  void on_interrupt(Trainer& trainer, int signal_number) override;

 private:
  Print print_;
};

/// Ends the run when the test loss has not become lower for `patience` epochs. A loss that is NaN
/// is not lower. Add it on every rank.
class EarlyStop : public Callback {
 public:
  explicit EarlyStop(int64_t patience) : patience_(patience) {}
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override { observe(result.test); }
  bool wants_to_stop() const override { return waited_ >= patience_; }
  std::map<std::string, double> values() const override;
  void load_values(const std::map<std::string, double>& values) override;

  void observe(const Metrics& test);

 private:
  int64_t patience_;
  int64_t waited_ = 0;
  double best_ = std::numeric_limits<double>::infinity();
};

/// Writes the weights of the epoch with the lowest test loss to a safetensors file, on rank 0. Add
/// it on every rank, so that a checkpoint keeps what the best was.
class BestModel : public Callback {
 public:
  /// Throws UsageError for a name whose extension is of another format.
  explicit BestModel(std::filesystem::path path);
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;
  std::map<std::string, double> values() const override { return {{"best_model.loss", best_}}; }
  void load_values(const std::map<std::string, double>& values) override;

 private:
  std::filesystem::path path_;
  double best_ = std::numeric_limits<double>::infinity();
};

}  // namespace lockstep
