#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/host_agent.h"

namespace lockstep::launch {

/// Where a worker finds the folder of its launcher. Not set: a failure ends the job's attempt.
inline constexpr const char* kGenerationFolderVariable = "LOCKSTEP_GENERATION_FOLDER";

/// Who trains together from now on.
struct Generation {
  int64_t number = 0;  ///< From 0, in which all workers are.
  std::vector<int>
      members;  ///< Workers by the RANK that they were started with; in ascending order.
  /// Of a job of several hosts. The members are those of this host.
  std::optional<HostGeneration> of_hosts = {};
};

/// The folder by which a launcher tells the workers of its host of each new generation, and a
/// worker that it can go on in one. It needs no store and no thread, and a look costs a
/// microsecond. The launcher alone writes generations, so all workers read the same.
class GenerationFolder {
 public:
  explicit GenerationFolder(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// A worker says that it joins later generations of so many members. Empty: of any number.
  /// Throws SystemError.
  void announce(int worker, const std::set<int>& sizes = {}) const;
  bool has_announced(int worker) const { return is_there(kWorker, worker); }
  /// Whether the worker, which has announced itself, joins a generation of so many members.
  bool accepts(int worker, size_t members) const;
  /// A worker says that it is in this generation now.
  void join(int worker, int64_t number) const { write(joined(number), worker); }
  bool has_joined(int worker, int64_t number) const { return is_there(joined(number), worker); }
  /// A worker says that a call between ranks has failed in this generation.
  void leave(int worker, int64_t number) const { write(left(number), worker); }
  bool has_left(int worker, int64_t number) const { return is_there(left(number), worker); }
  /// A new process takes the worker's place, which has announced nothing yet.
  void forget(int worker) const;

  /// The launcher says that this generation begins when new processes have come.
  void promise(int64_t number) const { write(kPromised, number); }
  bool is_promised(int64_t number) const { return is_there(kPromised, number); }
  /// Generations are numbered without a gap. Number 0 is published for several hosts only. Throws
  /// SystemError.
  void publish(const Generation& generation) const;
  /// Number 0: without members, where it was not published.
  Generation first() const;
  /// Whether there is a generation after this one.
  bool has_after(int64_t number) const;
  /// The newest one after `number`.
  std::optional<Generation> newest_after(int64_t number) const;

 private:
  static constexpr const char* kWorker = "worker";
  static constexpr const char* kPromised = "promised";
  static std::string joined(int64_t number) { return "joined-" + std::to_string(number); }
  static std::string left(int64_t number) { return "left-" + std::to_string(number); }

  std::filesystem::path file_of(const std::string& what, int64_t number) const;
  bool is_there(const std::string& what, int64_t number) const;
  void write(const std::string& what, int64_t number, const std::string& content = {}) const;
  Generation read(int64_t number) const;

  std::filesystem::path folder_;
};

}  // namespace lockstep::launch
