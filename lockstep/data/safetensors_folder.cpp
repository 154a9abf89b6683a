// Folders of safetensors files: Hugging Face's, and those of torch.distributed.checkpoint's
// HuggingFaceStorageWriter.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/stored_tensors.h"

namespace lockstep::detail {
namespace fs = std::filesystem;
namespace {

constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";
constexpr const char* kSavedOffsets = "saved_offsets";
constexpr size_t kMostOfIndex = size_t{256} << 20;

nlohmann::json parse_object(const std::string& text, const std::string& what) {
  nlohmann::json parsed = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) throw DataError(what + " is no JSON object: the file is damaged");
  return parsed;
}

/// weight_map: the file of each tensor. Empty where there is no index.
std::map<std::string, std::string> read_weight_map(const fs::path& folder) {
  const fs::path path = folder / kIndexFile;
  std::map<std::string, std::string> files;
  if (!fs::exists(path)) return files;
  const nlohmann::json index = parse_object(read_file(path, kMostOfIndex), path.string());
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object())
    throw DataError(path.string() + " has no object 'weight_map'");
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string()) throw DataError(path.string() + " names no file for '" + name + "'");
    files[name] = file.get<std::string>();
  }
  return files;
}

/// Moves each tensor to its place in the whole one. False where the file does not tell it.
bool place_shards(StoredTensors& file, const fs::path& path) {
  const auto found = file.metadata.find(kShardingInfo);
  if (found == file.metadata.end()) return false;
  const std::string what = path.string() + ": " + kShardingInfo;
  const nlohmann::json info = parse_object(found->second, what);
  for (auto& [name, shards] : file.shards) {
    const auto entry = info.find(name);
    const bool is_there = entry != info.end() && entry->is_object() &&
                          entry->contains(kSavedOffsets) && (*entry)[kSavedOffsets].is_array();
    const nlohmann::json offsets = is_there ? (*entry)[kSavedOffsets] : nlohmann::json();
    TensorShard& shard = shards.front();
    bool fits = is_there && offsets.size() == shard.sizes.size();
    for (size_t d = 0; fits && d < offsets.size(); ++d) {
      fits = offsets[d].is_number_unsigned() &&
             !__builtin_add_overflow(offsets[d].get<uint64_t>(),
                                     static_cast<uint64_t>(shard.sizes[d]), &shard.sizes[d]);
      if (fits) shard.offsets[d] = offsets[d].get<int64_t>();
    }
    if (!fits) throw DataError(what + " has no offsets for '" + name + "'");
  }
  return true;
}

void add_file(StoredTensors& all, StoredTensors file, const fs::path& path) {
  const bool is_sharded = place_shards(file, path);
  for (auto& [name, shards] : file.shards) {
    std::vector<TensorShard>& known = all.shards[name];
    TensorShard& shard = shards.front();
    if (!known.empty() && (!is_sharded || known[0].values.dtype() != shard.values.dtype() ||
                           known[0].sizes.size() != shard.sizes.size()))
      throw DataError(path.string() + ": tensor '" + name +
                          "' is in another file of the folder too, and they are not its shards",
                      "keep the files of one model in a folder");
    known.push_back(std::move(shard));
  }
  file.metadata.erase(kShardingInfo);
  for (const auto& [key, value] : file.metadata) all.metadata[key] = value;
}

/// The smallest that has room for the shards.
TensorInfo whole_of(const std::vector<TensorShard>& shards) {
  TensorInfo whole{shards[0].name, shards[0].values.scalar_type(), shards[0].sizes};
  for (const TensorShard& shard : shards) {
    for (size_t d = 0; d < whole.shape.size(); ++d)
      whole.shape[d] = std::max(whole.shape[d], shard.sizes[d]);
  }
  return whole;
}

std::vector<fs::path> safetensors_files(const fs::path& folder, bool weights_only) {
  // Those of our own checkpoints: see docs/checkpoints.md.
  const bool leaves_state = weights_only && fs::exists(folder / "state.json");
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const bool is_state = entry.path().filename().string().starts_with("state");
    if (entry.path().extension() == ".safetensors" && entry.is_regular_file() &&
        !(leaves_state && is_state))
      files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void check_weight_map(const std::map<std::string, std::string>& weight_map,
                      const StoredTensors& stored, const fs::path& folder) {
  for (const auto& [name, file] : weight_map) {
    if (!stored.shards.contains(name))
      throw DataError((folder / kIndexFile).string() + " names tensor '" + name + "' of " + file +
                          ", which no file of the folder has",
                      "a file is missing: copy or download the folder again");
  }
}

/// Writes a file of boxes of the source's tensors.
void write_boxes(const fs::path& path, const TensorReader& source,
                 const std::vector<TensorShard>& shards) {
  write_safetensors(path, shards, sharding_metadata(shards), [&](const TensorShard& shard) {
    return source.read(shard.name, shard.offsets, shard.values.sizes());
  });
}

}  // namespace

std::string numbered_file(const std::string& start, size_t number, size_t count) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.safetensors", number, count);
  return start + numbers;
}

std::map<std::string, std::string> sharding_metadata(const std::vector<TensorShard>& shards) {
  nlohmann::ordered_json info = nlohmann::ordered_json::object();
  for (const TensorShard& shard : shards) info[shard.name] = {{kSavedOffsets, shard.offsets}};
  return {{kShardingInfo, info.dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

std::string index_text(const std::map<std::string, std::string>& files, uint64_t bytes) {
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                        {"weight_map", files}};
  return index.dump(2) + "\n";
}

StoredTensors index_safetensors_files(const std::vector<fs::path>& files, const fs::path& folder) {
  StoredTensors stored;
  stored.format = "hf";
  for (const fs::path& path : files) add_file(stored, index_safetensors(path), path);
  for (auto& [name, shards] : stored.shards) {
    stored.tensors.push_back(whole_of(shards));
    check_shards_cover(stored.tensors.back(), shards, folder.string());
  }
  return stored;
}

StoredTensors index_safetensors_folder(const fs::path& folder, bool weights_only) {
  const std::map<std::string, std::string> weight_map = read_weight_map(folder);
  std::set<std::string> named;
  for (const auto& [name, file] : weight_map) named.insert(file);
  std::vector<fs::path> files = safetensors_files(folder, weights_only);
  // Beside its files a folder may hold the same weights in another layout.
  std::erase_if(files, [&](const fs::path& path) {
    return !named.empty() && !named.contains(path.filename().string()) &&
           !index_safetensors(path).metadata.contains(kShardingInfo);
  });
  if (files.empty())
    throw DataError(
        "folder " + folder.string() +
            " holds no weights: neither safetensors files, nor .metadata, nor a checkpoint",
        "give a safetensors or .pt file, or the --checkpoint-dir of a run");
  StoredTensors stored = index_safetensors_files(files, folder);
  check_weight_map(weight_map, stored, folder);
  return stored;
}

void write_safetensors_folder(const fs::path& folder, const TensorReader& source,
                              uint64_t largest_file) {
  std::vector<std::vector<TensorShard>> files(1);
  uint64_t total = 0;
  uint64_t in_file = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    TensorShard shard = described(tensor);
    const uint64_t bytes = shard.values.nbytes();
    if (in_file > 0 && in_file + bytes > largest_file) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().push_back(std::move(shard));
    in_file += bytes;
    total += bytes;
  }
  std::map<std::string, std::string> file_of;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = numbered_file("model", i + 1, files.size());
    for (const TensorShard& shard : files[i]) file_of[shard.name] = name;
    write_boxes(folder / name, source, files[i]);
  }
  write_file_atomically(folder / kIndexFile, index_text(file_of, total));
}

void write_safetensors_shards(const fs::path& folder, const TensorReader& source, int64_t shards) {
  int64_t most_rows = 1;
  for (const TensorInfo& tensor : source.tensors())
    most_rows = std::max(most_rows, tensor.shape.empty() ? 0 : tensor.shape[0]);
  shards = std::min(shards, most_rows);  // More would be empty.
  for (int64_t i = 0; i < shards; ++i) {
    std::vector<TensorShard> of_file;
    for (const TensorInfo& tensor : source.tensors()) {
      TensorShard shard = described(tensor);
      const int64_t rows = tensor.shape.empty() ? 0 : tensor.shape[0];
      const int64_t begin = rows * i / shards, end = rows * (i + 1) / shards;
      if (rows == 0 ? i > 0 : begin == end) continue;
      if (rows > 0) {
        shard.offsets[0] = begin;
        shard.values = shard.values.narrow(0, begin, end - begin);
      }
      of_file.push_back(std::move(shard));
    }
    write_boxes(
        folder / numbered_file("model", static_cast<size_t>(i + 1), static_cast<size_t>(shards)),
        source, of_file);
  }
}

}  // namespace lockstep::detail
