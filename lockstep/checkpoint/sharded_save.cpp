#include "lockstep/checkpoint/sharded_save.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "lockstep/base/file_writer.h"
#include "lockstep/data/stored_tensors.h"

namespace lockstep::detail {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

bool is_alone(const ProcessGroup& group) {
  return !group || group.size() == 1;
}

json describe(bool of_model, const std::vector<TensorShard>& shards) {
  json list = json::array();
  for (const TensorShard& shard : shards) {
    list.push_back({of_model, shard.name, static_cast<int>(shard.values.scalar_type()), shard.sizes,
                    shard.offsets, shard.values.sizes().vec()});
  }
  return list;
}

PlannedPart part_from(const json& item) {
  PlannedPart part;
  part.of_model = item.at(0);
  part.name = item.at(1);
  part.dtype = static_cast<at::ScalarType>(item.at(2).get<int>());
  item.at(3).get_to(part.sizes);
  item.at(4).get_to(part.box.offsets);
  item.at(5).get_to(part.box.sizes);
  return part;
}

using PartKey = std::tuple<bool, std::string, std::vector<int64_t>>;

PartKey key_of(const PlannedPart& part) {
  return {part.of_model, part.name, part.box.offsets};
}

/// Every tensor once and whole.
void check_complete(const std::vector<PlannedPart>& parts) {
  std::map<std::pair<bool, std::string>, std::pair<const PlannedPart*, int64_t>> tensors;
  for (const PlannedPart& part : parts) {
    auto& [first, elements] = tensors.try_emplace({part.of_model, part.name}).first->second;
    if (!first) first = &part;
    elements += static_cast<int64_t>(c10::multiply_integers(part.box.sizes));
    if (part.sizes == first->sizes && part.dtype == first->dtype) continue;
    throw CheckpointError("cannot save " + part.name + ": rank " +
                          std::to_string(part.holders.front()) + " has a part of a tensor of " +
                          c10::str(c10::IntArrayRef(part.sizes)) + ", rank " +
                          std::to_string(first->holders.front()) + " of one of " +
                          c10::str(c10::IntArrayRef(first->sizes)));
  }
  for (const auto& [key, found] : tensors) {
    const auto wanted = static_cast<int64_t>(c10::multiply_integers(found.first->sizes));
    if (found.second == wanted) continue;
    throw CheckpointError("cannot save " + key.second + ": the ranks' parts have " +
                          std::to_string(found.second) + " elements, the tensor has " +
                          std::to_string(wanted));
  }
}

/// The largest first, each to the rank that has least to write of those that have it.
void choose_writers(std::vector<PlannedPart>& parts, size_t ranks) {
  std::vector<PlannedPart*> largest_first;
  for (PlannedPart& part : parts) largest_first.push_back(&part);
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [](const auto* a, const auto* b) { return a->bytes() > b->bytes(); });
  std::vector<int64_t> loads(ranks);
  for (PlannedPart* part : largest_first) {
    part->writer = *std::min_element(part->holders.begin(), part->holders.end(), [&](int a, int b) {
      return loads[static_cast<size_t>(a)] < loads[static_cast<size_t>(b)];
    });
    loads[static_cast<size_t>(part->writer)] += part->bytes();
  }
}

void choose_files(std::vector<PlannedPart>& parts) {
  // A file is of one rank, and has one box at most of each tensor.
  using FileKey = std::tuple<bool, int, int>;
  std::map<std::tuple<bool, int, std::string>, int> boxes;
  std::vector<FileKey> keys;
  std::map<FileKey, size_t> numbers;
  for (const PlannedPart& part : parts) {
    keys.emplace_back(part.of_model, part.writer, boxes[{part.of_model, part.writer, part.name}]++);
    numbers.try_emplace(keys.back());
  }
  size_t counts[2] = {0, 0};
  for (auto& [key, number] : numbers) number = ++counts[std::get<0>(key) ? 1 : 0];
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool of_model = parts[i].of_model;
    parts[i].file =
        numbered_file(of_model ? "model" : "state", numbers[keys[i]], counts[of_model ? 1 : 0]);
  }
}

/// Where transformers and others look for a tensor; none where one lies in several files.
std::optional<std::string> index_of(const std::vector<PlannedPart>& plan) {
  std::map<std::string, std::string> files;
  int64_t bytes = 0;
  for (const PlannedPart& part : plan) {
    if (!part.of_model) continue;
    if (!files.emplace(part.name, part.file).second) return std::nullopt;
    bytes += part.bytes();
  }
  return index_text(files, static_cast<uint64_t>(bytes));
}

/// A file of a checkpoint. A piece is hashed and copied while the processor's cache has it.
class HashedFile {
 public:
  HashedFile(const fs::path& path, CheckpointHash hash)
      : name_(path.filename().string()), file_(path), hasher_(algorithm_of(hash)) {}

  void write(const void* data, size_t size) {
    constexpr size_t kPiece = size_t{256} << 10;
    const char* next = static_cast<const char*>(data);
    size_ += size;
    while (size > 0) {
      const size_t part = std::min(size, kPiece);
      hasher_.update(next, part);
      file_.write(next, part);
      next += part;
      size -= part;
    }
  }

  /// On the disk. Gives name, size and hash.
  json finish() {
    file_.finish();
    return {name_, size_, hasher_.finish()};
  }

 private:
  std::string name_;
  FileWriter file_;
  Hasher hasher_;
  uint64_t size_ = 0;
};

}  // namespace

int64_t PlannedPart::bytes() const {
  return static_cast<int64_t>(c10::multiply_integers(box.sizes) * c10::elementSize(dtype));
}

std::vector<PlannedPart> plan_of(const std::vector<json>& described) {
  std::vector<PlannedPart> parts;
  std::map<PartKey, size_t> known;
  for (size_t rank = 0; rank < described.size(); ++rank) {
    for (const json& item : described[rank]) {
      PlannedPart part = part_from(item);
      const size_t index = known.try_emplace(key_of(part), parts.size()).first->second;
      if (index == parts.size()) parts.push_back(std::move(part));
      parts[index].holders.push_back(static_cast<int>(rank));
    }
  }
  check_complete(parts);
  choose_writers(parts, described.size());
  choose_files(parts);
  return parts;
}

ShardedSave::ShardedSave(const ProcessGroup& group, const CheckpointShards& shards)
    : info_(shards.info) {
  json mine = describe(true, shards.model);
  for (json& item : describe(false, shards.state)) mine.push_back(std::move(item));
  plan_ = plan_of(is_alone(group) ? std::vector<json>{mine} : group.all_gather_object(mine));
  const int rank = is_alone(group) ? 0 : group.rank();
  info_.ranks = is_alone(group) ? 1 : group.size();
  std::map<PartKey, at::Tensor> own;
  for (const bool of_model : {true, false}) {
    for (const TensorShard& shard : of_model ? shards.model : shards.state)
      own.emplace(PartKey{of_model, shard.name, shard.offsets}, shard.values);
  }
  for (size_t i = 0; i < plan_.size(); ++i) {
    if (plan_[i].writer == rank) tensors_.emplace(i, own.at(key_of(plan_[i])));
  }
}

/// Gives each file with its size and hash.
json ShardedSave::write_own(const fs::path& folder, int rank, CheckpointHash hash) const {
  std::map<std::string, std::vector<size_t>> files;
  for (const auto& [index, tensor] : tensors_) files[plan_[index].file].push_back(index);
  json result = json::array();
  if (!files.empty() && !fs::exists(folder)) {
    throw CheckpointError("rank " + std::to_string(rank) + " does not see " + folder.string() +
                              ", which rank 0 has made",
                          "give a --checkpoint-dir on a file system that all hosts share");
  }
  for (const auto& [file, parts] : files) {
    std::vector<TensorInfo> infos;
    std::vector<std::vector<int64_t>> offsets;
    for (const size_t index : parts) {
      const at::Tensor& tensor = tensors_.at(index);
      infos.push_back({plan_[index].name, tensor.scalar_type(), tensor.sizes().vec()});
      offsets.push_back(plan_[index].box.offsets);
    }
    HashedFile out(folder / file, hash);
    write_safetensors(
        infos, sharding_metadata(infos, offsets), [&](size_t i) { return tensors_.at(parts[i]); },
        [&](const void* data, size_t size) { out.write(data, size); });
    result.push_back(out.finish());
  }
  return result;
}

/// As text what went wrong.
json ShardedSave::own_or_error(const fs::path& folder, int rank, CheckpointHash hash) const {
  try {
    return write_own(folder, rank, hash);
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

void ShardedSave::complete(const fs::path& folder, const std::vector<json>& results,
                           CheckpointHash hash) const {
  StoredCheckpoint stored;
  stored.info = info_;
  stored.folder = folder;
  for (const json& result : results) {
    if (result.is_string()) throw CheckpointError(result.get<std::string>());
    for (const json& file : result)
      stored.files.push_back({file.at(0), file.at(1), hash, file.at(2)});
  }
  if (const auto index = index_of(plan_)) {
    HashedFile file(folder / kIndexFile, hash);
    file.write(index->data(), index->size());
    stored.files.push_back({kIndexFile, index->size(), hash, file.finish().at(2)});
  }
  write_description(stored);
}

/// A collective even where writing fails: the others wait for what comes of it.
std::string ShardedSave::write_as_first(const ProcessGroup& group, CheckpointFolder& folder) const {
  std::string error;
  bool begun = false;
  const auto begin = [&](const fs::path& aside) {
    begun = true;
    if (!is_alone(group)) group.broadcast_object({aside.string(), folder.hash()}, 0);
  };
  try {
    folder.write(info_.step, [&](const fs::path& aside) {
      begin(aside);
      const json own = own_or_error(aside, 0, folder.hash());
      complete(aside, is_alone(group) ? std::vector<json>{own} : group.gather_object(own, 0),
               folder.hash());
    });
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& failure) {
    if (is_alone(group)) throw;
    error = failure.what();
  }
  if (is_alone(group)) return {};
  if (!begun) begin({});
  group.broadcast_object(error, 0);
  return error;
}

void ShardedSave::write_as_other(const ProcessGroup& group) const {
  const json told = group.broadcast_object({}, 0);
  const fs::path aside = told.at(0).get<std::string>();
  const auto hash = told.at(1).get<CheckpointHash>();
  if (!aside.empty()) group.gather_object(own_or_error(aside, group.rank(), hash), 0);
}

std::string ShardedSave::write(const ProcessGroup& group, CheckpointFolder& folder) const {
  if (is_alone(group) || group.rank() == 0) return write_as_first(group, folder);
  write_as_other(group);
  return group.broadcast_object({}, 0).get<std::string>();
}

}  // namespace lockstep::detail
