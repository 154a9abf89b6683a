#include "lockstep/checkpoint/checkpoint_folder.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <cstring>
#include <nlohmann/json.hpp>

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

json to_json(const StateDict& bytes) {
  json object = json::array();
  for (const auto& [name, tensor] : bytes) {
    const at::Tensor flat = tensor.contiguous();
    const auto* data = static_cast<const uint8_t*>(flat.const_data_ptr());
    object.push_back({name, json::binary(std::vector<uint8_t>(data, data + flat.numel()))});
  }
  return object;
}

void append_rank_state(StateDict& state, const std::vector<json>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const json& item : ranks[rank]) {
      const auto& bytes = item.at(1).get_binary();
      at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
      std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
      state.emplace_back("rank" + std::to_string(rank) + "." + item.at(0).get<std::string>(),
                         tensor);
    }
  }
}

/// What rank 0 did, told to all: empty for success.
void share_outcome(const ProcessGroup& group, const std::string& error) {
  const json outcome = group.size() > 1 ? group.broadcast_object(json(error), 0) : json(error);
  if (const auto text = outcome.get<std::string>(); !text.empty()) throw CheckpointError(text);
}

std::pair<fs::path, std::optional<Checkpoint>> read_newest(const CheckpointFolder& folder) {
  auto found = folder.read_newest();
  if (!found) return {folder.path(), std::nullopt};
  return {found->first, std::move(found->second)};
}

std::pair<fs::path, std::optional<Checkpoint>> read_at(const fs::path& path) {
  if (!fs::exists(path)) throw CheckpointError("there is no checkpoint at " + path.string());
  if (path.filename().string().starts_with("step-") || fs::exists(path / "state.json")) {
    return {path, read_checkpoint(path)};
  }
  auto found = read_newest(CheckpointFolder(path));
  if (!found.second) {
    throw CheckpointError("there is no checkpoint in " + path.string(),
                          "give a folder that holds step-* folders, or one of those");
  }
  return found;
}

std::optional<Checkpoint> read_wanted(const std::string& resume, const CheckpointFolder* folder,
                                      const std::map<std::string, std::string>& identity) {
  if (resume == "auto" && !folder) return std::nullopt;
  auto [path, checkpoint] = resume == "auto" ? read_newest(*folder) : read_at(resume);
  if (checkpoint) check_identity(path, checkpoint->info.identity, identity);
  return std::move(checkpoint);
}

json describe(const StateDict& tensors) {
  json list = json::array();
  for (const auto& [name, tensor] : tensors) {
    list.push_back({name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
  }
  return list;
}

void receive_or_send(const ProcessGroup& group, StateDict& tensors, const json& description,
                     c10::Device device) {
  if (group.rank() != 0) {
    for (const json& item : description) {
      const auto dtype = static_cast<c10::ScalarType>(item.at(1).get<int>());
      tensors.emplace_back(item.at(0).get<std::string>(),
                           at::empty(item.at(2).get<std::vector<int64_t>>(), dtype));
    }
  }
  for (auto& [name, tensor] : tensors) {
    at::Tensor wire = tensor.to(device).contiguous();
    if (wire.numel() > 0) group.broadcast(wire, 0);
    tensor = wire.to(c10::kCPU);
  }
}

json describe(const CheckpointInfo& info) {
  return {{"step", info.step},         {"epoch", info.epoch},       {"batches", info.batches},
          {"identity", info.identity}, {"settings", info.settings}, {"values", info.values}};
}

CheckpointInfo info_from(const json& description) {
  CheckpointInfo info;
  info.step = description.at("step");
  info.epoch = description.at("epoch");
  info.batches = description.at("batches");
  description.at("identity").get_to(info.identity);
  description.at("settings").get_to(info.settings);
  description.at("values").get_to(info.values);
  return info;
}

std::optional<Checkpoint> share(const ProcessGroup& group, std::optional<Checkpoint> checkpoint,
                                c10::Device device) {
  json plan = json::object();
  if (checkpoint) {
    plan = {{"info", describe(checkpoint->info)},
            {"model", describe(checkpoint->model)},
            {"state", describe(checkpoint->state)}};
  }
  plan = group.broadcast_object(plan, 0);
  if (plan.empty()) return std::nullopt;
  if (!checkpoint) checkpoint.emplace().info = info_from(plan.at("info"));
  receive_or_send(group, checkpoint->model, plan.at("model"), device);
  receive_or_send(group, checkpoint->state, plan.at("state"), device);
  return checkpoint;
}

}  // namespace

void save_checkpoint(const ProcessGroup& group, CheckpointFolder& folder,
                     const Checkpoint& checkpoint, const StateDict& rank_state) {
  const json mine = to_json(rank_state);
  const std::vector<json> ranks =
      group.size() > 1 ? group.gather_object(mine, 0) : std::vector<json>{mine};
  std::string error;
  if (group.rank() == 0) {
    try {
      Checkpoint whole = checkpoint;
      append_rank_state(whole.state, ranks);
      folder.write(whole);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  share_outcome(group, error);
}

std::optional<Checkpoint> load_checkpoint(const ProcessGroup& group, const std::string& resume,
                                          const CheckpointFolder* folder,
                                          const std::map<std::string, std::string>& identity,
                                          c10::Device device) {
  if (resume == "none") return std::nullopt;
  std::optional<Checkpoint> checkpoint;
  std::string error;
  if (group.rank() == 0) {
    try {
      checkpoint = read_wanted(resume, folder, identity);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  share_outcome(group, error);
  return group.size() > 1 ? share(group, std::move(checkpoint), device) : std::move(checkpoint);
}

StateDict with_prefix_removed(const StateDict& tensors, const std::string& prefix) {
  StateDict found;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with(prefix)) found.emplace_back(name.substr(prefix.size()), tensor);
  }
  return found;
}

StateDict state_of_rank(const Checkpoint& checkpoint, int rank) {
  return with_prefix_removed(checkpoint.state, "rank" + std::to_string(rank) + ".");
}

}  // namespace lockstep
