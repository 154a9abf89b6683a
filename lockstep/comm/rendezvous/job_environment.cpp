#include "lockstep/comm/rendezvous/job_environment.h"

#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <regex>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr uint16_t kDefaultPort = 29500;  // PyTorch's own
// Derived ports lie below Linux's ephemeral range, which begins at 32768.
constexpr uint32_t kFirstDerivedPort = 15000;
constexpr uint32_t kDerivedPorts = 15000;

/// Variables by name, with the name in every complaint.
class Variables {
 public:
  explicit Variables(const Lookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const { return lookup_(name); }
  bool has(const std::string& name) const { return lookup_(name).has_value(); }

  std::optional<int> number(const std::string& name, int minimum, int maximum = INT32_MAX) const {
    const auto value = lookup_(name);
    if (!value) return std::nullopt;
    const auto parsed = parse_int(*value);
    if (!parsed || *parsed < minimum || *parsed > maximum) {
      throw UsageError("environment variable " + name + "='" + *value +
                           "': expected a whole number from " + std::to_string(minimum) +
                           (maximum == INT32_MAX ? "" : " to " + std::to_string(maximum)),
                       "launchers set it: start the program by one (`lockstep run`, torchrun, "
                       "srun, mpirun), or unset it");
    }
    return static_cast<int>(*parsed);
  }

  /// The same; -1 where it is unset.
  int number_or_unknown(const std::string& name, int minimum) const {
    return number(name, minimum).value_or(-1);
  }

  bool in_slurm_step() const { return is_slurm_step(lookup_); }

  /// The first of several names that is set, or none.
  std::optional<std::string> first_of(const std::vector<std::string>& names) const {
    for (const auto& name : names) {
      if (has(name)) return name;
    }
    return std::nullopt;
  }

 private:
  const Lookup& lookup_;
};

/// What one launcher says, and by which variables.
struct Claim {
  JobEnvironment job;  ///< Without rank and size.
  std::string rank_name, size_name;
  std::optional<int> rank, size;
  int nodes = -1;

  bool complete() const { return rank && size; }
  /// A job of one process, such as a shell within a Slurm allocation, contradicts nobody.
  bool trivial() const { return complete() && *size == 1; }
  std::string text() const {
    return (rank ? rank_name + "=" + std::to_string(*rank) : rank_name + " unset") + " " +
           (size ? size_name + "=" + std::to_string(*size) : size_name + " unset");
  }
};

Claim claim_of(const std::string& launcher, const Variables& env, const std::string& rank_name,
               const std::string& size_name) {
  Claim claim;
  claim.job.launcher = launcher;
  claim.rank_name = rank_name;
  claim.size_name = size_name;
  claim.rank = env.number(rank_name, 0);
  claim.size = env.number(size_name, 1);
  return claim;
}

std::optional<Claim> torchrun_claim(const Variables& env) {
  if (!env.has("RANK") && !env.has("WORLD_SIZE")) return std::nullopt;
  const bool ours = env.has("LOCKSTEP_RUN_TOKEN") || env.has("LOCKSTEP_SPAWNED_BY");
  Claim claim = claim_of(ours ? "lockstep" : "torchrun", env, "RANK", "WORLD_SIZE");
  claim.job.local_rank = env.number_or_unknown("LOCAL_RANK", 0);
  claim.job.local_size = env.number_or_unknown("LOCAL_WORLD_SIZE", 1);
  claim.job.node_rank = env.number_or_unknown("GROUP_RANK", 0);
  claim.nodes = env.number_or_unknown("GROUP_WORLD_SIZE", 1);
  return claim;
}

// Slurm's "2(x3),1": tasks on each node.
int tasks_on_node(const std::string& text, int node) {
  static const std::regex part(R"((\d{1,9})(?:\(x(\d{1,9})\))?)");
  for (std::sregex_iterator it(text.begin(), text.end(), part), end; it != end; ++it) {
    node -= (*it)[2].matched ? std::stoi((*it)[2]) : 1;
    if (node < 0) return std::stoi((*it)[1]);
  }
  return -1;
}

/// The shell of `srun --pty bash`, for a person. The step's other tasks read nothing and have
/// ended.
bool is_shell_of_step(const Lookup& lookup) {
  const auto task = lookup("SLURM_TASK_PID");
  const auto pid = task ? parse_int(*task) : std::nullopt;
  const std::string file = "/proc/" + std::to_string(pid.value_or(0)) + "/cmdline";
  if (!pid || !lookup("SLURM_PTY_PORT") || !std::filesystem::exists(file)) return false;
  static const std::regex shell(R"(-?[^\0]*sh\0(-[a-zA-Z-]*\0)*)");
  const std::string words = read_file(file);
  return std::regex_match(words, shell) && words.find(std::string("-c\0", 3)) == std::string::npos;
}

bool is_step_number(const std::string& text) {
  // slurm.h: the steps of batch scripts, interactive shells and the like have the last numbers.
  constexpr int64_t kFirstOfSlurmsOwn = 0xfffffff0;
  const auto number = parse_int(text);
  return number && *number >= 0 && *number < kFirstOfSlurmsOwn;
}

std::optional<Claim> slurm_claim(const Variables& env) {
  if (!env.has("SLURM_PROCID") || !env.in_slurm_step()) return std::nullopt;
  const auto size_name = env.first_of({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"});
  Claim claim = claim_of("slurm", env, "SLURM_PROCID", size_name.value_or("SLURM_NTASKS"));
  claim.job.local_rank = env.number_or_unknown("SLURM_LOCALID", 0);
  claim.job.node_rank = env.number_or_unknown("SLURM_NODEID", 0);
  if (const auto name = env.first_of({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"})) {
    claim.nodes = env.number_or_unknown(*name, 1);
  }
  if (claim.nodes == 1) claim.job.node_rank = 0;
  const auto tasks = env.first_of({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (tasks && claim.job.node_rank >= 0) {
    claim.job.local_size = tasks_on_node(*env.text(*tasks), claim.job.node_rank);
  }
  if (claim.nodes == 1 && claim.size) claim.job.local_size = *claim.size;
  return claim;
}

std::optional<Claim> openmpi_claim(const Variables& env) {
  if (!env.has("OMPI_COMM_WORLD_RANK") || !env.has("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  Claim claim = claim_of("openmpi", env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  claim.job.local_rank = env.number_or_unknown("OMPI_COMM_WORLD_LOCAL_RANK", 0);
  claim.job.local_size = env.number_or_unknown("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  // Open MPI does not number its nodes; OMPI_COMM_WORLD_NODE_RANK is a rank within one.
  if (claim.job.local_size == *claim.size) {
    claim.nodes = 1;
    claim.job.node_rank = 0;
  }
  return claim;
}

/// A launcher of which no more than its variables is known.
struct PlainLauncher {
  const char *name, *rank, *size, *local_rank, *local_size, *nodes, *job;
};
// What says most comes first: several of them set PMI's variables, too.
constexpr PlainLauncher kPlainLaunchers[] = {
    {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE", "", "LSB_JOBID"},
    {"flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", "FLUX_JOB_NNODES",
     "FLUX_JOB_ID"},
    {"mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", "", "MPIRUN_ID"},
    {"pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "", "PALS_APID"},
    {"mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", "PMI_JOBID"},
    // PMIx tells the size to its clients alone. Whoever knows it may set WORLD_SIZE.
    {"pmix", "PMIX_RANK", "WORLD_SIZE", "", "", "", "PMIX_NAMESPACE"}};

const PlainLauncher* plain_launcher(const std::string& name) {
  const auto* found = std::find_if(std::begin(kPlainLaunchers), std::end(kPlainLaunchers),
                                   [&](const auto& one) { return one.name == name; });
  return found == std::end(kPlainLaunchers) ? nullptr : found;
}

std::optional<Claim> plain_claim(const Variables& env) {
  for (const auto& one : kPlainLaunchers) {
    if (!env.has(one.rank)) continue;
    // Slurm gives PMI's and PMIx's variables to an allocation's shell, too.
    if (env.has("SLURM_JOB_ID") && !env.in_slurm_step() && !env.has(one.local_rank)) continue;
    Claim claim = claim_of(one.name, env, one.rank, one.size);
    claim.job.local_rank = env.number_or_unknown(one.local_rank, 0);
    claim.job.local_size = env.number_or_unknown(one.local_size, 1);
    claim.nodes = env.number_or_unknown(one.nodes, 1);
    if (claim.nodes == 1 && claim.size) claim.job.local_size = *claim.size;
    if (claim.size && claim.job.local_size == *claim.size) claim.job.node_rank = 0;
    return claim;
  }
  return std::nullopt;
}

/// The process that has started all ranks of this host, by the socket on which it serves them.
std::optional<std::string> starter_of_host(const Variables& env) {
  const auto fd = env.number("PMI_FD", 0);
  ucred peer{};
  socklen_t size = sizeof peer;
  if (!fd || getsockopt(*fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0)
    return std::nullopt;
  return std::to_string(peer.pid);
}

[[noreturn]] void throw_contradiction(const Claim& a, const Claim& b) {
  throw UsageError(
      "the environment holds the variables of two launchers that disagree: " + a.text() + " (" +
          a.job.launcher + "), " + b.text() + " (" + b.job.launcher + ")",
      "unset those that do not hold");
}

bool agree(const Claim& a, const Claim& b) {
  return (!a.rank || !b.rank || *a.rank == *b.rank) && (!a.size || !b.size || *a.size == *b.size);
}

void fill_in(Claim& claim, const Claim& other) {
  if (!claim.rank) claim.rank = other.rank;
  if (!claim.size) claim.size = other.size;
  if (claim.job.local_rank < 0) claim.job.local_rank = other.job.local_rank;
  if (claim.job.local_size < 0) claim.job.local_size = other.job.local_size;
  if (claim.job.node_rank < 0) claim.job.node_rank = other.job.node_rank;
  if (claim.nodes < 0) claim.nodes = other.nodes;
}

std::optional<Claim> decide(const Variables& env) {
  std::vector<Claim> claims;
  for (auto read : {torchrun_claim, slurm_claim, openmpi_claim}) {
    if (auto claim = read(env)) claims.push_back(std::move(*claim));
  }
  // PMIx's rank alone says nothing new to one who knows rank and size.
  if (auto claim = plain_claim(env))
    if (claim->complete() || claims.empty() || !claims.front().complete())
      claims.push_back(std::move(*claim));
  if (claims.empty()) return std::nullopt;
  Claim claim = claims.front();
  // torchrun and `lockstep run` start their workers within whatever started them.
  const bool innermost = env.has("TORCHELASTIC_RUN_ID") || claim.job.launcher == "lockstep";
  if (innermost && claim.complete()) return claim;
  for (size_t i = 1; i < claims.size(); ++i) {
    const Claim& other = claims[i];
    if (claim.complete() && other.trivial()) continue;
    if (claim.trivial() && i == 1 && claim.rank_name != "RANK") {
      claim = other;
      continue;
    }
    if (!agree(claim, other)) throw_contradiction(claim, other);
    fill_in(claim, other);
  }
  return claim;
}

void check_range(const Claim& claim) {
  if (!claim.complete()) {
    const bool lacks_rank = !claim.rank;
    throw UsageError(
        "environment variable " + (lacks_rank ? claim.rank_name : claim.size_name) +
            " is not set, but " + (lacks_rank ? claim.size_name : claim.rank_name) +
            " is: " + claim.job.launcher + " has started this process as a rank",
        "set both, or start the program by `lockstep run` or torchrun, which do. For a "
        "job of this process alone unset what is there");
  }
  if (*claim.rank >= *claim.size) {
    throw UsageError("rank out of range: " + claim.text() + ", where ranks go from 0 to " +
                         std::to_string(*claim.size - 1),
                     "launchers set both: start the program by one (`lockstep run`, torchrun, "
                     "srun, mpirun), or unset them for a job of one process");
  }
  if (claim.job.local_rank >= 0 && claim.job.local_size >= 0 &&
      claim.job.local_rank >= claim.job.local_size) {
    throw UsageError("local rank out of range: " + std::to_string(claim.job.local_rank) + " of " +
                         std::to_string(claim.job.local_size) + " ranks on this host (" +
                         claim.job.launcher + "'s variables)",
                     "a launcher sets them so that they fit; unset what was set by hand");
  }
}

// The same for every rank of one job, and another for most other jobs.
uint16_t derived_port(const std::string& job) {
  return static_cast<uint16_t>(kFirstDerivedPort + fnv1a(job) % kDerivedPorts);
}

void read_slurm_allocation(const Variables& env, JobEnvironment& job) {
  const auto id = env.first_of({"SLURM_JOB_ID", "SLURM_JOBID"});
  if (!id || env.in_slurm_step()) return;
  job.slurm_allocation = "allocation " + *env.text(*id);
  const auto tasks = env.first_of({"SLURM_NTASKS", "SLURM_NPROCS"});
  if (tasks) job.slurm_tasks = env.number(*tasks, 1).value_or(0);
}

void read_slurm_master(const Variables& env, JobEnvironment& job) {
  if (job.master_addr.empty()) {
    const auto list = env.first_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    if (job.single_host) {
      job.master_addr = "127.0.0.1";
    } else if (list) {
      job.master_addr = first_slurm_node(*env.text(*list));
    } else {
      throw UsageError("Slurm's variables lack SLURM_STEP_NODELIST, which names the first host",
                       "start the program by srun, or set MASTER_ADDR to the host of rank 0");
    }
  }
  if (job.master_port != 0) return;
  const auto id = env.first_of({"SLURM_JOB_ID", "SLURM_JOBID"});
  const auto step = env.first_of({"SLURM_STEP_ID", "SLURM_STEPID"});
  job.master_port =
      id ? derived_port(*env.text(*id) + "." + (step ? *env.text(*step) : "0")) : kDefaultPort;
}

// Who started the ranks does not know where rank 0 listens: it is found out when they meet.
void read_openmpi_master(const Variables& env, JobEnvironment& job) {
  if (job.master_addr.empty() && job.single_host) job.master_addr = "127.0.0.1";
  if (!job.master_addr.empty() && job.master_port != 0) return;
  job.master_unknown = true;
  const auto id =
      env.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"});
  const auto folder = env.text("PMIX_SERVER_TMPDIR");
  if (id && folder && job.single_host)
    job.meeting_file = *folder + "/lockstep-store." + *env.text(*id);
  if (job.master_port == 0) job.master_port = id ? derived_port(*env.text(*id)) : kDefaultPort;
}

// On one host all derive a port from what numbers the job there.
void read_plain_master(const Variables& env, const PlainLauncher& launcher, JobEnvironment& job) {
  if (job.master_addr.empty() && job.single_host) job.master_addr = "127.0.0.1";
  if (job.master_port != 0) return;
  auto id = env.text(launcher.job);
  if (!id && job.single_host) id = starter_of_host(env);
  if (id) job.master_port = derived_port(launcher.name + *id);
  if (!id && !job.single_host) job.master_port = kDefaultPort;
}

void read_master(const Variables& env, JobEnvironment& job) {
  const auto port = env.text("MASTER_PORT");
  const bool of_a_service = port && is_service_port(*port);
  if (port && !of_a_service)
    job.master_port = static_cast<uint16_t>(env.number("MASTER_PORT", 1, 65535).value());
  if (const auto address = env.text("MASTER_ADDR")) job.master_addr = without_brackets(*address);
  if (job.world_size == 1 && !job.agent_store) return;
  if (!job.master_addr.empty()) check_host("environment variable MASTER_ADDR", job.master_addr);
  if (const auto* launcher = plain_launcher(job.launcher)) read_plain_master(env, *launcher, job);
  if (job.launcher == "slurm") return read_slurm_master(env, job);
  if (job.launcher == "openmpi") return read_openmpi_master(env, job);
  for (const bool missing_port : {false, true}) {
    if (missing_port ? job.master_port != 0 : !job.master_addr.empty()) continue;
    if (missing_port && of_a_service)
      throw UsageError("environment variable MASTER_PORT=" + *port +
                           " is no port: Kubernetes sets it for a Service named 'master'",
                       "set MASTER_PORT in the pod's own env, name the Service otherwise, or give "
                       "the pod enableServiceLinks: false");
    throw UsageError(
        std::string("environment variable ") + (missing_port ? "MASTER_PORT" : "MASTER_ADDR") +
            " is not set: the ranks of a job of " + std::to_string(job.world_size) +
            " meet there, and the variables of their launcher (" + job.launcher + ") do not tell",
        "set it to where rank 0 listens, or start the program by `lockstep run` or "
        "torchrun, which do");
  }
}

}  // namespace

bool is_service_port(const std::string& text) {
  return text.starts_with("tcp://");
}

bool is_slurm_step(const Lookup& lookup) {
  if (is_shell_of_step(lookup)) return false;
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEPID"}) {
    if (const auto number = lookup(name)) return is_step_number(*number);
  }
  return false;
}

std::string first_slurm_node(const std::string& list) {
  static const std::regex first(R"((?:[^,[\]]|\[\w[^[\]]*\])+(?=,|$))");
  static const std::regex numbers(R"(\[(\w+)[^\]]*\])");
  std::smatch node;
  if (std::regex_search(list, node, first, std::regex_constants::match_continuous))
    return std::regex_replace(node.str(), numbers, "$1");
  throw UsageError("Slurm's node list '" + list +
                   "' does not parse: expected names such as node[01-03,7],gpu-a");
}

JobEnvironment read_job_environment(const Lookup& lookup) {
  const Variables env(lookup);
  const auto claim = decide(env);
  if (!claim) {
    JobEnvironment alone;
    read_slurm_allocation(env, alone);
    return alone;
  }
  check_range(*claim);
  JobEnvironment job = claim->job;
  job.rank = *claim->rank;
  job.world_size = *claim->size;
  job.restart_count = env.number("TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  const auto agent = env.text("TORCHELASTIC_USE_AGENT_STORE");
  job.agent_store = agent && to_lower(*agent) == "true" && claim->rank_name == "RANK";
  job.single_host = claim->nodes == 1 || job.local_size == job.world_size || job.world_size == 1;
  read_master(env, job);
  if (is_loopback_host(job.master_addr)) job.single_host = true;
  return job;
}

JobEnvironment read_job_environment() {
  return read_job_environment([](const std::string& name) { return env_string(name); });
}

}  // namespace lockstep
