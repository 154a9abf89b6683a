#include "lockstep/launch/generation_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep::launch {
namespace {

using nlohmann::json;

constexpr const char* kGeneration = "generation";

}  // namespace

std::filesystem::path GenerationFolder::file_of(const std::string& what, int64_t number) const {
  return folder_ / (what + "-" + std::to_string(number));
}

bool GenerationFolder::is_there(const std::string& what, int64_t number) const {
  return ::access(file_of(what, number).c_str(), F_OK) == 0;
}

/// Renamed into place, as others read it. Not flushed to the disk: nobody reads it after the job.
void GenerationFolder::write(const std::string& what, int64_t number,
                             const std::string& content) const {
  const auto path = file_of(what, number), aside = file_of(what + "-new", number);
  const UniqueFd file(::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file) throw SystemError("cannot write " + path.string(), errno);
  write_all(file.get(), content.data(), content.size(), path);
  std::filesystem::rename(aside, path);
}

void GenerationFolder::announce(int worker, const std::set<int>& sizes) const {
  write(kWorker, worker, json(sizes).dump());
}

bool GenerationFolder::accepts(int worker, size_t members) const {
  const std::set<size_t> sizes = json::parse(read_file(file_of(kWorker, worker)));
  return sizes.empty() || sizes.contains(members);
}

void GenerationFolder::forget(int worker) const {
  std::error_code ignored;
  std::filesystem::remove(file_of(kWorker, worker), ignored);
}

void GenerationFolder::publish(const Generation& generation) const {
  json object = {{"members", generation.members}};
  if (const auto& hosts = generation.of_hosts)
    object["hosts"] = {hosts->number, hosts->first_rank, hosts->world_size, hosts->master_addr,
                       hosts->master_port};
  write(kGeneration, generation.number, object.dump());
}

Generation GenerationFolder::read(int64_t number) const {
  const json object = json::parse(read_file(file_of(kGeneration, number)));
  Generation generation{.number = number, .members = object.at("members")};
  if (const auto hosts = object.find("hosts"); hosts != object.end())
    generation.of_hosts = HostGeneration{.number = hosts->at(0),
                                         .first_rank = hosts->at(1),
                                         .world_size = hosts->at(2),
                                         .master_addr = hosts->at(3),
                                         .master_port = hosts->at(4)};
  return generation;
}

Generation GenerationFolder::first() const {
  return is_there(kGeneration, 0) ? read(0) : Generation{};
}

bool GenerationFolder::has_after(int64_t number) const {
  return is_there(kGeneration, number + 1);
}

std::optional<Generation> GenerationFolder::newest_after(int64_t number) const {
  if (!has_after(number)) return std::nullopt;
  while (has_after(number)) ++number;
  return read(number);
}

}  // namespace lockstep::launch
