#include "lockstep/base/process_identity.h"

#include <unistd.h>

#include <cstdint>
#include <filesystem>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

/// Two processes with the same place see each other's numbers.
std::string place() {
  std::error_code ignored;
  const auto processes = std::filesystem::read_symlink("/proc/self/ns/pid", ignored);
  return first_line("/proc/sys/kernel/random/boot_id") + "," + processes.string();
}

struct Stat {
  char state = 0;
  int64_t threads = 0;
  std::string start_time;

  /// A process whose main thread alone has ended shows as a zombie, but lives on in its others.
  bool has_ended() const { return state == 'X' || (state == 'Z' && threads <= 1); }
};

/// Fields 3, 20 and 22 of /proc/PID/stat; the second field may hold spaces and brackets.
Stat read_stat(const std::string& pid) {
  const std::string line = first_line("/proc/" + pid + "/stat");
  const size_t close = line.rfind(')');
  if (close == std::string::npos) return {};
  const auto fields = split(std::string_view(line).substr(close), ' ');
  if (fields.size() < 21) return {};
  return {fields[1][0], parse_int(fields[18]).value_or(0), fields[20]};
}

}  // namespace

std::string process_identity() {
  const std::string pid = std::to_string(getpid());
  return place() + " " + pid + " " + read_stat("self").start_time;
}

int process_number(const std::string& identity) {
  const auto parts = split(identity, ' ');
  return parts.size() == 3 ? static_cast<int>(parse_int(parts[1]).value_or(-1)) : -1;
}

std::string with_process(const std::string& name, const std::string& identity) {
  const int process = process_number(identity);
  return process > 0 ? name + " (process " + std::to_string(process) + ")" : name;
}

ProcessState process_state(const std::string& identity) {
  const auto parts = split(identity, ' ');
  if (parts.size() != 3 || parts[2].empty() || parts[0] != place()) return ProcessState::unknown;
  const Stat stat = read_stat(parts[1]);
  const bool gone = stat.state == 0 || stat.start_time != parts[2];
  return gone || stat.has_ended() ? ProcessState::ended : ProcessState::alive;
}

}  // namespace lockstep
