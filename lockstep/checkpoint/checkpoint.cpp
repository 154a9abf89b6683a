#include "lockstep/checkpoint/checkpoint.h"

#include <torch/version.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/data/content_reader.h"

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr char kFormat[] = "lockstep-checkpoint";
constexpr char kModelFile[] = "model.safetensors";
constexpr char kStateFile[] = "state.safetensors";
constexpr char kInfoFile[] = "state.json";
constexpr size_t kMostOfInfo = size_t{16} << 20;

std::string sha256_of(const fs::path& path) {
  return content_hash(path, Hasher::Algorithm::sha256, ContentOptions::Packing::plain);
}

json described(const fs::path& path) {
  return {{"bytes", fs::file_size(path)}, {"sha256", sha256_of(path)}};
}

json to_json(const CheckpointInfo& info) {
  json values = json::object();
  for (const auto& [name, value] : info.values) {
    if (std::isfinite(value)) values[name] = value;
  }
  return {{"format", kFormat},         {"version", kCheckpointVersion}, {"step", info.step},
          {"epoch", info.epoch},       {"batches", info.batches},       {"identity", info.identity},
          {"settings", info.settings}, {"values", std::move(values)}};
}

[[noreturn]] void damaged(const fs::path& folder, const std::string& what) {
  throw DamagedCheckpointError("checkpoint " + folder.string() + " is damaged: " + what,
                               "resume from an older one, or start anew with --resume none");
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
  const json document = json::parse(read_info_file(folder), nullptr, /*allow_exceptions=*/false);
  if (!document.is_object() || document.value("format", json()) != kFormat) {
    damaged(folder, std::string(kInfoFile) + " is not the description of a Lockstep checkpoint");
  }
  const json version = document.value("version", json());
  if (version != kCheckpointVersion) {
    throw CheckpointError("checkpoint " + folder.string() + " has version " + version.dump() +
                              " of the layout; this Lockstep reads version " +
                              std::to_string(kCheckpointVersion),
                          "read it with the Lockstep that wrote it");
  }
  if (document.value("checksum", json()) != checksum_of(document)) {
    damaged(folder, std::string(kInfoFile) + " does not match its own checksum");
  }
  return document;
}

void check_file(const fs::path& folder, const std::string& name, const json& expected) {
  const fs::path path = folder / name;
  if (!fs::exists(path)) damaged(folder, name + " is missing");
  const uint64_t bytes = fs::file_size(path);
  if (bytes != expected.at("bytes").get<uint64_t>()) {
    damaged(folder, name + " has " + std::to_string(bytes) + " bytes in place of " +
                        expected.at("bytes").dump());
  }
  const std::string sha256 = sha256_of(path);
  if (sha256 != expected.at("sha256").get<std::string>()) {
    damaged(folder, name + " has SHA-256 " + sha256 + " in place of " +
                        expected.at("sha256").get<std::string>());
  }
}

std::string differences_of(const std::set<std::string>& keys,
                           const std::map<std::string, std::string>& found,
                           const std::map<std::string, std::string>& expected) {
  const auto value_of = [](const std::map<std::string, std::string>& map, const std::string& key) {
    const auto place = map.find(key);
    return place == map.end() ? std::string("none") : "'" + place->second + "'";
  };
  std::string differences;
  for (const std::string& key : keys) {
    const std::string before = value_of(found, key);
    const std::string now = value_of(expected, key);
    if (before == now) continue;
    differences += (differences.empty() ? "" : "; ") + key + " " + before + " in the checkpoint, " +
                   now + " in this run";
  }
  return differences;
}

}  // namespace

void write_checkpoint(const fs::path& folder, const Checkpoint& checkpoint) {
  save_safetensors(folder / kModelFile, checkpoint.model, {{"format", "pt"}});
  save_safetensors(folder / kStateFile, checkpoint.state);
  json document = to_json(checkpoint.info);
  document["libtorch"] = TORCH_VERSION;
  document["files"] = {{kModelFile, described(folder / kModelFile)},
                       {kStateFile, described(folder / kStateFile)}};
  document["checksum"] = checksum_of(document);
  write_file_atomically(folder / kInfoFile, document.dump(2) + "\n");
  fsync_path(folder);
}

Checkpoint read_checkpoint(const fs::path& folder) {
  const json document = read_document(folder);
  Checkpoint checkpoint;
  try {
    for (const auto* name : {kModelFile, kStateFile}) {
      check_file(folder, name, document.at("files").at(name));
    }
    CheckpointInfo& info = checkpoint.info;
    info.step = document.at("step").get<int64_t>();
    info.epoch = document.at("epoch").get<int64_t>();
    info.batches = document.at("batches").get<int64_t>();
    info.libtorch = document.at("libtorch").get<std::string>();
    document.at("identity").get_to(info.identity);
    document.at("values").get_to(info.values);
    info.settings = document.value("settings", info.settings);
  } catch (const json::exception& error) {
    damaged(folder, std::string(kInfoFile) + ": " + error.what());
  }
  if (checkpoint.info.libtorch != TORCH_VERSION) {
    log_warning("checkpoint " + folder.string() + " was written with LibTorch " +
                checkpoint.info.libtorch + "; this is " + TORCH_VERSION);
  }
  checkpoint.model = load_safetensors(folder / kModelFile).tensors;
  checkpoint.state = load_safetensors(folder / kStateFile).tensors;
  return checkpoint;
}

void check_identity(const fs::path& folder, const std::map<std::string, std::string>& found,
                    const std::map<std::string, std::string>& expected) {
  std::set<std::string> keys;
  for (const auto& [key, value] : found) keys.insert(key);
  for (const auto& [key, value] : expected) keys.insert(key);
  const std::string differences = differences_of(keys, found, expected);
  if (differences.empty()) return;
  throw CheckpointError("checkpoint " + folder.string() + " is of another run: " + differences,
                        "run with the checkpoint's settings, or use another --checkpoint-dir");
}

std::string changed_settings(const std::map<std::string, std::string>& found,
                             const std::map<std::string, std::string>& expected) {
  std::set<std::string> keys;
  for (const auto& [key, value] : found) {
    if (expected.contains(key)) keys.insert(key);
  }
  return differences_of(keys, found, expected);
}

}  // namespace lockstep
