#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "lockstep/base/state_dict.h"
#include "lockstep/models/models.h"

namespace lockstep {

/// Whether a model's name is that of a file: it has a slash, or ends in .pt, .pth or .ts.
bool names_script_file(const std::string& name);
/// Throws UsageError where there is no such file.
void expect_script_file(const std::string& path);

/// A module that Python wrote with torch.jit.script(...).save(path) or torch.jit.trace, to be
/// trained with the values that it has. Its parameters and buffers have the names of its
/// state_dict. forward takes one tensor and gives one. Training and evaluation mode reach the
/// script. Throws UsageError for a file that is missing, that is no TorchScript or that has nothing
/// to train, and for a forward of another form.
std::shared_ptr<Model> load_script_model(const std::string& path);

/// Writes a model of load_script_model as TorchScript again, with the tensors of `state`, which has
/// all names of its state_dict, in place of its own. Tied names stay tied. It is written for the
/// CPU and in evaluation mode. The model stays as it is. Throws UsageError for any other model, and
/// SystemError.
void save_script_model(const Model& model, const StateDict& state,
                       const std::filesystem::path& path);

}  // namespace lockstep
