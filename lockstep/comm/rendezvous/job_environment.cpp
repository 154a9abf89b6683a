#include "lockstep/comm/rendezvous/job_environment.h"

#include <regex>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
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

bool is_step_number(const std::string& text) {
  // slurm.h: the steps of batch scripts, interactive shells and the like have the last numbers.
  constexpr int64_t kFirstOfSlurmsOwn = 0xfffffff0;
  const auto number = parse_int(text);
  return number && *number >= 0 && *number < kFirstOfSlurmsOwn;
}

std::optional<Claim> slurm_claim(const Variables& env) {
  const auto size_name = env.first_of({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"});
  if (!env.has("SLURM_PROCID") || !size_name) return std::nullopt;
  if (!env.in_slurm_step()) return std::nullopt;
  Claim claim = claim_of("slurm", env, "SLURM_PROCID", *size_name);
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
  if (claim.nodes == 1) claim.job.local_size = *claim.size;
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
    throw UsageError("environment variable " + (lacks_rank ? claim.rank_name : claim.size_name) +
                         " is not set, but " + (lacks_rank ? claim.size_name : claim.rank_name) +
                         " is",
                     "set both, or start the program by `lockstep run` or torchrun, which do");
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

void read_master(const Variables& env, JobEnvironment& job) {
  if (const auto address = env.text("MASTER_ADDR")) job.master_addr = without_brackets(*address);
  if (const auto port = env.number("MASTER_PORT", 1, 65535)) {
    job.master_port = static_cast<uint16_t>(*port);
  }
  if (job.world_size == 1 && !job.agent_store) return;
  if (job.launcher == "slurm") return read_slurm_master(env, job);
  if (job.launcher == "openmpi") return read_openmpi_master(env, job);
  for (const bool missing_port : {false, true}) {
    if (missing_port ? job.master_port != 0 : !job.master_addr.empty()) continue;
    throw UsageError(
        std::string("environment variable ") + (missing_port ? "MASTER_PORT" : "MASTER_ADDR") +
            " is not set: the ranks of a job of " + std::to_string(job.world_size) + " meet there",
        "set it to where rank 0 listens, or start the program by `lockstep run` or "
        "torchrun, which do");
  }
}

}  // namespace

bool is_slurm_step(const Lookup& lookup) {
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
