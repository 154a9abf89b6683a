#include "lockstep/checkpoint/sharded_save.h"

#include <ATen/ops/empty.h>

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

/// Of the model or not, name, offsets and sizes of the box.
using ShardKey = std::tuple<bool, std::string, std::vector<int64_t>, std::vector<int64_t>>;

/// Calls `each` with every shard and its key.
template <class F>
void for_each_shard(const CheckpointShards& shards, const F& each) {
  for (const bool of_model : {true, false}) {
    for (const TensorShard& shard : of_model ? shards.model : shards.state)
      each(ShardKey{of_model, shard.name, shard.offsets, shard.values.sizes().vec()}, shard);
  }
}

/// Every tensor once and whole.
void check_complete(const std::vector<PlannedShard>& plan) {
  std::map<std::pair<bool, std::string>, std::pair<const PlannedShard*, int64_t>> tensors;
  for (const PlannedShard& planned : plan) {
    const TensorShard& shard = planned.shard;
    auto& [first, elements] = tensors.try_emplace({planned.of_model, shard.name}).first->second;
    if (!first) first = &planned;
    elements += shard.values.numel();
    if (shard.sizes == first->shard.sizes && shard.values.dtype() == first->shard.values.dtype())
      continue;
    throw CheckpointError("cannot save " + shard.name + ": rank " +
                          std::to_string(planned.holders.front()) + " has a part of a tensor of " +
                          c10::str(c10::IntArrayRef(shard.sizes)) + ", rank " +
                          std::to_string(first->holders.front()) + " of one of " +
                          c10::str(c10::IntArrayRef(first->shard.sizes)));
  }
  for (const auto& [key, found] : tensors) {
    const int64_t wanted = c10::multiply_integers(found.first->shard.sizes);
    if (found.second == wanted) continue;
    throw CheckpointError("cannot save " + key.second + ": the ranks' parts have " +
                          std::to_string(found.second) + " elements, the tensor has " +
                          std::to_string(wanted));
  }
}

/// The largest first, each to the rank that has least to write of those that have it.
void choose_writers(std::vector<PlannedShard>& plan, size_t ranks) {
  std::vector<PlannedShard*> largest_first;
  for (PlannedShard& planned : plan) largest_first.push_back(&planned);
  const auto bytes = [](const PlannedShard* planned) { return planned->shard.values.nbytes(); };
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](const auto* a, const auto* b) { return bytes(a) > bytes(b); });
  std::vector<size_t> loads(ranks);
  const auto load = [&](int rank) -> size_t& { return loads[static_cast<size_t>(rank)]; };
  for (PlannedShard* planned : largest_first) {
    planned->writer = *std::min_element(planned->holders.begin(), planned->holders.end(),
                                        [&](int a, int b) { return load(a) < load(b); });
    load(planned->writer) += bytes(planned);
  }
}

/// A file has a name once: a rank that has several boxes of a tensor writes several files.
void choose_files(std::vector<PlannedShard>& plan) {
  using FileKey = std::tuple<bool, int, int>;
  std::map<std::tuple<bool, int, std::string>, int> boxes;
  std::vector<FileKey> keys;
  std::map<FileKey, size_t> numbers;
  for (const PlannedShard& planned : plan) {
    const auto& [shard, of_model, holders, writer, file] = planned;
    keys.emplace_back(of_model, writer, boxes[{of_model, writer, shard.name}]++);
    numbers.try_emplace(keys.back());
  }
  size_t counts[2] = {0, 0};
  for (auto& [key, number] : numbers) number = ++counts[std::get<0>(key) ? 1 : 0];
  for (size_t i = 0; i < plan.size(); ++i) {
    const bool of_model = plan[i].of_model;
    plan[i].file =
        numbered_file(of_model ? "model" : "state", numbers[keys[i]], counts[of_model ? 1 : 0]);
  }
}

/// The same on every rank, by what each has described.
std::vector<PlannedShard> plan_of(const std::vector<json>& described) {
  std::vector<PlannedShard> plan;
  std::map<ShardKey, size_t> known;
  for (size_t rank = 0; rank < described.size(); ++rank) {
    for (const json& item : described[rank]) {
      const ShardKey key = item.at(0);
      const auto& [of_model, name, offsets, sizes] = key;
      const auto [place, is_new] = known.try_emplace(key, plan.size());
      if (is_new) {
        const auto dtype = static_cast<at::ScalarType>(item.at(2).get<int>());
        plan.push_back({.shard = {name, item.at(1), offsets,
                                  at::empty(sizes, at::dtype(dtype).device(at::kMeta))},
                        .of_model = of_model});
      }
      plan[place->second].holders.push_back(static_cast<int>(rank));
    }
  }
  check_complete(plan);
  choose_writers(plan, described.size());
  choose_files(plan);
  return plan;
}

/// Where transformers and others look for a tensor; none where one lies in several files.
std::optional<std::string> index_of(const std::vector<PlannedShard>& plan) {
  std::map<std::string, std::string> files;
  uint64_t bytes = 0;
  for (const PlannedShard& planned : plan) {
    if (!planned.of_model) continue;
    if (!files.emplace(planned.shard.name, planned.file).second) return std::nullopt;
    bytes += planned.shard.values.nbytes();
  }
  return index_text(files, bytes);
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

ShardedSave::ShardedSave(const ProcessGroup& group, const CheckpointShards& shards)
    : info_(shards.info), rank_(is_alone(group) ? 0 : group.rank()) {
  info_.ranks = is_alone(group) ? 1 : group.size();
  json mine = json::array();
  std::map<ShardKey, at::Tensor> own;
  for_each_shard(shards, [&](const ShardKey& key, const TensorShard& shard) {
    mine.push_back({key, shard.sizes, static_cast<int>(shard.values.scalar_type())});
    own.emplace(key, shard.values);
  });
  plan_ = plan_of(is_alone(group) ? std::vector<json>{mine} : group.all_gather_object(mine));
  for (auto& [shard, of_model, holders, writer, file] : plan_) {
    if (writer == rank_)
      shard.values = own.at({of_model, shard.name, shard.offsets, shard.values.sizes().vec()});
  }
}

std::vector<at::Tensor*> ShardedSave::tensors() {
  std::vector<at::Tensor*> own;
  for (PlannedShard& planned : plan_) {
    if (planned.writer == rank_) own.push_back(&planned.shard.values);
  }
  return own;
}

/// Gives each file with its size and hash.
json ShardedSave::write_own(const fs::path& folder, CheckpointHash hash) const {
  std::map<std::string, std::vector<TensorShard>> files;
  for (const PlannedShard& planned : plan_) {
    if (planned.writer == rank_) files[planned.file].push_back(planned.shard);
  }
  if (!files.empty() && !fs::exists(folder)) {
    throw CheckpointError("rank " + std::to_string(rank_) + " does not see " + folder.string() +
                              ", which rank 0 has made",
                          "give a --checkpoint-dir on a file system that all hosts share");
  }
  json result = json::array();
  for (const auto& [file, shards] : files) {
    HashedFile out(folder / file, hash);
    write_safetensors(shards, sharding_metadata(shards), {},
                      [&](const void* data, size_t size) { out.write(data, size); });
    result.push_back(out.finish());
  }
  return result;
}

/// As text what went wrong.
json ShardedSave::own_or_error(const fs::path& folder, CheckpointHash hash) const {
  try {
    return write_own(folder, hash);
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
std::string ShardedSave::write(const ProcessGroup& group, CheckpointFolder& folder) const {
  const bool alone = is_alone(group);
  if (rank_ != 0) {
    const json told = group.broadcast_object({}, 0);
    const fs::path aside = told.at(0).get<std::string>();
    if (!aside.empty()) group.gather_object(own_or_error(aside, told.at(1)), 0);
    return group.broadcast_object({}, 0).get<std::string>();
  }
  std::string error;
  bool begun = alone;
  const auto begin = [&](const fs::path& aside) {
    if (!alone) group.broadcast_object({aside.string(), folder.hash()}, 0);
    begun = true;
  };
  try {
    folder.write(info_.step, [&](const fs::path& aside) {
      begin(aside);
      const json own = own_or_error(aside, folder.hash());
      complete(aside, alone ? std::vector<json>{own} : group.gather_object(own, 0), folder.hash());
    });
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& failure) {
    if (alone) throw;
    error = failure.what();
  }
  if (!begun) begin({});
  if (!alone) group.broadcast_object(error, 0);
  return error;
}

}  // namespace lockstep::detail
