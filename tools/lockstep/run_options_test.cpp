#include "run_options.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"

namespace lockstep::tool {
namespace run_options_test {

using Words = std::vector<std::string>;

RunOptions parsed(Words flags) {
  flags.insert(flags.end(), {"prog", "--its", "flag"});
  return parse_run_options(flags).value();
}

TEST(RunOptions, Defaults) {
  const auto options = parsed({});
  EXPECT_EQ(options.nproc, 1);
  EXPECT_EQ(options.nodes, 1);
  EXPECT_FALSE(options.master_port);
  EXPECT_EQ(options.run_id.size(), 32u);
  EXPECT_EQ(options.program, (Words{"prog", "--its", "flag"}));
  EXPECT_EQ(options.signals, (std::vector<int>{SIGTERM, SIGINT, SIGHUP, SIGQUIT}));
  EXPECT_NE(parsed({}).run_id, options.run_id);
}

TEST(RunOptions, SeveralHosts) {
  const auto options = parsed({"--nnodes", "2", "--node_rank=1", "--master_addr", "host0"});
  EXPECT_EQ(options.nodes, 2);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "host0");
  EXPECT_EQ(options.master_port, 29500);
  EXPECT_EQ(options.run_id, "none");
}

TEST(RunOptions, AnEndpointIsAnAddressAndAPort) {
  const auto options = parsed({"--rdzv-endpoint", "host0:1234", "--rdzv-id", "job"});
  EXPECT_EQ(options.master_addr, "host0");
  EXPECT_EQ(options.master_port, 1234);
  EXPECT_EQ(options.run_id, "job");
  EXPECT_THROW(parsed({"--rdzv-endpoint", "host0:port"}), UsageError);
  EXPECT_THROW(parsed({"--rdzv-endpoint", ":1"}), UsageError);
}

TEST(RunOptions, StandaloneWinsOverTheMeeting) {
  const auto options = parsed({"--standalone", "--nnodes", "4", "--rdzv-backend", "c10d",
                               "--rdzv-endpoint", "elsewhere:1", "--rdzv-id", "job"});
  EXPECT_EQ(options.nodes, 1);
  EXPECT_EQ(options.master_addr, "127.0.0.1");
  EXPECT_FALSE(options.master_port);
  EXPECT_NE(options.run_id, "job");
}

TEST(RunOptions, OneHostMayNameC10d) {
  const auto options = parsed({"--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"});
  EXPECT_EQ(options.master_port, 0);
  EXPECT_FALSE(options.has_meeting());
}

TEST(RunOptions, HostsThatComeAndGo) {
  using Backend = MeetingOptions::Backend;
  const auto options = parsed({"--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h0",
                               "--rdzv-conf", "join_timeout=5,last_call_timeout=0.5,is_host=true",
                               "--keep-alive", "1.5", "--max-restarts", "3"});
  EXPECT_TRUE(options.has_meeting());
  EXPECT_EQ(options.min_nodes, 1);
  EXPECT_EQ(options.nodes, 4);
  EXPECT_EQ(options.max_restarts, 3);
  EXPECT_FALSE(options.node_rank);
  EXPECT_EQ(options.master_port, 29400);
  EXPECT_EQ(options.meeting.backend, Backend::embedded);
  EXPECT_EQ(options.meeting.join_timeout, std::chrono::seconds(5));
  EXPECT_EQ(options.meeting.last_call, std::chrono::milliseconds(500));
  EXPECT_EQ(options.meeting.keep_alive, std::chrono::milliseconds(1500));
  EXPECT_EQ(options.meeting.is_host, true);
  EXPECT_THROW(parsed({"--nnodes", "1:4"}), UsageError);  // Of the static meeting all are fixed.
  EXPECT_THROW(parsed({"--nnodes", "2", "--rdzv-backend", "c10d"}), UsageError);
  EXPECT_THROW(parsed({"--nnodes", "2"}), UsageError);  // Each would be host 0 of its own.
  EXPECT_EQ(parsed({"--nnodes", "2", "--node-rank", "0"}).nodes, 2);
  EXPECT_THROW(parsed({"--rdzv-conf", "join_timeout=soon"}), UsageError);
  EXPECT_THROW(parsed({"--rdzv-conf", "jointimeout=5"}), UsageError);
}

TEST(RunOptions, EtcdHasMembersAndCertificates) {
  const auto options = parsed({"--nnodes", "2", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint",
                               "a:2379,b:2379", "--rdzv-id", "job", "--rdzv-conf",
                               "protocol=https,cacert=ca.pem,user=me,password=word"});
  EXPECT_EQ(options.meeting.etcd.endpoints, (Words{"https://a:2379", "https://b:2379"}));
  EXPECT_EQ(options.meeting.etcd.ca_file, "ca.pem");
  EXPECT_EQ(options.meeting.etcd.user, "me");
  EXPECT_EQ(options.master_addr, "a");
  EXPECT_TRUE(parsed({"--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1", "--rdzv-id", "job"})
                  .has_meeting());
  EXPECT_THROW(parsed({"--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1"}), UsageError)
      << "all jobs of one etcd would be one";
  EXPECT_THROW(parsed({"--rdzv-backend", "etcd"}), UsageError);
}

TEST(RunOptions, AnAddressIsOneHosts) {
  for (const char* wrong : {"a,b", "a b", " a", "http://a", "a:29500", "a/b"}) {
    EXPECT_THROW(parsed({"--nnodes", "2", "--node-rank", "1", "--master-addr", wrong}), UsageError)
        << wrong;
  }
  for (const char* right : {"a", "node-1.example_2.org", "10.0.0.1", "[::1]", "::1"})
    EXPECT_NO_THROW(parsed({"--nnodes", "2", "--node-rank", "1", "--master-addr", right})) << right;
}

TEST(RunOptions, ProgramsKind) {
  EXPECT_EQ(parsed({"-m"}).kind, launch::ProgramKind::module);
  EXPECT_EQ(parsed({"--module"}).kind, launch::ProgramKind::module);
  EXPECT_EQ(parsed({"--no_python"}).kind, launch::ProgramKind::executable);
  EXPECT_EQ(parsed({}).kind, launch::ProgramKind::guess);
}

std::string refusal_with(const char* variable, const char* value, const Words& flags) {
  setenv(variable, value, 1);
  std::string text;
  try {
    parsed(flags);
  } catch (const UsageError& error) {
    text = error.what();
  }
  unsetenv(variable);
  return text;
}

TEST(RunOptions, AVariableThatHoldsABadValueIsNamed) {
  EXPECT_EQ(
      refusal_with("PET_NPROC_PER_NODE", "two", {})
          .find("environment variable PET_NPROC_PER_NODE, the default of --nproc-per-node: 'two'"),
      0u);
  EXPECT_EQ(refusal_with("PET_NODE_RANK", "x", {})
                .find("environment variable PET_NODE_RANK, the default of --node-rank: 'x' is not"),
            0u);
  // Another flag's mistake is not the variable's.
  EXPECT_EQ(refusal_with("PET_NPROC_PER_NODE", "2", {"--nnodes", "none"}).find("--nnodes: 'none'"),
            0u);
}

TEST(RunOptions, AddressesMayStandInBrackets) {
  EXPECT_EQ(parsed({"--master-addr", "[fd00::1]"}).master_addr, "fd00::1");
  EXPECT_EQ(parsed({"--rdzv-endpoint", "[fd00::1]:1234"}).master_addr, "fd00::1");
  EXPECT_EQ(parsed({"--rdzv-endpoint", "[fd00::1]:1234"}).master_port, 1234);
  EXPECT_FALSE(parsed({"--rdzv-endpoint", "[fd00::1]"}).master_port);
  EXPECT_THROW(parsed({"--rdzv-endpoint", "fd00::1:1234"}), UsageError);
}

TEST(RunOptions, TorchrunsWordsForBinding) {
  EXPECT_EQ(parsed({"--numa-binding", "node"}).bind_to, "numa");
  EXPECT_EQ(parsed({"--numa-binding", "exclusive"}).bind_to, "core");
  EXPECT_EQ(parsed({"--numa-binding", "node", "--bind-to", "numa"}).bind_to, "numa");
  for (const char* word : {"socket", "core-complex", "cores"}) {
    EXPECT_THROW(parsed({"--numa-binding", word}), UsageError) << word;
  }
  EXPECT_THROW(parsed({"--numa-binding", "node", "--bind-to", "core"}), UsageError);
}

TEST(RunOptions, RunPathWinsOverTheOtherKinds) {
  EXPECT_EQ(parsed({"--run-path", "--no-python"}).kind, launch::ProgramKind::path);
}

TEST(RunOptions, FiltersAreWordsBetweenCommas) {
  EXPECT_EQ(parsed({"--duplicate-stdout-filters", "a,b,,c,"}).out_filters, (Words{"a", "b,c"}));
  EXPECT_TRUE(parsed({}).out_filters.empty());
}

TEST(RunOptions, NumbersOfProcesses) {
  EXPECT_EQ(parsed({"--nproc-per-node", "cpu"}).nproc, usable_processors());
  EXPECT_EQ(parsed({"--nproc-per-node", "auto"}).nproc,
            count_gpus() > 0 ? count_gpus() : usable_processors());
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_EQ(count_gpus(), 0);
  EXPECT_THROW(parsed({"--nproc-per-node", "gpu"}), UsageError);
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(RunOptions, WordsOfOtherLaunchers) {
  EXPECT_EQ(parsed({"--use_env"}).program.front(), "prog");
  for (const auto& [word, flag] :
       std::vector<std::pair<std::string, std::string>>{{"--gpus", "--nproc-per-node"},
                                                        {"-np", "--nproc-per-node"},
                                                        {"--num_processes", "--nproc-per-node"},
                                                        {"--num_machines", "--nnodes"},
                                                        {"--machine_rank", "--node-rank"},
                                                        {"--main_process_ip", "--master-addr"}}) {
    try {
      parsed({word, "2"});
      ADD_FAILURE() << word;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("did you mean '" + flag + "'?"), std::string::npos)
          << error.what();
    }
  }
}

TEST(StreamMap, AllOrByLocalRank) {
  const auto all = parse_streams("--tee", "2");
  EXPECT_FALSE(streams_of(all, 5).out);
  EXPECT_TRUE(streams_of(all, 5).err);
  const auto some = parse_streams("--tee", "0:1,12:3");
  EXPECT_TRUE(streams_of(some, 0).out);
  EXPECT_FALSE(streams_of(some, 0).err);
  EXPECT_FALSE(streams_of(some, 1).out);
  EXPECT_TRUE(streams_of(some, 12).out && streams_of(some, 12).err);
  for (const char* bad : {"", "4", "33", "-1", "0:", ":1", "0:4", "0:1,", "a:1", "0;1"}) {
    EXPECT_THROW(parse_streams("--tee", bad), UsageError) << bad;
  }
}

}  // namespace run_options_test
}  // namespace lockstep::tool
