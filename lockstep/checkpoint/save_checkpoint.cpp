#include <ATen/ops/empty.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/sharded_save.h"
#include "lockstep/comm/group_objects.h"

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

using detail::is_alone;

/// What rank 0 found, told to all. What it throws all throw.
template <class F>
json from_first_rank(const ProcessGroup& group, const F& find) {
  if (is_alone(group)) return find();
  json found = json::object();
  if (group.rank() == 0) {
    try {
      found["found"] = find();
    } catch (const DamagedCheckpointError& damage) {
      found["damage"] = damage.what();
    } catch (const std::exception& failure) {
      found["error"] = failure.what();
    }
  }
  found = group.broadcast_object(found, 0);
  if (found.contains("damage")) throw DamagedCheckpointError(found["damage"].get<std::string>());
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

/// The checkpoint, each rank having looked at its part of the files. Where other ranks do not see
/// what is whole on rank 0, `seen_by_all` becomes false.
StoredCheckpoint checked(const ProcessGroup& group, const std::string& path,
                         std::map<std::string, std::string> identity, const AdaptIdentity& adapt,
                         bool& seen_by_all) {
  StoredCheckpoint checkpoint;
  from_first_rank(group, [&] {
    checkpoint = open_checkpoint(path);
    if (adapt) adapt(checkpoint.info, identity);
    check_identity(path, checkpoint.info.identity, identity);
    if (is_alone(group)) check_files(checkpoint);
    return json();
  });
  if (is_alone(group)) return checkpoint;
  int bad = 0;
  try {
    if (group.rank() != 0) checkpoint = open_checkpoint(path);
    check_files(checkpoint, group.rank(), group.size());
  } catch (const std::exception&) {
    bad = 1;
  }
  group.all_reduce_values(bad);
  seen_by_all = bad == 0;
  // What another rank finds may be that its host has no such folder: rank 0 looks at all.
  if (!seen_by_all) {
    from_first_rank(group, [&] {
      check_files(checkpoint);
      return json();
    });
  }
  return checkpoint;
}

}  // namespace

StoredCheckpoint detail::shared(const ProcessGroup& group, StoredCheckpoint checkpoint, int source,
                                c10::Device device) {
  checkpoint.info = info_from(group.broadcast_object(to_json(checkpoint.info), source));
  for (auto* const shards : {&checkpoint.model, &checkpoint.state}) {
    const bool sends = group.rank() == source;
    const StateDict own = sends ? read_tensors(checkpoint, *shards) : StateDict();
    *shards = whole_shards(broadcast_state(group, own, source, device));
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
  const bool is_first = is_alone(group) || group.rank() == 0;
  const json paths = from_first_rank(group, [&] { return json(candidates(resume, folder)); });
  for (const json& each : paths) {
    const auto path = each.get<std::string>();
    bool seen_by_all = true;
    try {
      StoredCheckpoint checkpoint = checked(group, path, identity, adapt, seen_by_all);
      if (is_first) detail::warn_of_other_libtorch(checkpoint);
      if (seen_by_all) return checkpoint;
      return detail::shared(group, std::move(checkpoint), 0, device);
    } catch (const DamagedCheckpointError& error) {
      if (resume != "auto" && is_checkpoint(resume)) throw;
      const std::string text = error.what();
      if (is_first) log_warning(text.substr(0, text.find('\n')) + "; trying the one before it");
    }
  }
  if (paths.empty()) return std::nullopt;
  const fs::path where = resume == "auto" ? folder->path() : fs::path(resume);
  throw DamagedCheckpointError("every checkpoint in " + where.string() + " is damaged (" +
                                   std::to_string(paths.size()) + ")",
                               "start anew with --resume none and another --checkpoint-dir");
}

StoredCheckpoint load_newest(const fs::path& path) {
  const auto any = [](const CheckpointInfo& found, auto& identity) { identity = found.identity; };
  return *load_checkpoint({}, path.string(), nullptr, {}, c10::kCPU, any);
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
