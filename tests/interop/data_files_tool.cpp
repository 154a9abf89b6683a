// What the data room reads from files, for data_files_test.py.
//   data_files_tool copy IN OUT                 IN is .safetensors, .npy, .npz or .pt; metadata is
//   kept data_files_tool dataset NAME DATA_DIR SEED OUT.safetensors
//     OUT gets data, targets, test_data and test_targets.
#include <ATen/core/Tensor.h>

#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/pt_file.h"
#include "lockstep/data/safetensors.h"

namespace lockstep {
namespace {

SafetensorsFile read(const std::filesystem::path& path) {
  if (path.extension() == ".npy") return {{{"array", load_npy(path)}}, {}};
  if (path.extension() == ".npz") return {load_npz(path), {}};
  if (path.extension() == ".pt") return {load_pt(path).tensors, {}};
  return load_safetensors(path);
}

void copy(const std::string& in, const std::string& out) {
  const SafetensorsFile file = read(in);
  if (out.ends_with(".pt")) return save_pt(out, file.tensors);
  save_safetensors(out, file.tensors, file.metadata);
}

void write_dataset(const std::string& name, const std::string& data_dir, const std::string& seed,
                   const std::string& out) {
  const DatasetSplits splits =
      load_dataset(name, {.data_dir = data_dir, .data_seed = std::stoull(seed)});
  save_safetensors(out, {{"data", splits.train.data},
                         {"targets", splits.train.targets},
                         {"test_data", splits.test.data},
                         {"test_targets", splits.test.targets}});
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 3 && args[0] == "copy") {
      lockstep::copy(args[1], args[2]);
    } else if (args.size() == 5 && args[0] == "dataset") {
      lockstep::write_dataset(args[1], args[2], args[3], args[4]);
    } else {
      throw lockstep::UsageError("usage: data_files_tool copy IN OUT | dataset NAME DIR SEED OUT");
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return lockstep::exit_code_of(error);
  }
  return 0;
}
