#include "lockstep/checkpoint/stored_checkpoint.h"

#include <ATen/Functions.h>
#include <sys/mman.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "lockstep/base/file_writer.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/sharded_save.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/stored_tensors.h"

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CheckpointInfo, step, epoch, batches, samples, ranks, identity,
                                   settings, libtorch, values)

namespace {

constexpr char kFormat[] = "lockstep-checkpoint";
constexpr char kInfoFile[] = "state.json";
constexpr const char* kHashNames[] = {"xxh3", "sha256"};  ///< By their CheckpointHash.
constexpr size_t kMostOfInfo = size_t{1} << 30;

[[noreturn]] void damaged(const fs::path& folder, const std::string& what) {
  throw DamagedCheckpointError("checkpoint " + folder.string() + " is damaged: " + what,
                               "take an older one; training begins anew with --resume none");
}

/// The hash of everything in state.json but the hash itself. nlohmann's objects are ordered by key,
/// so that the text is the same when it is written again.
std::string checksum_of(json document) {
  document.erase("checksum");
  return sha256_hex(document.dump());
}

std::string read_info_file(const fs::path& folder) {
  const fs::path path = folder / kInfoFile;
  if (!fs::exists(path)) damaged(folder, std::string(kInfoFile) + " is missing");
  try {
    return read_file(path, kMostOfInfo);
  } catch (const DataError& error) {
    damaged(folder, error.what());
  }
}

json read_document(const fs::path& folder) {
  const std::string text = read_info_file(folder);
  json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object() || document.value("format", json()) != kFormat) {
    damaged(folder, std::string(kInfoFile) + " is not the description of a Lockstep checkpoint");
  }
  if (document.value("checksum", json()) != checksum_of(document)) {
    damaged(folder, std::string(kInfoFile) + " does not match its own checksum");
  }
  const json version = document.value("version", json());
  if (version != kCheckpointVersion && version != kCheckpointVersion - 1) {
    throw CheckpointError("checkpoint " + folder.string() + " has version " + version.dump() +
                              " of the layout; this Lockstep reads versions " +
                              std::to_string(kCheckpointVersion - 1) + " and " +
                              std::to_string(kCheckpointVersion),
                          "read it with the Lockstep that wrote it");
  }
  // Each byte counts, also those that say nothing.
  if (text != document.dump() + "\n") {
    damaged(folder, std::string(kInfoFile) + " was altered");
  }
  return document;
}

/// Those in the files whose names begin with `start`, as the files say themselves.
std::vector<TensorShard> shards_of(const StoredCheckpoint& checkpoint, const std::string& start) {
  std::vector<fs::path> files;
  for (const StoredFile& file : checkpoint.files) {
    if (file.name.starts_with(start) && file.name.ends_with(".safetensors"))
      files.push_back(checkpoint.folder / file.name);
  }
  std::vector<TensorShard> all;
  for (auto& [name, shards] : detail::index_safetensors_files(files, checkpoint.folder).shards)
    all.insert(all.end(), shards.begin(), shards.end());
  return all;
}

void fill_from(const fs::path& folder, const json& document, StoredCheckpoint& checkpoint) {
  checkpoint.info = detail::info_from(document);
  for (const auto& [name, file] : document.at("files").items()) {
    if (fs::path(name).filename() != name) damaged(folder, name + " is no name of a file");
    const auto kind = file.contains(kHashNames[0]) ? CheckpointHash::xxh3 : CheckpointHash::sha256;
    checkpoint.files.push_back(
        {name, file.at("bytes"), kind, file.at(kHashNames[static_cast<int>(kind)])});
    if (!fs::exists(folder / name)) damaged(folder, name + " is missing");
    const uint64_t bytes = fs::file_size(folder / name), wanted = checkpoint.files.back().bytes;
    if (bytes != wanted)
      damaged(folder, name + " has " + std::to_string(bytes) + " bytes in place of " +
                          std::to_string(wanted));
  }
  checkpoint.model = shards_of(checkpoint, "model");
  checkpoint.state = shards_of(checkpoint, "state");
}

/// Zeros that take no memory where nobody writes to them.
at::Tensor untouched(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  constexpr size_t kWorthAMapping = 1 << 20;
  if (bytes < kWorthAMapping) return at::zeros(sizes, dtype);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw SystemError("no memory for a tensor of a checkpoint", errno);
  return at::from_blob(
      memory, sizes, [bytes](void* mapped) { ::munmap(mapped, bytes); }, dtype);
}

/// A tensor of these shards, of which `boxes` are read; null: all.
at::Tensor read_tensor(std::span<const TensorShard> shards, const std::vector<TensorBox>* boxes,
                       std::atomic<int64_t>* bytes_read) {
  const std::vector<int64_t>& sizes = shards.front().sizes;
  const auto fits = [&](const TensorBox& box) { return detail::is_within(box, sizes); };
  // A count has one element, whatever its parameter's shape is.
  if (!boxes || c10::multiply_integers(sizes) <= 1 ||
      !std::all_of(boxes->begin(), boxes->end(), fits))
    return detail::read_box(shards, {std::vector<int64_t>(sizes.size()), sizes}, {}, bytes_read);
  at::Tensor result = untouched(sizes, shards.front().values.scalar_type());
  for (const TensorBox& box : *boxes)
    detail::read_box(shards, box, part_of(result, box), bytes_read);
  return result;
}

}  // namespace

CheckpointHash checkpoint_hash(const std::string& name) {
  expect_one_of("checkpoint hash", name, {std::begin(kHashNames), std::end(kHashNames)});
  return name == kHashNames[0] ? CheckpointHash::xxh3 : CheckpointHash::sha256;
}

StoredCheckpoint open_checkpoint(const fs::path& folder) {
  const json document = read_document(folder);
  StoredCheckpoint checkpoint;
  checkpoint.folder = folder;
  try {
    fill_from(folder, document, checkpoint);
  } catch (const json::exception& error) {
    damaged(folder, std::string(kInfoFile) + ": " + error.what());
  } catch (const DataError& error) {
    check_files(checkpoint);  // Names the file that was altered.
    damaged(folder, error.what());
  }
  return checkpoint;
}

void check_files(const StoredCheckpoint& checkpoint, int part, int parts) {
  std::vector<const StoredFile*> files;
  for (const StoredFile& file : checkpoint.files) files.push_back(&file);
  std::stable_sort(files.begin(), files.end(),
                   [](const auto* a, const auto* b) { return a->bytes > b->bytes; });
  std::vector<uint64_t> loads(static_cast<size_t>(parts));
  for (const StoredFile* file : files) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += file->bytes;
    if (least - loads.begin() != part) continue;
    const std::string hash =
        content_hash(checkpoint.folder / file->name, detail::algorithm_of(file->kind));
    if (hash == file->hash) continue;
    damaged(checkpoint.folder, file->name + " has the " + kHashNames[static_cast<int>(file->kind)] +
                                   " " + hash + " in place of " + file->hash);
  }
}

StateDict read_tensors(const StoredCheckpoint& checkpoint, const std::vector<TensorShard>& shards,
                       const std::string& prefix, const WantedBoxes& wanted) {
  StateDict result;
  for (auto first = shards.begin(), last = first; first != shards.end(); first = last) {
    last = std::find_if(first, shards.end(),
                        [&](const TensorShard& shard) { return shard.name != first->name; });
    if (!first->name.starts_with(prefix)) continue;
    const std::string name = first->name.substr(prefix.size());
    try {
      result.emplace_back(name, read_tensor({first, last}, wanted ? wanted(name) : nullptr,
                                            checkpoint.bytes_read.get()));
    } catch (const DataError& error) {
      damaged(checkpoint.folder, error.what());
    }
  }
  return result;
}

Checkpoint read_checkpoint(const fs::path& folder) {
  const StoredCheckpoint stored = open_checkpoint(folder);
  check_files(stored);
  detail::warn_of_other_libtorch(stored);
  return detail::whole(stored);
}

Checkpoint detail::whole(const StoredCheckpoint& stored) {
  return {stored.info, read_tensors(stored, stored.model), read_tensors(stored, stored.state)};
}

void detail::warn_of_other_libtorch(const StoredCheckpoint& checkpoint) {
  if (checkpoint.info.libtorch == TORCH_VERSION) return;
  log_warning("checkpoint " + checkpoint.folder.string() + " was written with LibTorch " +
              checkpoint.info.libtorch + "; this is " + TORCH_VERSION);
}

Hasher::Algorithm detail::algorithm_of(CheckpointHash kind) {
  return kind == CheckpointHash::sha256 ? Hasher::Algorithm::sha256 : Hasher::Algorithm::xxh128;
}

json detail::to_json(const CheckpointInfo& info) {
  json object = info;
  for (const auto& [name, value] : info.values) {
    if (!std::isfinite(value)) object["values"].erase(name);
  }
  return object;
}

CheckpointInfo detail::info_from(const json& object) {
  CheckpointInfo info = object;
  info.ranks = std::max(1, info.ranks);
  return info;
}

void detail::write_description(const StoredCheckpoint& checkpoint) {
  json document = to_json(checkpoint.info);
  json files = json::object();
  for (const StoredFile& file : checkpoint.files) {
    files[file.name] = {{"bytes", file.bytes},
                        {kHashNames[static_cast<int>(file.kind)], file.hash}};
  }
  document["format"] = kFormat;
  document["version"] = kCheckpointVersion;
  document["libtorch"] = TORCH_VERSION;
  document["files"] = std::move(files);
  document["checksum"] = checksum_of(document);
  FileWriter file(checkpoint.folder / kInfoFile);
  file.write(document.dump() + "\n");
  file.finish();
  fsync_path(checkpoint.folder);
}

}  // namespace lockstep
