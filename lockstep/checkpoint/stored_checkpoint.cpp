#include "lockstep/checkpoint/stored_checkpoint.h"

#include <ATen/Functions.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "lockstep/base/file_writer.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/sharded_save.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/dtype_names.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/data/stored_tensors.h"
#include "lockstep/data/tensor_bytes.h"

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
  if (version != kCheckpointVersion) {
    throw CheckpointError("checkpoint " + folder.string() + " has version " + version.dump() +
                              " of the layout; this Lockstep reads version " +
                              std::to_string(kCheckpointVersion),
                          "read it with the Lockstep that wrote it");
  }
  // Each byte counts, also those that say nothing.
  if (text != document.dump() + "\n") {
    damaged(folder, std::string(kInfoFile) + " was altered");
  }
  return document;
}

json tensors_as_json(const std::vector<StoredTensor>& tensors) {
  json list = json::array();
  for (const StoredTensor& tensor : tensors) {
    json parts = json::array();
    for (const StoredPart& part : tensor.parts) {
      parts.push_back({{"file", part.file},
                       {"begin", part.begin},
                       {"offsets", part.box.offsets},
                       {"sizes", part.box.sizes}});
    }
    list.push_back({{"name", tensor.name},
                    {"dtype", name_of_dtype(&DtypeNames::safetensors, tensor.dtype)},
                    {"shape", tensor.sizes},
                    {"parts", std::move(parts)}});
  }
  return list;
}

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return static_cast<int64_t>(c10::multiply_integers(sizes));
}

bool is_in_file(const std::vector<StoredFile>& files, const StoredPart& part,
                at::ScalarType dtype) {
  const auto bytes = static_cast<uint64_t>(numel_of(part.box.sizes)) * c10::elementSize(dtype);
  return std::any_of(files.begin(), files.end(), [&](const StoredFile& file) {
    return file.name == part.file && part.begin <= file.bytes && bytes <= file.bytes - part.begin;
  });
}

StoredTensor tensor_from(const StoredCheckpoint& checkpoint, const json& item) {
  const fs::path& folder = checkpoint.folder;
  StoredTensor tensor;
  tensor.name = item.at("name");
  const auto dtype = dtype_of_name(&DtypeNames::safetensors, item.at("dtype").get<std::string>());
  if (!dtype) damaged(folder, tensor.name + " has the unknown dtype " + item.at("dtype").dump());
  tensor.dtype = *dtype;
  item.at("shape").get_to(tensor.sizes);
  if (!bytes_of_shape(tensor.dtype, tensor.sizes))
    damaged(folder, tensor.name + " has the shape " + item.at("shape").dump());
  int64_t elements = 0;
  for (const json& each : item.at("parts")) {
    StoredPart part{{each.at("offsets"), each.at("sizes")}, each.at("file"), each.at("begin")};
    if (!detail::is_within(part.box.offsets, part.box.sizes, tensor.sizes))
      damaged(folder, tensor.name + " has a part outside");
    if (!is_in_file(checkpoint.files, part, tensor.dtype))
      damaged(folder, tensor.name + " has a part outside of " + part.file);
    elements += numel_of(part.box.sizes);
    tensor.parts.push_back(std::move(part));
  }
  if (elements != numel_of(tensor.sizes))
    damaged(folder, "of " + tensor.name + " a part is missing");
  return tensor;
}

void fill_from(const fs::path& folder, const json& document, StoredCheckpoint& checkpoint) {
  checkpoint.info = detail::info_from(document);
  for (const auto& [name, file] : document.at("files").items()) {
    if (fs::path(name).filename() != name) damaged(folder, name + " is no name of a file");
    const auto kind = file.contains(kHashNames[0]) ? CheckpointHash::xxh3 : CheckpointHash::sha256;
    checkpoint.files.push_back(
        {name, file.at("bytes"), kind, file.at(kHashNames[static_cast<int>(kind)])});
  }
  const json& tensors = document.at("tensors");
  for (const json& item : tensors.at("model"))
    checkpoint.model.push_back(tensor_from(checkpoint, item));
  for (const json& item : tensors.at("state"))
    checkpoint.state.push_back(tensor_from(checkpoint, item));
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

/// None where the boxes have nothing in common.
std::optional<TensorBox> intersection(const TensorBox& a, const TensorBox& b) {
  TensorBox common;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

/// `wanted` lies in the part's box. Both are of the whole tensor. The file is read from its first
/// element to its last: boxes of whole rows have no others between.
at::Tensor read_part(const StoredCheckpoint& checkpoint, const StoredPart& part,
                     const TensorBox& wanted, at::ScalarType dtype) {
  std::vector<int64_t> strides(wanted.sizes.size());
  int64_t stride = 1, first = 0, last = 0;
  for (size_t d = strides.size(); d-- > 0; stride *= part.box.sizes[d]) {
    strides[d] = stride;
    first += (wanted.offsets[d] - part.box.offsets[d]) * stride;
    last += (wanted.sizes[d] - 1) * stride;
  }
  at::Tensor elements = at::empty({last + 1}, dtype);
  const uint64_t begin = part.begin + static_cast<uint64_t>(first) * c10::elementSize(dtype);
  try {
    ContentReader reader(
        checkpoint.folder / part.file,
        {.packing = ContentOptions::Packing::plain, .begin = begin, .size = elements.nbytes()});
    reader.read_exact(elements.mutable_data_ptr(), elements.nbytes(), "a tensor");
  } catch (const DataError& error) {
    damaged(checkpoint.folder, error.what());
  }
  *checkpoint.bytes_read += static_cast<int64_t>(elements.nbytes());
  return elements.as_strided(wanted.sizes, strides);
}

void read_box(const StoredCheckpoint& checkpoint, const StoredTensor& tensor, const TensorBox& box,
              at::Tensor& into) {
  for (const StoredPart& part : tensor.parts) {
    const auto common = intersection(part.box, box);
    if (!common) continue;
    at::Tensor values;
    if (part.file.empty()) {
      TensorBox within = *common;
      for (size_t d = 0; d < within.offsets.size(); ++d) within.offsets[d] -= part.box.offsets[d];
      values = slice(part.values, within.offsets, within.sizes);
    } else {
      values = read_part(checkpoint, part, *common, tensor.dtype);
    }
    if (values.sizes().equals(into.sizes()) && !part.file.empty()) {
      into = values.contiguous();
    } else {
      slice(into, common->offsets, common->sizes).copy_(values);
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
  }
  return checkpoint;
}

void check_files(const StoredCheckpoint& checkpoint, int part, int parts) {
  std::vector<const StoredFile*> files;
  for (const StoredFile& file : checkpoint.files) {
    const fs::path path = checkpoint.folder / file.name;
    if (!fs::exists(path)) damaged(checkpoint.folder, file.name + " is missing");
    if (const uint64_t bytes = fs::file_size(path); bytes != file.bytes) {
      damaged(checkpoint.folder, file.name + " has " + std::to_string(bytes) +
                                     " bytes in place of " + std::to_string(file.bytes));
    }
    files.push_back(&file);
  }
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
  document["tensors"] = {{"model", tensors_as_json(checkpoint.model)},
                         {"state", tensors_as_json(checkpoint.state)}};
  document["checksum"] = checksum_of(document);
  FileWriter file(checkpoint.folder / kInfoFile);
  file.write(document.dump() + "\n");
  file.finish();
  fsync_path(checkpoint.folder);
}

}  // namespace lockstep
