// What the data room reads from files, for data_files_test.py and test_checkpoints.py.
//   data_files_tool copy IN OUT
//     IN is .safetensors, .npy, .npz or .pt. Metadata is kept.
//   data_files_tool source IN OUT.safetensors
//     IN is what a TensorReader takes. Each tensor is read whole and in boxes, which must be alike.
//   data_files_tool corrupt IN FILE ROUNDS SEED
//     Damages FILE of the folder IN (or IN itself: "") and reads, again and again. Prints how often
//     that was refused, gave the same tensors, and gave others.
//   data_files_tool dataset NAME DATA_DIR SEED OUT.safetensors
//     OUT gets data, targets, test_data and test_targets.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/data/tensor_reader.h"
#include "tests/support/damaged.h"

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

using Boxes = std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>;

/// Boxes of about half of each size, which cover the shape.
Boxes boxes_of(const std::vector<int64_t>& shape) {
  Boxes boxes = {{}};
  for (const int64_t size : shape) {
    Boxes next;
    for (const int64_t begin : {int64_t{0}, size / 2}) {
      for (auto box : boxes) {
        box.first.push_back(begin);
        box.second.push_back(begin == 0 ? size / 2 : size - size / 2);
        next.push_back(std::move(box));
      }
    }
    boxes = std::move(next);
  }
  return boxes;
}

at::Tensor read_in_boxes(const TensorReader& source, const TensorInfo& info) {
  at::Tensor whole = at::empty(info.shape, at::dtype(info.dtype));
  for (const auto& [offsets, sizes] : boxes_of(info.shape)) {
    at::Tensor target = whole;
    for (size_t d = 0; d < sizes.size(); ++d)
      target = target.narrow(static_cast<int64_t>(d), offsets[d], sizes[d]);
    target.copy_(source.read(info.name, offsets, sizes));
  }
  return whole;
}

StateDict read_source(const std::filesystem::path& path) {
  const TensorReader source(path);
  StateDict tensors;
  for (const TensorInfo& info : source.tensors())
    tensors.emplace_back(info.name, source.read(info.name));
  return tensors;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

bool same_tensors(const StateDict& a, const StateDict& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && same_bits(x.second, y.second);
  });
}

void copy_source(const std::string& in, const std::string& out) {
  const TensorReader source(in);
  StateDict tensors;
  for (const TensorInfo& info : source.tensors()) {
    tensors.emplace_back(info.name, source.read(info.name));
    if (!same_bits(tensors.back().second, read_in_boxes(source, info)))
      throw Error(info.name + " differs when it is read in boxes");
  }
  if (!source.damage().empty()) throw Error("damaged: " + source.damage()[0].first);
  save_safetensors(out, tensors);
}

void corrupt(const std::filesystem::path& in, const std::string& name, uint64_t rounds,
             uint64_t seed) {
  const TemporaryDirectory folder;
  const std::filesystem::path path = folder.path() / "x";
  std::filesystem::copy(in, path, std::filesystem::copy_options::recursive);
  const std::filesystem::path file = name.empty() ? path : path / name;
  const std::string whole = read_file(file);
  const StateDict expected = read_source(path);
  uint64_t refused = 0;
  uint64_t same = 0;
  for (uint64_t round = 0; round < rounds; ++round) {
    KeyedRandom random(seed, round);
    std::filesystem::remove(file);  // The disk is waited for when a file is cut and written anew.
    std::ofstream(file, std::ios::binary) << damaged(whole, random);
    try {
      same += same_tensors(read_source(path), expected) ? 1 : 0;
    } catch (const DataError&) {
      ++refused;
    }
  }
  std::cout << refused << ' ' << same << ' ' << rounds - refused - same << '\n';
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
    } else if (args.size() == 3 && args[0] == "source") {
      lockstep::copy_source(args[1], args[2]);
    } else if (args.size() == 5 && args[0] == "corrupt") {
      lockstep::corrupt(args[1], args[2], std::stoull(args[3]), std::stoull(args[4]));
    } else if (args.size() == 5 && args[0] == "dataset") {
      lockstep::write_dataset(args[1], args[2], args[3], args[4]);
    } else {
      throw lockstep::UsageError("usage: see data_files_tool.cpp");
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return lockstep::exit_code_of(error);
  }
  return 0;
}
