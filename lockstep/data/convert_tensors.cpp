#include "lockstep/data/tensor_reader.h"

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/data/stored_tensors.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kLargestFile = 5'000'000'000;  // Hugging Face's default

/// On failure no file of it stays.
void write_folder(const TensorReader& source, const fs::path& folder, int64_t shards) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (failure) throw SystemError("cannot make folder " + folder.string(), failure.value());
  if (!fs::is_empty(folder))
    throw UsageError("folder " + folder.string() + " is not empty", "name a new folder");
  try {
    if (shards > 0) {
      detail::write_safetensors_shards(folder, source, shards);
    } else {
      detail::write_safetensors_folder(folder, source, kLargestFile);
    }
  } catch (...) {
    for (const auto& entry : fs::directory_iterator(folder, failure))
      fs::remove(entry.path(), failure);
    throw;
  }
}

}  // namespace

std::vector<std::string> tensor_formats() {
  return {"safetensors", "pt", "hf"};
}

std::string format_of_name(const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension == ".safetensors") return "safetensors";
  return extension == ".pt" || extension == ".pth" || extension == ".bin" ? "pt" : "";
}

void convert_tensors(const TensorReader& source, const fs::path& target, const std::string& format,
                     int64_t shards) {
  expect_one_of("format", format, tensor_formats());
  const auto& tensors = source.tensors();
  if (tensors.empty())
    throw DataError("there is no tensor to write into " + target.string(),
                    "lockstep checkpoint inspect SOURCE --json lists what is there");
  if (format == "hf") {
    write_folder(source, target, shards);
  } else if (format == "safetensors") {
    std::vector<TensorShard> shards;
    for (const TensorInfo& tensor : tensors) shards.push_back(detail::described(tensor));
    detail::write_safetensors(target, shards, {{"format", "pt"}},
                              [&](const TensorShard& shard) { return source.read(shard.name); });
  } else {
    StateDict all;
    for (const TensorInfo& tensor : tensors)
      all.emplace_back(tensor.name, source.read(tensor.name));
    save_pt(target, all);
  }
}

}  // namespace lockstep
