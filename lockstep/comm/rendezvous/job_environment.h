#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace lockstep {

/// This process's place in its job, as the launcher's variables say it.
struct JobEnvironment {
  /// "torchrun", "lockstep", "slurm", "openmpi", "mpich" (all of PMI, such as Intel MPI),
  /// "mvapich2", "pals", "flux", "jsrun", "pmix", "mpi", "none".
  std::string launcher = "none";
  int rank = 0;
  int world_size = 1;
  int local_rank = -1;      ///< -1: not said.
  int local_size = -1;      ///< -1: not said.
  int node_rank = -1;       ///< -1: not said.
  std::string master_addr;  ///< Empty: not needed (a group of one).
  uint16_t master_port = 0;
  /// The launcher serves the store at the master's address: rank 0 connects like all others.
  bool agent_store = false;
  /// All ranks are on this host, so listening sockets stay on loopback.
  bool single_host = false;
  /// Open MPI's variables do not say where rank 0 listens: see find_master. `master_port` is then
  /// one that all ranks derive alike, for want of a better one.
  bool master_unknown = false;
  /// Where rank 0 can tell the others on its host: in mpirun's own temporary folder. Empty:
  /// nowhere.
  std::string meeting_file;
  int restart_count = 0;  ///< How often the launcher has started this job's ranks anew.
  /// Where this is the shell of a Slurm allocation (sbatch, salloc): "allocation 4711". Empty where
  /// srun or another launcher has started this process.
  std::string slurm_allocation;
  int slurm_tasks = 0;  ///< Those that the allocation is for; 0: not said.

  /// A launcher has started this process as one of the job's ranks, so it starts none itself. Slurm
  /// starts a program as the only task of a step, too, that will start its ranks itself.
  bool started_as_rank() const {
    return launcher != "none" && !(launcher == "slurm" && world_size == 1);
  }
};

/// Looks up a variable; none when it is unset or empty.
using Lookup = std::function<std::optional<std::string>(const std::string&)>;

/// True for a task that srun has started: SLURM_STEP_ID is the number of its step. The shells that
/// sbatch and salloc start have the variables of a task as well (SLURM_PROCID=0), but no step. An
/// interactive step, by which salloc may start its shell, has none or one of Slurm's own numbers.
/// The shell of `srun --pty bash` counts as no task either: nobody is there but task 0.
bool is_slurm_step(const Lookup& lookup);

/// A Service of Kubernetes named "master" gives MASTER_PORT=tcp://10.0.0.1:80 to all pods.
bool is_service_port(const std::string& text);

/// Reads torchrun's variables (RANK, WORLD_SIZE, ...), else Slurm's, else Open MPI's, else those of
/// other launchers (PMI, ...), else a group of one. Where a launcher says a rank and no size, or
/// not where the ranks meet, that is a UsageError naming it: never a group of one. What one
/// launcher leaves out another may say. Slurm's variables count in a step only, see is_slurm_step.
/// Where two launchers disagree about rank or size, that is a UsageError naming the variables,
/// except where RANK comes from torchrun or `lockstep run`, which may themselves run under the
/// other.
///
/// Throws UsageError too for a missing or malformed variable and a rank out of range.
JobEnvironment read_job_environment(const Lookup& lookup);
/// The same of this process's environment.
JobEnvironment read_job_environment();

/// The first of Slurm's nodes: node01 of "node[01-03,7],gpu-a". Throws UsageError for a list that
/// does not parse.
std::string first_slurm_node(const std::string& list);

}  // namespace lockstep
