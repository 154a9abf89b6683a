#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <variant>

#include "lockstep/data/safetensors.h"

namespace lockstep {

/// What torch.save has written: a tree of dicts and lists, flat. A name is the way to the value,
/// joined by dots: "optimizer.state.0.exp_avg".
struct PtFile {
  using Value = std::variant<std::monostate, bool, int64_t, double, std::string>;

  StateDict tensors;                    ///< In the order of the file.
  std::map<std::string, Value> values;  ///< What is no tensor. std::monostate is None.
};

/// Reads a .pt file: what torch.save in Python writes (since PyTorch 1.6: a zip archive with a
/// pickle of protocol 2 to 5), LibTorch's torch::save of a module, and save_pt. Tensors are on the
/// CPU and have their bits, shapes and strides. Those that share a storage in Python share it here.
///
/// No code of the file is run. A class is known by its attributes only: of a module that was saved
/// whole its parameters and buffers get the names that they have in its state_dict. Throws
/// DataError for a file that is damaged or of another format, for tensors that are not dense, and
/// for more than 20 million values. Throws SystemError when the file cannot be opened or read.
PtFile load_pt(const std::filesystem::path& path);

/// Writes a state_dict that Python's `torch.load(path, weights_only=True)` reads, through an
/// AtomicFile. Tensors may be on any device and of any strides. It takes the memory of one more
/// copy. Throws SystemError (a full disk, a read-only folder) and leaves nothing behind.
void save_pt(const std::filesystem::path& path, const StateDict& tensors);

}  // namespace lockstep
