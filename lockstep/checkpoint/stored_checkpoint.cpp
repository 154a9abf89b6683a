#include "lockstep/checkpoint/stored_checkpoint.h"

#include <ATen/Functions.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/file_writer.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/sharded_save.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/stored_tensors.h"

#include <torch/version.h>

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

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return static_cast<int64_t>(c10::multiply_integers(sizes));
}

/// Those in the files whose names begin with `start`, as the files say themselves.
std::vector<StoredTensor> tensors_of(const StoredCheckpoint& checkpoint, const std::string& start) {
  std::vector<fs::path> files;
  for (const StoredFile& file : checkpoint.files) {
    if (file.name.starts_with(start) && file.name.ends_with(".safetensors"))
      files.push_back(checkpoint.folder / file.name);
  }
  std::vector<StoredTensor> tensors;
  for (const auto& found : detail::index_safetensors_files(files, checkpoint.folder).tensors) {
    tensors.push_back({found.name, found.dtype, found.shape, {}});
    for (const auto& chunk : found.chunks) {
      tensors.back().parts.push_back({{chunk.offsets, chunk.sizes},
                                      chunk.bytes->path.filename(),
                                      chunk.bytes->where.begin});
    }
  }
  return tensors;
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
  checkpoint.model = tensors_of(checkpoint, "model");
  checkpoint.state = tensors_of(checkpoint, "state");
}

/// Zeros that take no memory where nobody writes to them.
at::Tensor untouched(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const size_t bytes = static_cast<size_t>(numel_of(sizes)) * c10::elementSize(dtype);
  constexpr size_t kWorthAMapping = 1 << 20;
  if (bytes < kWorthAMapping) return at::zeros(sizes, dtype);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw SystemError("no memory for a tensor of a checkpoint", errno);
  return at::from_blob(
      memory, sizes, [bytes](void* mapped) { ::munmap(mapped, bytes); }, dtype);
}

at::Tensor slice(at::Tensor tensor, const std::vector<int64_t>& offsets,
                 const std::vector<int64_t>& sizes) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    tensor = tensor.narrow(static_cast<int64_t>(d), offsets[d], sizes[d]);
  }
  return tensor;
}

/// `wanted` lies in the part's box. Both are of the whole tensor.
at::Tensor read_part(const StoredCheckpoint& checkpoint, const StoredPart& part,
                     const detail::Box& wanted, const StoredTensor& tensor) {
  const uint64_t bytes =
      static_cast<uint64_t>(numel_of(part.box.sizes)) * c10::elementSize(tensor.dtype);
  const ContentOptions where{
      .packing = ContentOptions::Packing::plain, .begin = part.begin, .size = bytes};
  const detail::StoredChunk chunk{part.box.offsets, part.box.sizes,
                                  detail::contiguous_strides(part.box.sizes), 0,
                                  std::make_shared<const detail::StoredBytes>(detail::StoredBytes{
                                      checkpoint.folder / part.file, where, bytes})};
  try {
    const at::Tensor values =
        detail::read_part({tensor.name, tensor.dtype, tensor.sizes}, chunk, wanted);
    *checkpoint.bytes_read += static_cast<int64_t>(values.storage().nbytes());
    return values;
  } catch (const DataError& error) {
    damaged(checkpoint.folder, error.what());
  }
}

void read_box(const StoredCheckpoint& checkpoint, const StoredTensor& tensor, const TensorBox& box,
              at::Tensor& into) {
  for (const StoredPart& part : tensor.parts) {
    const detail::Box common = detail::intersection({part.box.offsets, part.box.sizes},
                                                    {box.offsets, box.sizes});
    if (common.is_empty()) continue;
    at::Tensor values;
    if (part.file.empty()) {
      std::vector<int64_t> within = common.offsets;
      for (size_t d = 0; d < within.size(); ++d) within[d] -= part.box.offsets[d];
      values = slice(part.values, within, common.sizes);
    } else {
      values = read_part(checkpoint, part, common, tensor);
    }
    if (values.sizes().equals(into.sizes()) && !part.file.empty()) {
      into = values.contiguous();
    } else {
      slice(into, common.offsets, common.sizes).copy_(values);
    }
  }
}

at::Tensor read_tensor(const StoredCheckpoint& checkpoint, const StoredTensor& tensor,
                       const std::vector<TensorBox>* boxes) {
  at::Tensor result = untouched(tensor.sizes, tensor.dtype);
  const auto fits = [&](const TensorBox& box) {
    return detail::is_within(box.offsets, box.sizes, tensor.sizes);
  };
  // A count has one element, whatever its parameter's shape is.
  if (!boxes || result.numel() <= 1 || !std::all_of(boxes->begin(), boxes->end(), fits)) {
    const TensorBox all{std::vector<int64_t>(tensor.sizes.size()), tensor.sizes};
    read_box(checkpoint, tensor, all, result);
  } else {
    for (const TensorBox& box : *boxes) read_box(checkpoint, tensor, box, result);
  }
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

StateDict read_tensors(const StoredCheckpoint& checkpoint, const std::vector<StoredTensor>& tensors,
                       const std::string& prefix, const WantedBoxes& wanted) {
  StateDict result;
  for (const StoredTensor& tensor : tensors) {
    if (!tensor.name.starts_with(prefix)) continue;
    const std::string name = tensor.name.substr(prefix.size());
    result.emplace_back(name, read_tensor(checkpoint, tensor, wanted ? wanted(name) : nullptr));
  }
  return result;
}

Checkpoint read_checkpoint(const fs::path& folder) {
  const StoredCheckpoint stored = open_checkpoint(folder);
  check_files(stored);
  if (stored.info.libtorch != TORCH_VERSION) {
    log_warning("checkpoint " + folder.string() + " was written with LibTorch " +
                stored.info.libtorch + "; this is " + TORCH_VERSION);
  }
  return {stored.info, read_tensors(stored, stored.model), read_tensors(stored, stored.state)};
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
