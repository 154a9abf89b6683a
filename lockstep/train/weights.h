#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/stored_checkpoint.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/parallel/state_dict.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Throws DataError when there is nothing of that name.
void check_weights_exist(const std::filesystem::path& path);

/// Which weights are loaded, and under which names. In a pattern `*` stands for any text.
struct WeightsSelection {
  /// Patterns of the model's names. What none of them matches keeps its values, and what else the
  /// file has is left aside. Empty: all of the model, and nothing else in the file.
  std::vector<std::string> only = {};
  /// "OLD=NEW" of names as `lockstep checkpoint inspect` shows them. Each side has one `*`
  /// ("encoder.*=backbone.*"), or neither has one. The first that matches a name counts.
  std::vector<std::string> rename = {};
  /// The output layer, which has the model's last parameters, keeps its values where the file has
  /// it for another number of classes (first dimension). All else must fit.
  bool new_head = false;
};

/// Reads weights into a model. `path` is one of these:
/// - a checkpoint (`step-*`), whose hashes are checked,
/// - a folder of checkpoints, of which the newest whole one is read,
/// - a folder with model.safetensors,
/// - what else TensorReader takes: a safetensors or .pt file, or a folder that Hugging Face's
///   libraries or torch.distributed.checkpoint have written. Only the model's tensors are read.
///
/// What wrappers and checkpoints in Python leave behind is taken away, after renaming: the prefixes
/// "module.", "state_dict.", "model.", "model_state_dict.", "MODEL_STATE." and the like;
/// "_orig_mod." and "_checkpoint_wrapped_module." anywhere. So is another prefix, which is logged,
/// where it is the only one with all of the model's names. Beside a model without a prefix,
/// "optimizer.*" and other parts of a training's state are left aside. Where a file has batch
/// norm's statistics without num_batches_tracked, as before PyTorch 0.4.1, that keeps its value.
///
/// Throws DataError for what cannot be read. Throws CheckpointError that lists all names and shapes
/// that do not fit, and UsageError for a pattern that matches nothing. Then the model is as before.
/// Returns the names of the model's other tensors that keep their values.
std::vector<std::string> load_weights(torch::nn::Module& module, const std::filesystem::path& path,
                                      const WeightsSelection& selection = {});

/// Freezes the parameters whose names match one of the patterns (`*` is any text): they need no
/// gradient any more. So they are averaged over no ranks, and no optimizer changes them or has a
/// state of them. Buffers, such as the statistics of a batch norm, still change. Returns their
/// number of elements. Throws UsageError, before it changes anything, for a pattern that matches no
/// parameter, with those that may be meant, and where no parameter would be left to train.
int64_t freeze_parameters(torch::nn::Module& module, const std::vector<std::string>& patterns);

/// Throws UsageError, which begins with `what`, for the name of a file to be written that says
/// another format than safetensors or .pt ("model.onnx"). A name without an extension says none.
void check_weights_name(const std::string& what, const std::filesystem::path& path);

/// Writes tensors, as a Strategy's model_state gives them, as Python's safetensors.torch would, or
/// as torch.save where the name ends with .pt, .pth or .bin: then without the metadata.
void save_weights(const StateDict& tensors, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata = {});
/// Writes a model's state_dict as safetensors.
void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata = {});

/// The state of an optimizer that Python has saved, for Optimizer::load_state or
/// Trainer::load_optimizer: `optimizer.state_dict()`, alone or within a dict that has other things
/// too, in any file or folder that TensorReader takes. Parameters are told by their names where the
/// file has them, else by their order in `module`, which must be that of Python's: of all, or of
/// those alone that need a gradient, if Python's optimizer had so many. What it was is logged.
///
/// Only the state is taken: learning rate, momentum and the like are options here. A warning names
/// each of `settings`, by Python's names of them ("lr"), that the file has otherwise.
///
/// A checkpoint of Lockstep, or a folder of them, is taken too, without a warning of settings.
///
/// Throws DataError for a file without an optimizer's state, or with several, or with groups of
/// parameters without names. Throws CheckpointError for a parameter that `module` does not have,
/// and for another number of parameters without names.
StateDict load_python_optimizer(const std::filesystem::path& path, const torch::nn::Module& module,
                                const std::map<std::string, double>& settings = {});

namespace detail {

/// Whether a prefix ("module.", "state_dict.model.") is what Python's wrappers and checkpoints put
/// before a model's names.
bool is_wrapper(const std::string& prefix);
/// A name without what torch.compile and wrappers of single layers put into its middle.
std::string without_layer_wrappers(std::string name);

/// The checkpoint that a folder is, or the newest whole one in it; none for any other path.
std::optional<StoredCheckpoint> checkpoint_at(const std::filesystem::path& path);

}  // namespace detail

}  // namespace lockstep
