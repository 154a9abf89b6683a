#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/data/safetensors.h"

namespace lockstep {

/// Where training goes on, and what the checkpoint belongs to.
struct CheckpointInfo {
  int64_t step = 0;     ///< Optimizer steps done.
  int64_t epoch = 0;    ///< The epoch in which training goes on, from 0.
  int64_t batches = 0;  ///< Batches of that epoch that each rank has already used.
  /// Samples of that epoch that all ranks together have used, of the order that all ranks share.
  /// With them a run of another number of ranks goes on. -1: not known.
  int64_t samples = -1;
  int ranks = 1;  ///< How many have written it; filled in when it is.
  /// What must be the same in the run that resumes: model, world_size, batch_size, ... Compared as
  /// text by `check_identity`.
  std::map<std::string, std::string> identity;
  /// What a resumed run may change, although training then differs: lr, schedule, ... See
  /// `changed_settings`.
  std::map<std::string, std::string> settings;
  std::string libtorch;  ///< The version that wrote it; filled in when it is written.
  /// Numbers that callbacks keep ("early_stop.best"). Numbers that are not finite are not stored.
  std::map<std::string, double> values;
};

/// One state of a training run.
struct Checkpoint {
  CheckpointInfo info;
  StateDict model;  ///< By the names of Python's state_dict.
  StateDict state;  ///< "optimizer.*" and, per rank, "rank0.*".
};

/// What finds damage of a checkpoint's files.
enum class CheckpointHash {
  xxh3,    ///< Of 128 bits, as `xxh128sum` prints it. As fast as memory.
  sha256,  ///< For hashes that are kept elsewhere: nobody can make other files that have them.
};
/// "xxh3", "sha256". Throws UsageError.
CheckpointHash checkpoint_hash(const std::string& name);

/// A checkpoint whose files are missing, cut short or altered.
class DamagedCheckpointError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// The version of the layout that is written. It and the one before it are read.
inline constexpr int kCheckpointVersion = 4;

/// Reads a whole checkpoint, after comparing sizes and hashes. Throws DamagedCheckpointError naming
/// the file and what is wrong with it, and CheckpointError for another version of the layout,
/// naming both. Another version of LibTorch only causes a warning: it reads the same files, but may
/// round differently.
Checkpoint read_checkpoint(const std::filesystem::path& folder);

/// Throws CheckpointError naming every key whose value differs, with both values. Keys that only
/// one side has count as different.
void check_identity(const std::filesystem::path& folder,
                    const std::map<std::string, std::string>& found,
                    const std::map<std::string, std::string>& expected);

/// "lr '0.1' in the checkpoint, '0.01' in this run; ..." for every key whose value differs; empty
/// when none does. Keys that only one side has are passed over.
std::string changed_settings(const std::map<std::string, std::string>& found,
                             const std::map<std::string, std::string>& expected);

}  // namespace lockstep
