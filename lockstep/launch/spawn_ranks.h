#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/spawn.h"

namespace lockstep::launch {

enum class SpawnRole { parent, worker, worker_of_a_later_call };

/// How a function of the public face spawns.
struct SpawnCall {
  std::string name = "spawn";  ///< In messages.
  /// What to do about a call in a process that is a spawned rank already.
  std::string once = "let only the first process spawn: if (spawn(n)) return 0;";
  /// SpawnOptions::stdout_ranks where the options do not say.
  std::optional<std::set<int>> stdout_ranks = {};
  /// Rank 0 has our standard input, which the caller does not read.
  bool passes_input = false;
  /// The caller prints the failure where the workers' standard error went. So what stands there is
  /// not repeated, and of a rank that has reported its failure its own words are enough.
  bool prints_failure = false;
  std::string how_to_go_on = {};  ///< See LaunchPlan, here and below.
  std::vector<int> signals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
  /// What a worker does in place of this program's `main`. It calls the function that spawns again,
  /// which returns there as in a worker. Its result is the exit code, and it must not throw.
  /// The workers are then forks of this process, which save the loading of LibTorch. Where forks
  /// cannot go on (see supervisor.h) they execute the program. None: they always do.
  std::function<int()> body = {};
  /// The workers share a GenerationFolder, in which they may announce that they go on without one
  /// that fails. See LaunchPlan::generation_folder.
  bool recovers = false;
};

/// What the two functions `spawn` and `start` share. Returns as `spawn` does: in the parent when
/// all workers have ended with 0. Throws as `spawn`.
SpawnRole spawn_ranks(int nprocs, const SpawnOptions& options, const SpawnCall& call);

}  // namespace lockstep::launch
