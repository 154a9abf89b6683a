#include "lockstep/launch/generation_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep::launch {
namespace {

bool is_there(const std::filesystem::path& path) {
  return ::access(path.c_str(), F_OK) == 0;
}

/// Not flushed to the disk: nobody reads it after the job.
void write_new_file(const std::filesystem::path& path, const std::string& content) {
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file) throw SystemError("cannot write " + path.string(), errno);
  write_all(file.get(), content.data(), content.size(), path);
}

std::string joined(int64_t number) {
  return "joined-" + std::to_string(number);
}

std::string left(int64_t number) {
  return "left-" + std::to_string(number);
}

}  // namespace

std::filesystem::path GenerationFolder::file_of(const std::string& what, int64_t number) const {
  return folder_ / (what + "-" + std::to_string(number));
}

/// Renamed into place, as the launcher reads it.
void GenerationFolder::announce(int worker, const std::set<int>& sizes) const {
  std::string text;
  for (const int size : sizes) text += std::to_string(size) + " ";
  const auto aside = file_of("worker-new", worker);
  write_new_file(aside, text);
  std::filesystem::rename(aside, file_of("worker", worker));
}

bool GenerationFolder::has_announced(int worker) const {
  return is_there(file_of("worker", worker));
}

bool GenerationFolder::accepts(int worker, size_t members) const {
  const auto sizes = split(read_file(file_of("worker", worker)), ' ');
  const auto is_it = [&](const auto& word) { return word == std::to_string(members); };
  return sizes.size() <= 1 || std::any_of(sizes.begin(), sizes.end(), is_it);
}

void GenerationFolder::join(int worker, int64_t number) const {
  write_new_file(file_of(joined(number), worker), {});
}

bool GenerationFolder::has_joined(int worker, int64_t number) const {
  return is_there(file_of(joined(number), worker));
}

void GenerationFolder::leave(int worker, int64_t number) const {
  write_new_file(file_of(left(number), worker), {});
}

bool GenerationFolder::has_left(int worker, int64_t number) const {
  return is_there(file_of(left(number), worker));
}

void GenerationFolder::forget(int worker) const {
  std::error_code ignored;
  std::filesystem::remove(file_of("worker", worker), ignored);
}

void GenerationFolder::promise(int64_t number) const {
  write_new_file(file_of("promised", number), {});
}

bool GenerationFolder::is_promised(int64_t number) const {
  return is_there(file_of("promised", number));
}

void GenerationFolder::publish(const Generation& generation) const {
  std::string text;
  for (const int member : generation.members) text += std::to_string(member) + " ";
  if (const auto& hosts = generation.of_hosts) {
    text += "\n";
    for (const int64_t number : {hosts->number, int64_t{hosts->first_rank},
                                 int64_t{hosts->world_size}, int64_t{hosts->master_port}})
      text += std::to_string(number) + " ";
    text += hosts->master_addr;
  }
  const auto aside = folder_ / "generation-new";
  write_new_file(aside, text);
  std::filesystem::rename(aside, file_of("generation", generation.number));
}

Generation GenerationFolder::read(int64_t number) const {
  Generation generation{.number = number, .members = {}};
  const auto lines = split(read_file(file_of("generation", number)), '\n');
  for (const auto& word : split(lines.at(0), ' ')) {
    if (const auto member = parse_int(word))
      generation.members.push_back(static_cast<int>(*member));
  }
  if (lines.size() < 2) return generation;
  const auto words = split(lines[1], ' ');
  const auto number_at = [&](size_t at) { return parse_int(words.at(at)).value_or(0); };
  generation.of_hosts = HostGeneration{.number = number_at(0),
                                       .first_rank = static_cast<int>(number_at(1)),
                                       .world_size = static_cast<int>(number_at(2)),
                                       .master_addr = words.at(4),
                                       .master_port = static_cast<uint16_t>(number_at(3))};
  return generation;
}

Generation GenerationFolder::first() const {
  return is_there(file_of("generation", 0)) ? read(0) : Generation{};
}

bool GenerationFolder::has_after(int64_t number) const {
  return is_there(file_of("generation", number + 1));
}

std::optional<Generation> GenerationFolder::newest_after(int64_t number) const {
  if (!has_after(number)) return std::nullopt;
  while (has_after(number)) ++number;
  return read(number);
}

}  // namespace lockstep::launch
