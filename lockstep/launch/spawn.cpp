#include "lockstep/launch/spawn.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/comm/store_host.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/launch/room_for_ranks.h"
#include "lockstep/launch/variables.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

enum class Role { parent, worker, worker_of_a_later_call };

/// What this process is in its `call`th call of spawn, counted from 1: the worker of a program's
/// second spawn passes by the first, whose work is done.
Role role_in(int64_t call) {
  const auto own_call = env_int(launch::kSpawnCallVariable, 1);
  if (env_string(launch::kSpawnVariable) && own_call) {
    if (call < *own_call) return Role::worker_of_a_later_call;
    if (call == *own_call) return Role::worker;
    throw UsageError("spawn was called in a process that is itself a spawned rank (RANK=" +
                         env_string("RANK").value_or("?") + ")",
                     "let only the first process spawn: if (spawn(n)) return 0;");
  }
  return read_job_environment().started_as_rank() ? Role::worker : Role::parent;
}

/// Launchers and schedulers set the same variables for different things: what they were taken for.
void tell_role(Role role, int nprocs) {
  if (env_string(launch::kSpawnVariable)) return;
  const auto job = read_job_environment();
  const std::string call = "spawn of " + std::to_string(nprocs) + ": ";
  if (role == Role::worker && job.world_size == 1 && nprocs > 1) {
    const std::string launcher = job.launcher == "lockstep" ? "lockstep run" : job.launcher;
    log_warning(call + "none is started, as " + launcher +
                " has started this process as the only rank");
  }
  if (role != Role::parent) return;
  if (!job.slurm_allocation.empty()) {
    log_info(call + "they start on this host, as this is the shell of Slurm's " +
             job.slurm_allocation + " and no step; srun starts ranks on all its hosts");
  } else if (job.launcher == "slurm") {
    log_info(call + "they start on this host, as this is the only task of a Slurm step");
  }
}

int64_t next_call() {
  static std::atomic<int64_t> calls{0};
  return ++calls;
}

std::vector<std::string> own_command_line() {
  auto words = split(read_file("/proc/self/cmdline"), '\0');
  words.pop_back();  // every word ends in a zero
  return words;
}

/// /proc/self/exe itself always works, but shows as "exe" in lists of processes.
std::string own_program() {
  std::error_code failure;
  const auto path = fs::read_symlink("/proc/self/exe", failure);
  return !failure && fs::exists(path, failure) ? path.string() : "/proc/self/exe";
}

launch::RankLayout layout_of(int nprocs, const SpawnOptions& options) {
  launch::RankLayout layout;
  layout.local_size = nprocs;
  layout.first_rank = options.first_rank < 0 ? 0 : options.first_rank;
  layout.world_size = options.world_size < 0 ? nprocs : options.world_size;
  if (nprocs < 1) throw UsageError("spawn of " + std::to_string(nprocs) + " processes");
  if (layout.first_rank + nprocs > layout.world_size) {
    throw UsageError("spawn of ranks " + std::to_string(layout.first_rank) + " to " +
                         std::to_string(layout.first_rank + nprocs - 1) + " in a job of " +
                         std::to_string(layout.world_size),
                     "ranks go from 0 to the number of all processes of all hosts, less 1");
  }
  layout.nodes = (layout.world_size + nprocs - 1) / nprocs;
  layout.node_rank = layout.first_rank / nprocs;
  layout.agent_store = layout.world_size == nprocs;
  layout.run_id = random_hex(16);
  const auto address =
      options.master_addr.empty() ? env_string("MASTER_ADDR") : options.master_addr;
  const auto port = options.master_port != 0 ? std::optional<int64_t>(options.master_port)
                                             : env_int("MASTER_PORT", 1, 65535);
  if (!layout.agent_store && (!address || !port)) {
    throw UsageError("several hosts, but no address of rank 0",
                     "give its address and port in SpawnOptions, or MASTER_ADDR and MASTER_PORT");
  }
  layout.master_addr = without_brackets(address.value_or("127.0.0.1"));
  layout.master_port = static_cast<uint16_t>(port.value_or(0));
  return layout;
}

launch::WorkerPlan worker_plan(const launch::RankLayout& layout, int local_rank, int64_t call,
                               const std::vector<std::string>& argv, const fs::path& folder) {
  launch::WorkerPlan plan;
  plan.rank = layout.first_rank + local_rank;
  plan.local_rank = local_rank;
  plan.file = own_program();
  plan.argv = argv;
  plan.error_file = folder / (std::to_string(local_rank) + ".json");
  plan.env = launch::rank_environment(layout, local_rank, plan.error_file.string());
  plan.env.emplace_back(launch::kSpawnVariable, std::to_string(getpid()));
  plan.env.emplace_back(launch::kSpawnCallVariable, std::to_string(call));
  plan.unset = {"LOCKSTEP_LAUNCHER"};
  plan.out.inherit = true;
  plan.err.console = true;
  return plan;
}

void run_parent(int nprocs, const SpawnOptions& options, int64_t call) {
  auto layout = layout_of(nprocs, options);
  launch::make_room_for_ranks(layout, {});
  UniqueFd listener;
  launch::LaunchPlan plan;
  if (layout.agent_store) {
    listener = launch::listen_for_ranks(layout);
    plan.serve = [&] { return host_store(listener.release()); };
  }
  auto argv = own_command_line();
  if (!options.args.empty()) {
    argv.resize(1);
    argv.insert(argv.end(), options.args.begin(), options.args.end());
    call = 1;  // another command line, another way through the program
  }
  const TemporaryDirectory folder("lockstep-spawn");
  for (int i = 0; i < nprocs; ++i) {
    plan.workers.push_back(worker_plan(layout, i, call, argv, folder.path()));
  }
  plan.scratch = folder.path();
  plan.grace = options.grace;
  launch::launch(plan);
}

[[noreturn]] void run_worker(const std::function<void(int)>& worker) {
  int code = kExitSuccess;
  try {
    worker(static_cast<int>(
        env_int("LOCAL_RANK", 0).value_or(std::max(0, read_job_environment().local_rank))));
  } catch (const std::exception& error) {
    code = exit_code_of(error);
    launch::write_error_file(error);
    if (!launch::parent_reports_errors()) std::fprintf(stderr, "error: %s\n", error.what());
  }
  std::exit(code);
}

}  // namespace

bool spawn(int nprocs, const SpawnOptions& options) {
  const auto call = next_call();
  const auto role = role_in(call);
  tell_role(role, nprocs);
  if (role == Role::parent) run_parent(nprocs, options, call);
  return role != Role::worker;
}

void spawn(const std::function<void(int local_rank)>& worker, int nprocs,
           const SpawnOptions& options) {
  const auto call = next_call();
  const auto role = role_in(call);
  tell_role(role, nprocs);
  if (role == Role::parent) run_parent(nprocs, options, call);
  if (role == Role::worker) run_worker(worker);
}

}  // namespace lockstep
