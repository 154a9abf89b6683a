#include "lockstep/comm/rendezvous/job_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/poll_pause.h"

namespace lockstep {
namespace job_environment_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Map = std::map<std::string, std::string>;

JobEnvironment read(const Map& variables) {
  return read_job_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string failure(const Map& variables) {
  try {
    read(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

Map with(Map base, const Map& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Map kTorchrun = {{"RANK", "3"},
                       {"LOCAL_RANK", "1"},
                       {"WORLD_SIZE", "4"},
                       {"LOCAL_WORLD_SIZE", "2"},
                       {"GROUP_RANK", "1"},
                       {"GROUP_WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "10.1.2.3"},
                       {"MASTER_PORT", "29511"},
                       {"TORCHELASTIC_RUN_ID", "none"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"TORCHELASTIC_RESTART_COUNT", "2"}};

const Map kSlurm = {{"SLURM_PROCID", "3"},    {"SLURM_NTASKS", "5"},
                    {"SLURM_LOCALID", "1"},   {"SLURM_NODEID", "1"},
                    {"SLURM_NNODES", "3"},    {"SLURM_TASKS_PER_NODE", "2(x2),1"},
                    {"SLURM_JOB_ID", "4711"}, {"SLURM_STEP_NODELIST", "gpu[07-08,12]"},
                    {"SLURM_STEP_ID", "0"}};

// As sbatch gives them to the script of `#SBATCH --ntasks 4`.
const Map kBatchShell = {{"SLURM_PROCID", "0"},       {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "0"},      {"SLURM_NODEID", "0"},
                         {"SLURM_NNODES", "2"},       {"SLURM_TASKS_PER_NODE", "2(x2)"},
                         {"SLURM_JOB_ID", "4711"},    {"SLURM_JOB_NODELIST", "gpu[07-08]"},
                         {"SLURM_TASK_PID", "12345"}, {"SLURM_GTIDS", "0"}};

const Map kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                      {"OMPI_COMM_WORLD_NODE_RANK", "1"},  {"PMIX_NAMESPACE", "prterun-a-99@1"}};

TEST(JobEnvironment, WithoutLauncherIsAGroupOfOne) {
  const auto job = read({});
  EXPECT_EQ(job.launcher, "none");
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 1);
}

TEST(JobEnvironment, ReadsTorchrun) {
  const auto job = read(kTorchrun);
  EXPECT_EQ(job.launcher, "torchrun");
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_EQ(job.node_rank, 1);
  EXPECT_EQ(job.master_addr, "10.1.2.3");
  EXPECT_EQ(job.master_port, 29511);
  EXPECT_TRUE(job.agent_store);
  EXPECT_FALSE(job.single_host);
  EXPECT_EQ(job.restart_count, 2);
}

TEST(JobEnvironment, NamesOurOwnLauncher) {
  EXPECT_EQ(read(with(kTorchrun, {{"LOCKSTEP_RUN_TOKEN", "x"}})).launcher, "lockstep");
  EXPECT_EQ(read(with(kTorchrun, {{"LOCKSTEP_SPAWNED_BY", "12"}})).launcher, "lockstep");
}

TEST(JobEnvironment, OneHostIsKnownFromTheLocalSizeOrALoopbackMaster) {
  EXPECT_TRUE(read(with(kTorchrun, {{"GROUP_WORLD_SIZE", "1"}})).single_host);
  EXPECT_TRUE(read({{"RANK", "0"},
                    {"WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"MASTER_PORT", "1234"}})
                  .single_host);
  EXPECT_FALSE(read({{"RANK", "0"},
                     {"WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "10.0.0.1"},
                     {"MASTER_PORT", "1234"}})
                   .single_host);
}

TEST(JobEnvironment, ReadsSlurm) {
  const auto job = read(kSlurm);
  EXPECT_EQ(job.launcher, "slurm");
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 5);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_EQ(job.node_rank, 1);
  EXPECT_EQ(job.master_addr, "gpu07");
  EXPECT_FALSE(job.agent_store);
  EXPECT_FALSE(job.single_host);
}

TEST(JobEnvironment, SlurmsPortFollowsFromTheJobAndTheStep) {
  const auto port = [](const Map& more) { return read(with(kSlurm, more)).master_port; };
  EXPECT_EQ(port({}), port({{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}, {"SLURM_LOCALID", "0"}}));
  EXPECT_NE(port({}), port({{"SLURM_JOB_ID", "4712"}}));
  EXPECT_NE(port({}), port({{"SLURM_STEP_ID", "1"}}));
  EXPECT_GE(port({}), 1024);
  EXPECT_LT(port({}), 32768);
  EXPECT_EQ(port({{"MASTER_PORT", "4000"}}), 4000);
}

TEST(JobEnvironment, SlurmsLastNodeHasFewerTasks) {
  const auto job =
      read(with(kSlurm, {{"SLURM_PROCID", "4"}, {"SLURM_NODEID", "2"}, {"SLURM_LOCALID", "0"}}));
  EXPECT_EQ(job.local_size, 1);
}

TEST(JobEnvironment, SlurmsStepCountsNotTheJob) {
  const auto job = read(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "4"}}));
  EXPECT_EQ(job.world_size, 4);
}

TEST(JobEnvironment, SlurmOnOneNodeStaysOnLoopback) {
  const auto job = read(with(kSlurm, {{"SLURM_NNODES", "1"},
                                      {"SLURM_NODEID", "0"},
                                      {"SLURM_LOCALID", "3"},
                                      {"SLURM_STEP_NODELIST", "gpu07"}}));
  EXPECT_EQ(job.master_addr, "127.0.0.1");
  EXPECT_TRUE(job.single_host);
  EXPECT_EQ(job.local_size, 5);
}

TEST(JobEnvironment, ReadsOpenMpi) {
  const auto job = read(kOpenMpi);
  EXPECT_EQ(job.launcher, "openmpi");
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.node_rank, 0);
  EXPECT_EQ(job.master_addr, "127.0.0.1");
  EXPECT_NE(job.master_port, 0);
  EXPECT_EQ(job.master_port, read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}})).master_port);
}

TEST(JobEnvironment, OpenMpiDoesNotSayWhereRank0Listens) {
  const auto job = read(with(kOpenMpi, {{"PMIX_SERVER_TMPDIR", "/tmp/session"}}));
  EXPECT_TRUE(job.master_unknown);
  EXPECT_EQ(job.meeting_file, "/tmp/session/lockstep-store.prterun-a-99@1");
  EXPECT_EQ(read(kOpenMpi).meeting_file, "");
  const auto told = read(with(kOpenMpi, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "4000"}}));
  EXPECT_FALSE(told.master_unknown);
  EXPECT_EQ(told.master_port, 4000);
}

TEST(JobEnvironment, OpenMpiOnSeveralHostsHasNoFolderThatAllSee) {
  const Map hosts = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                    {"PMIX_SERVER_TMPDIR", "/tmp/session"}});
  EXPECT_TRUE(read(hosts).master_unknown);
  EXPECT_EQ(read(hosts).master_addr, "");
  EXPECT_EQ(read(hosts).meeting_file, "");
  const auto named = read(with(hosts, {{"MASTER_ADDR", "node1"}}));
  EXPECT_EQ(named.master_addr, "node1");
  EXPECT_TRUE(named.master_unknown);
  EXPECT_NE(named.master_port, 0);
}

/// As Hydra starts ranks, at a socket of its own.
struct HydraRank {
  int sockets[2] = {-1, -1};
  Map variables;
  HydraRank() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    variables = {{"PMI_RANK", "1"},
                 {"PMI_SIZE", "2"},
                 {"MPI_LOCALRANKID", "1"},
                 {"MPI_LOCALNRANKS", "2"},
                 {"PMI_FD", std::to_string(sockets[0])}};
  }
  ~HydraRank() {
    for (const int fd : sockets) ::close(fd);
  }
};

TEST(JobEnvironment, ReadsMpich) {
  const HydraRank first, second;
  const auto job = read(first.variables);
  EXPECT_EQ(job.launcher, "mpich");
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_TRUE(job.single_host);
  EXPECT_TRUE(job.started_as_rank());
  EXPECT_EQ(job.master_addr, "127.0.0.1");
  EXPECT_EQ(job.master_port,
            read(with(second.variables, {{"PMI_RANK", "0"}, {"MPI_LOCALRANKID", "0"}})).master_port)
      << "ranks of one host have one starter";
}

TEST(JobEnvironment, MpichOnSeveralHostsNeedsAnAddress) {
  const HydraRank rank;
  const Map hosts = with(rank.variables, {{"MPI_LOCALNRANKS", "1"}, {"MPI_LOCALRANKID", "0"}});
  EXPECT_THAT(failure(hosts), AllOf(HasSubstr("MASTER_ADDR"), HasSubstr("mpich")));
  const auto job = read(with(hosts, {{"MASTER_ADDR", "node1"}}));
  EXPECT_EQ(job.master_addr, "node1");
  EXPECT_EQ(job.master_port, 29500);
  const Map blind = with(rank.variables, {{"PMI_FD", "1000000"}});
  EXPECT_THAT(failure(blind), AllOf(HasSubstr("MASTER_PORT"), HasSubstr("mpich")));
}

TEST(JobEnvironment, ReadsOtherLaunchers) {
  const std::pair<std::string, Map> launchers[] = {{"jsrun",
                                                    {{"JSM_NAMESPACE_RANK", "1"},
                                                     {"JSM_NAMESPACE_SIZE", "2"},
                                                     {"JSM_NAMESPACE_LOCAL_SIZE", "2"},
                                                     {"LSB_JOBID", "7"}}},
                                                   {"flux",
                                                    {{"FLUX_TASK_RANK", "1"},
                                                     {"FLUX_JOB_SIZE", "2"},
                                                     {"FLUX_JOB_NNODES", "1"},
                                                     {"FLUX_JOB_ID", "7"}}},
                                                   {"mvapich2",
                                                    {{"MV2_COMM_WORLD_RANK", "1"},
                                                     {"MV2_COMM_WORLD_SIZE", "2"},
                                                     {"MV2_COMM_WORLD_LOCAL_SIZE", "2"},
                                                     {"MPIRUN_ID", "7"}}},
                                                   {"pals",
                                                    {{"PALS_RANKID", "1"},
                                                     {"PMI_RANK", "1"},
                                                     {"PMI_SIZE", "2"},
                                                     {"PALS_LOCAL_SIZE", "2"},
                                                     {"PALS_APID", "7"}}}};
  for (const auto& [name, variables] : launchers) {
    const auto job = read(variables);
    EXPECT_EQ(job.launcher, name);
    EXPECT_EQ(job.rank, 1) << name;
    EXPECT_EQ(job.world_size, 2) << name;
    EXPECT_TRUE(job.single_host) << name;
    EXPECT_EQ(job.master_addr, "127.0.0.1") << name;
    EXPECT_GE(job.master_port, 1024) << name;
  }
}

TEST(JobEnvironment, ARankWithoutASizeIsNoJobOfOne) {
  const std::pair<std::string, Map> ranks[] = {
      {"slurm", {{"SLURM_PROCID", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "4711"}}},
      {"pmix", {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "job"}}},
      {"mpich", {{"PMI_RANK", "1"}}},
      {"pals", {{"PALS_RANKID", "1"}}},
      {"flux", {{"FLUX_TASK_RANK", "1"}}}};
  for (const auto& [name, variables] : ranks) EXPECT_THAT(failure(variables), HasSubstr(name));
  const auto told = read(
      {{"PMIX_RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "4000"}});
  EXPECT_EQ(told.rank, 1);
  EXPECT_EQ(told.world_size, 2);
}

TEST(JobEnvironment, AllocationsShellsHavePmisVariablesToo) {
  const Map pmi = {{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"PMIX_RANK", "0"}};
  EXPECT_EQ(read(with(kBatchShell, pmi)).launcher, "none");
  const HydraRank hydra;
  EXPECT_EQ(read(with(kBatchShell, hydra.variables)).launcher, "mpich");
  EXPECT_EQ(read(with(kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "5"}})).launcher, "slurm");
  EXPECT_EQ(read(with(kOpenMpi, {{"PMIX_RANK", "1"}})).launcher, "openmpi");
}

/// What `srun -n5 --pty WORDS` gives to those that its first task starts.
Map task_with_terminal(pid_t task) {
  return with(kSlurm, {{"SLURM_PROCID", "0"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_NODEID", "0"},
                       {"SLURM_PTY_PORT", "40001"},
                       {"SLURM_TASK_PID", std::to_string(task)}});
}

TEST(JobEnvironment, TheShellOfAStepForAPersonIsNoRank) {
  const auto task_of = [](std::vector<const char*> words) {
    words.push_back(nullptr);
    int input[2];
    EXPECT_EQ(pipe(input), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
    posix_spawn_file_actions_addclose(&actions, input[1]);
    pid_t pid = 0;
    EXPECT_EQ(posix_spawn(&pid, "/bin/sh", &actions, nullptr,
                          const_cast<char* const*>(words.data()), environ),
              0);
    posix_spawn_file_actions_destroy(&actions);
    const std::string words_of_task = "/proc/" + std::to_string(pid) + "/cmdline";
    for (PollPause pause; first_line(words_of_task).empty();) pause.sleep();  // It is within exec.
    const auto job = read(task_with_terminal(pid));
    ::close(input[0]);
    ::close(input[1]);
    EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
    return job;
  };
  const auto shell = task_of({"-sh", "-i"});
  EXPECT_EQ(shell.launcher, "none");
  EXPECT_FALSE(shell.started_as_rank());
  EXPECT_EQ(shell.slurm_allocation, "allocation 4711");
  EXPECT_EQ(task_of({"sh", "-c", "read line; true"}).launcher, "slurm") << "each task has it";
  EXPECT_EQ(read(task_with_terminal(getpid())).launcher, "slurm") << "the program itself";
}

TEST(JobEnvironment, AServicesPortIsNone) {
  const Map service = {{"MASTER_PORT", "tcp://10.0.0.1:80"}};
  EXPECT_EQ(read(service).world_size, 1);
  EXPECT_EQ(read(with(kSlurm, service)).master_port, read(kSlurm).master_port);
  EXPECT_THAT(failure(with(kTorchrun, service)), HasSubstr("Service"));
}

TEST(JobEnvironment, AnAddressOfSeveralPartsIsNone) {
  for (const char* wrong : {"a,b", "a b", "http://a", "a:29500", "a/b"})
    EXPECT_THAT(failure(with(kTorchrun, {{"MASTER_ADDR", wrong}})),
                AllOf(HasSubstr("MASTER_ADDR"), HasSubstr(wrong)));
  for (const char* right : {"node-1.example_2.org", "10.0.0.1", "[::1]", "fe80::1"})
    EXPECT_EQ(failure(with(kTorchrun, {{"MASTER_ADDR", right}})), "no error") << right;
}

TEST(JobEnvironment, TorchrunUnderSlurmIsNoContradiction) {
  const auto job = read(with(kTorchrun, kSlurm));
  EXPECT_EQ(job.launcher, "torchrun");
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 4);
}

TEST(JobEnvironment, ContradictingLaunchersAreNamed) {
  const Map bare = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_THAT(failure(with(bare, kSlurm)),
              AllOf(HasSubstr("RANK=0"), HasSubstr("SLURM_PROCID=3"), HasSubstr("hint:")));
  EXPECT_THROW(read(with(kOpenMpi, kSlurm)), UsageError);
}

TEST(JobEnvironment, AgreeingLaunchersFillEachOtherIn) {
  const auto job = read(with(
      kSlurm,
      {{"RANK", "3"}, {"WORLD_SIZE", "5"}, {"MASTER_ADDR", "gpu07"}, {"MASTER_PORT", "4000"}}));
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_EQ(
      read(with(kSlurm, {{"WORLD_SIZE", "5"}, {"MASTER_ADDR", "gpu07"}, {"MASTER_PORT", "4000"}}))
          .rank,
      3);
}

TEST(JobEnvironment, AnAllocationsShellIsNoRank) {
  const auto batch = read(kBatchShell);
  EXPECT_EQ(batch.launcher, "none");
  EXPECT_EQ(batch.world_size, 1);
  EXPECT_FALSE(batch.started_as_rank());
  EXPECT_EQ(batch.slurm_allocation, "allocation 4711");
  EXPECT_EQ(batch.slurm_tasks, 4);
  // salloc starts its shell by a step of its own where the site wants it so.
  for (const char* own : {"4294967290", "4294967291"}) {
    const Map interactive = {{"SLURM_STEP_ID", own}, {"SLURM_STEP_NUM_TASKS", "1"}};
    EXPECT_EQ(read(with(kBatchShell, interactive)).launcher, "none") << own;
  }
}

TEST(JobEnvironment, AStepWithinTheAllocationIsARank) {
  const auto job = read(with(kBatchShell, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "3"}}));
  EXPECT_EQ(job.launcher, "slurm");
  EXPECT_EQ(job.rank, 3);
  EXPECT_TRUE(job.started_as_rank());
  EXPECT_EQ(job.slurm_allocation, "");
}

TEST(JobEnvironment, TheOnlyTaskOfAStepMayStartRanks) {
  const auto job = read(with(kBatchShell, {{"SLURM_STEP_ID", "7"}, {"SLURM_STEP_NUM_TASKS", "1"}}));
  EXPECT_EQ(job.launcher, "slurm");
  EXPECT_EQ(job.world_size, 1);
  EXPECT_FALSE(job.started_as_rank());
  EXPECT_TRUE(read(kOpenMpi).started_as_rank());
}

TEST(JobEnvironment, AShellWithinAnAllocationContradictsNobody) {
  const Map shell = kBatchShell;
  EXPECT_EQ(read(with(kOpenMpi, shell)).launcher, "openmpi");
  EXPECT_EQ(read(with({{"RANK", "1"},
                       {"WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", "4000"}},
                      shell))
                .rank,
            1);
}

TEST(JobEnvironment, NamesWhatIsMissing) {
  const Map all = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  for (const auto& [name, value] : all) {
    Map others = all;
    others.erase(name);
    EXPECT_THAT(failure(others), HasSubstr(name + " is not set"));
  }
}

TEST(JobEnvironment, NamesWhatIsMalformed) {
  const std::pair<Map, std::string> wrong[] = {{{{"RANK", "4"}}, "RANK=4"},
                                               {{{"RANK", "one"}}, "RANK='one'"},
                                               {{{"MASTER_PORT", "99999"}}, "MASTER_PORT"},
                                               {{{"LOCAL_RANK", "2"}}, "local rank"}};
  for (const auto& [given, said] : wrong)
    EXPECT_THAT(failure(with(kTorchrun, given)), HasSubstr(said));
  EXPECT_THAT(failure(with(kSlurm, {{"SLURM_STEP_NODELIST", "gpu[07"}})), HasSubstr("gpu[07"));
}

TEST(SlurmNodelist, GivesItsFirstNode) {
  EXPECT_EQ(first_slurm_node("a"), "a");
  EXPECT_EQ(first_slurm_node("gpu-a,b"), "gpu-a");
  EXPECT_EQ(first_slurm_node("node[01-03,7],gpu-a"), "node01");
  EXPECT_EQ(first_slurm_node("r[1-2]n[8-9]"), "r1n8");
  EXPECT_EQ(first_slurm_node("n[098-101]x"), "n098x");
}

TEST(SlurmNodelist, RefusesWhatDoesNotParse) {
  for (const char* list : {"", ",b", "a[1", "a]1[", "a[[1]]"}) {
    EXPECT_THROW(first_slurm_node(list), UsageError) << list;
  }
}

}  // namespace job_environment_test
}  // namespace lockstep
