#include "lockstep/launch/spawn_ranks.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/comm/store.h"
#include "lockstep/launch/launcher.h"
#include "lockstep/launch/output.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/launch/supervisor.h"
#include "lockstep/launch/variables.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;
using Role = SpawnRole;

/// What this process is in its `number`th call of spawn, counted from 1: the worker of a program's
/// second spawn passes by the first, whose work is done.
Role role_in(int64_t number, const SpawnCall& call) {
  const auto own_call = env_int(kSpawnCallVariable, 1);
  if (env_string(kSpawnVariable) && own_call) {
    if (number < *own_call) return Role::worker_of_a_later_call;
    if (number == *own_call) return Role::worker;
    throw UsageError(call.name + " was called in a process that is itself a spawned rank (RANK=" +
                         env_string("RANK").value_or("?") + ")",
                     call.once);
  }
  return read_job_environment().started_as_rank() ? Role::worker : Role::parent;
}

/// Launchers and schedulers set the same variables for different things: what they were taken for.
void tell_role(Role role, int nprocs, const SpawnCall& call) {
  if (env_string(kSpawnVariable)) return;
  const auto job = read_job_environment();
  const std::string begin = call.name + " of " + std::to_string(nprocs) + ": ";
  if (role == Role::worker && job.world_size == 1 && nprocs > 1) {
    const std::string launcher = job.launcher == "lockstep" ? "lockstep run" : job.launcher;
    log_warning(begin + "none is started, as " + launcher +
                " has started this process as the only rank");
  }
  if (role != Role::parent) return;
  if (!job.slurm_allocation.empty()) {
    log_info(begin + "they start on this host, as this is a shell in Slurm's " +
             job.slurm_allocation + "; srun starts ranks on all its hosts");
  } else if (job.launcher == "slurm") {
    log_info(begin + "they start on this host, as this is the only task of a Slurm step");
  }
}

/// How often this process has called.
std::atomic<int64_t>& calls() {
  static std::atomic<int64_t> number{0};
  return number;
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

RankLayout layout_of(int nprocs, const SpawnOptions& options, const std::string& name) {
  RankLayout layout;
  layout.local_size = nprocs;
  layout.first_rank = options.first_rank < 0 ? 0 : options.first_rank;
  layout.world_size = options.world_size < 0 ? nprocs : options.world_size;
  if (nprocs < 1) {
    throw UsageError(name + " of " + std::to_string(nprocs) + " processes", "at least 1");
  }
  if (layout.first_rank + nprocs > layout.world_size) {
    throw UsageError(name + " of ranks " + std::to_string(layout.first_rank) + " to " +
                         std::to_string(layout.first_rank + nprocs - 1) + " in a job of " +
                         std::to_string(layout.world_size),
                     "ranks go from 0 to the number of all processes of all hosts, less 1");
  }
  layout.nodes = (layout.world_size + nprocs - 1) / nprocs;
  layout.node_rank = layout.first_rank / nprocs;
  layout.agent_store = layout.world_size == nprocs;
  layout.max_restarts = options.max_restarts;
  if (options.max_restarts < 0 || (options.max_restarts > 0 && !layout.agent_store)) {
    throw UsageError(name + ": max_restarts is " + std::to_string(options.max_restarts),
                     "expected 0 or more, and 0 with several hosts");
  }
  layout.run_id = random_hex(16);
  const bool of_a_service = is_service_port(env_string("MASTER_PORT").value_or(""));
  const auto variable = of_a_service ? std::nullopt : env_int("MASTER_PORT", 1, 65535);
  const auto port =
      options.master_port != 0 ? std::optional<int64_t>(options.master_port) : variable;
  auto address =
      !options.master_addr.empty() ? std::optional(options.master_addr) : env_string("MASTER_ADDR");
  // Nobody else can come there: the variable is left over from another job.
  const bool left_over = layout.agent_store && options.master_addr.empty() && address &&
                         (!port || !is_this_host(without_brackets(*address)));
  if (left_over) address.reset();
  if (!layout.agent_store && (!address || !port)) {
    throw UsageError("several hosts, but no address of rank 0",
                     "give its address and port in SpawnOptions, or MASTER_ADDR and MASTER_PORT" +
                         std::string(of_a_service ? ", which is a Kubernetes Service's here" : ""));
  }
  layout.master_addr = without_brackets(address.value_or("127.0.0.1"));
  check_host("MASTER_ADDR or SpawnOptions::master_addr", layout.master_addr);
  layout.master_port = static_cast<uint16_t>(port.value_or(0));
  layout.port_setting = options.master_port_flag.empty()
                            ? "MASTER_PORT or SpawnOptions::master_port"
                            : options.master_port_flag;
  return layout;
}

/// Whose standard output is shown; none: all of them.
std::optional<std::set<int>> stdout_ranks(int nprocs, const SpawnOptions& options,
                                          const SpawnCall& call) {
  if (!options.stdout_ranks) return call.stdout_ranks;
  for (const int rank : *options.stdout_ranks) {
    if (rank >= 0 && rank < nprocs) continue;
    throw UsageError(
        call.name + ": stdout_ranks has " + std::to_string(rank) + ", which is no local rank",
        "local ranks go from 0 to " + std::to_string(nprocs - 1));
  }
  return options.stdout_ranks;
}

WorkerPlan worker_plan(const RankLayout& layout, int local_rank, int64_t number,
                       const std::vector<std::string>& argv, const fs::path& folder) {
  WorkerPlan plan;
  plan.rank = layout.first_rank + local_rank;
  plan.local_rank = local_rank;
  plan.file = own_program();
  plan.argv = argv;
  plan.error_file = folder / (std::to_string(local_rank) + ".json");
  plan.env = rank_environment(layout, local_rank, plan.error_file.string());
  plan.env.emplace_back(kSpawnVariable, std::to_string(getpid()));
  plan.env.emplace_back(kSpawnCallVariable, std::to_string(number));
  plan.err.console = true;
  return plan;
}

/// What all attempts of a call have in common.
struct Parent {
  int nprocs;
  const SpawnOptions& options;
  const SpawnCall& call;
  int64_t number;
  std::optional<std::set<int>> shown;
  std::vector<std::string> argv;

  LaunchPlan plan_of(RankLayout layout, const fs::path& folder) const {
    LaunchPlan plan;
    if (layout.agent_store) {
      const auto listener = std::make_shared<UniqueFd>(listen_for_ranks(layout));
      plan.serve = [listener] {
        return tcp_store({.is_listener = true, .listen_fd = listener->release()}).native();
      };
    }
    const bool forks = call.body && forks_can_go_on();
    // Where one rank's output is shown, and another may take that rank's place.
    const bool follows = call.recovers && call.stdout_ranks && !options.stdout_ranks;
    for (int i = 0; i < nprocs; ++i) {
      plan.workers.push_back(worker_plan(layout, i, number, argv, folder));
      plan.workers.back().inherit_stdin =
          call.passes_input && layout.first_rank + i == 0 && input_is_ours();
      if (forks) {
        plan.workers.back().body = [this] {
          calls() = number - 1;  // As in a program that was executed, this call is the next one.
          return call.body();
        };
      }
      // What is not shown comes to us, who drop it, as in `lockstep run`.
      plan.workers.back().out.console = follows;
      plan.workers.back().out.inherit = !follows && (!shown || shown->count(i) > 0);
    }
    plan.shows_first_member = follows;
    plan.scratch = folder;
    if (call.recovers) plan.generation_folder = folder;
    plan.job = job_options(options.shutdown_timeout);
    plan.repeat_shown_lines = !call.prints_failure;
    plan.reports_suffice = call.prints_failure;
    plan.told_by = call.name + ": ";
    plan.how_to_go_on = call.how_to_go_on;
    plan.signals = call.signals;
    if (forks) std::fflush(nullptr);  // What our buffers hold is not for the forks to write.
    return plan;
  }
};

void run_parent(int nprocs, const SpawnOptions& options, const SpawnCall& call, int64_t number) {
  auto layout = layout_of(nprocs, options, call.name);
  Parent parent{
      nprocs, options, call, number, stdout_ranks(nprocs, options, call), own_command_line()};
  make_room_for_ranks(layout);
  if (!options.args.empty()) {
    parent.argv.resize(1);
    parent.argv.insert(parent.argv.end(), options.args.begin(), options.args.end());
    parent.number = 1;  // another command line, another way through the program
  }
  std::optional<TemporaryDirectory> folder;
  const auto plan_of = [&](int attempt) {
    folder.emplace("lockstep-spawn");
    layout.token = random_hex(8);
    layout.restart_count = attempt;
    return parent.plan_of(layout, folder->path());
  };
  launch(plan_of, options.max_restarts);
}

}  // namespace

SpawnRole spawn_ranks(int nprocs, const SpawnOptions& options, const SpawnCall& call) {
  const int64_t number = ++calls();
  const auto role = role_in(number, call);
  tell_role(role, nprocs, call);
  if (role == Role::parent) run_parent(nprocs, options, call, number);
  return role;
}

}  // namespace lockstep::launch
