#include <ATen/ops/empty.h>
#include <torch/version.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/sharded_save.h"

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

/// What rank 0 found, told to all. What it throws all throw.
template <class F>
json from_first_rank(const ProcessGroup& group, const F& find) {
  json found = json::object();
  if (group.rank() == 0) {
    try {
      found["found"] = find();
    } catch (const std::exception& failure) {
      found["error"] = failure.what();
    }
  }
  if (group.size() > 1) found = group.broadcast_object(found, 0);
  if (found.contains("error")) throw CheckpointError(found["error"].get<std::string>());
  return found["found"];
}

bool is_checkpoint(const fs::path& path) {
  return path.filename().string().starts_with("step-") || fs::exists(path / "state.json");
}

/// The checkpoints that may be taken, the best first.
std::vector<std::string> candidates(const std::string& resume, const CheckpointFolder* folder) {
  std::vector<std::string> paths;
  if (resume == "auto" && !folder) return paths;
  if (resume != "auto" && !fs::exists(resume)) {
    throw CheckpointError("there is no checkpoint at " + resume);
  }
  if (resume != "auto" && is_checkpoint(resume)) return {resume};
  const CheckpointFolder given(resume);
  for (const fs::path& path : (resume == "auto" ? *folder : given).list()) paths.push_back(path);
  if (resume != "auto" && paths.empty()) {
    throw CheckpointError("there is no checkpoint in " + resume,
                          "give a folder that holds step-* folders, or one of those");
  }
  return paths;
}

/// What is wrong with it, as rank 0 sees it; empty: nothing. Other errors come out on all ranks.
template <class F>
void check_on_first_rank(const ProcessGroup& group, const F& check) {
  const json damage = from_first_rank(group, [&]() -> json {
    try {
      check();
      return "";
    } catch (const DamagedCheckpointError& error) {
      return error.what();
    }
  });
  if (damage != "") throw DamagedCheckpointError(damage.get<std::string>());
}

/// The checkpoint, each rank having looked at its part of the files. Where other ranks do not see
/// what is whole on rank 0, `seen_by_all` becomes false.
StoredCheckpoint checked(const ProcessGroup& group, const std::string& path,
                         std::map<std::string, std::string> identity, const AdaptIdentity& adapt,
                         bool& seen_by_all) {
  check_on_first_rank(group, [&] {
    const CheckpointInfo found = open_checkpoint(path).info;
    if (adapt) adapt(found, identity);
    check_identity(path, found.identity, identity);
  });
  StoredCheckpoint checkpoint;
  int bad = 0;
  try {
    checkpoint = open_checkpoint(path);
    check_files(checkpoint, group.rank(), group.size());
  } catch (const std::exception&) {
    bad = 1;
  }
  if (group.size() > 1) group.all_reduce_values(bad);
  // What another rank finds may be that its host has no such folder: rank 0 looks at all.
  if (bad != 0) check_on_first_rank(group, [&] { check_files(open_checkpoint(path)); });
  seen_by_all = bad == 0;
  return checkpoint;
}

}  // namespace

std::vector<StoredTensor> detail::in_memory(const std::vector<TensorShard>& shards) {
  std::vector<StoredTensor> stored;
  for (const auto& shard : shards) {
    const TensorBox box{shard.offsets, shard.values.sizes().vec()};
    stored.push_back({shard.name,
                      shard.values.scalar_type(),
                      shard.sizes,
                      {{.box = box, .file = {}, .values = shard.values}}});
  }
  return stored;
}

StoredCheckpoint detail::shared(const ProcessGroup& group, StoredCheckpoint checkpoint, int source,
                                c10::Device device) {
  checkpoint.info = info_from(group.broadcast_object(to_json(checkpoint.info), source));
  for (auto* const tensors : {&checkpoint.model, &checkpoint.state}) {
    const bool sends = group.rank() == source;
    const StateDict own = sends ? read_tensors(checkpoint, *tensors) : StateDict();
    *tensors = in_memory(whole_shards(broadcast_state(group, own, source, device)));
  }
  return checkpoint;
}

void save_checkpoint(const ProcessGroup& group, CheckpointFolder& folder,
                     const CheckpointShards& shards) {
  const std::string error = detail::ShardedSave(group, shards).write(group, folder);
  if (!error.empty()) throw CheckpointError(error);
}

bool is_seen_by_all(const ProcessGroup& group, const fs::path& folder) {
  if (group.size() == 1) return true;
  const json path = from_first_rank(group, [&] {
    fs::create_directories(folder);
    return make_unique_folder(folder / ".tmp-seen").string();
  });
  int unseen = fs::exists(path.get<std::string>()) ? 0 : 1;
  group.all_reduce_values(unseen);
  std::error_code ignored;
  if (group.rank() == 0) fs::remove(path.get<std::string>(), ignored);
  return unseen == 0;
}

StateDict gather_rank_state(const ProcessGroup& group, const StateDict& rank_state) {
  json mine = json::array();
  for (const auto& [name, tensor] : rank_state) {
    const at::Tensor flat = tensor.contiguous();
    const auto* data = static_cast<const uint8_t*>(flat.const_data_ptr());
    mine.push_back({name, json::binary(std::vector<uint8_t>(data, data + flat.numel()))});
  }
  const auto ranks = group.size() > 1 ? group.gather_object(mine, 0) : std::vector<json>{mine};
  StateDict state;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const json& item : ranks[rank]) {
      const auto& bytes = item.at(1).get_binary();
      at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
      std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
      state.emplace_back("rank" + std::to_string(rank) + "." + item.at(0).get<std::string>(),
                         tensor);
    }
  }
  return state;
}

std::optional<StoredCheckpoint> load_checkpoint(const ProcessGroup& group,
                                                const std::string& resume,
                                                const CheckpointFolder* folder,
                                                const std::map<std::string, std::string>& identity,
                                                c10::Device device, const AdaptIdentity& adapt) {
  if (resume == "none") return std::nullopt;
  const json paths = from_first_rank(group, [&] { return json(candidates(resume, folder)); });
  for (const json& each : paths) {
    const auto path = each.get<std::string>();
    bool seen_by_all = true;
    try {
      StoredCheckpoint checkpoint = checked(group, path, identity, adapt, seen_by_all);
      if (group.rank() == 0 && checkpoint.info.libtorch != TORCH_VERSION) {
        log_warning("checkpoint " + path + " was written with LibTorch " +
                    checkpoint.info.libtorch + "; this is " + TORCH_VERSION);
      }
      if (seen_by_all) return checkpoint;
      return detail::shared(group, std::move(checkpoint), 0, device);
    } catch (const DamagedCheckpointError& error) {
      if (resume != "auto" && is_checkpoint(resume)) throw;
      const std::string text = error.what();
      if (group.rank() == 0) {
        log_warning(text.substr(0, text.find('\n')) + "; trying the one before it");
      }
    }
  }
  if (paths.empty()) return std::nullopt;
  throw detail::all_damaged(resume == "auto" ? folder->path() : fs::path(resume), paths.size());
}

StateDict with_prefix_removed(const StateDict& tensors, const std::string& prefix) {
  StateDict found;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with(prefix)) found.emplace_back(name.substr(prefix.size()), tensor);
  }
  return found;
}

StateDict state_of_rank(const StoredCheckpoint& checkpoint, int rank) {
  return read_tensors(checkpoint, checkpoint.state,
                      "rank" + std::to_string(rank % checkpoint.info.ranks) + ".");
}

}  // namespace lockstep
