#include "run_options.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>

#include "lockstep/base/cores.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/binding.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

/// torchrun's own defaults for several hosts: static, and c10d.
constexpr uint16_t kDefaultPort = 29500, kMeetingPort = 29400;

/// torchrun's flags that change nothing here.
struct NoEffect {
  const char* flag;
  const char* placeholder;
  const char* why;
};

constexpr NoEffect kNoEffect[] = {
    {"--monitor-interval", "SECONDS", "the end of a worker is noticed at once, without asking"},
    {"--start-method", "NAME", "workers are always programs of their own"},
    {"--logs-specs", "NAME", "see --log-dir, --redirects and --tee"},
};

/// What the flags say, before it is made sense of.
struct RawFlags {
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::string rdzv_conf;
  std::string token_file;
  double keep_alive = 2;
  std::optional<std::string> rdzv_id;
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  std::string filter;
  std::string signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::optional<double> shutdown_timeout;
  bool standalone = false;
  bool module = false;
  bool no_python = false;
  bool run_path = false;
  bool use_env = false;
  std::optional<std::string> numa_binding;
};

int parse_nproc(const std::string& text) {
  if (const auto number = parse_int(text)) {
    if (*number >= 1 && *number <= 4096) return static_cast<int>(*number);
    throw UsageError("--nproc-per-node: " + text + " is not from 1 to 4096");
  }
  const int gpus = count_gpus();
  if (text == "cpu" || (text == "auto" && gpus == 0)) return usable_processors();
  if (text == "auto" || (text == "gpu" && gpus > 0)) return gpus;
  if (text == "gpu") {
    throw UsageError("--nproc-per-node gpu: no GPU was found",
                     "give a number, or cpu; CUDA_VISIBLE_DEVICES may hide GPUs");
  }
  throw UsageError("--nproc-per-node: '" + text + "' is neither a number nor auto, cpu or gpu");
}

int parse_stdin(const std::string& text) {
  if (text == "none") return -1;
  const auto rank = parse_int(text);
  if (rank && *rank >= 0 && *rank <= 1'000'000) return static_cast<int>(*rank);
  throw UsageError("--stdin: '" + text + "' is neither a rank nor none");
}

/// "2", or "1:4".
void take_nodes(const std::string& text, RunOptions& options) {
  const auto parts = split(text, ':');
  const auto first = parse_int(parts[0]);
  const auto last = parse_int(parts.back());
  if (parts.size() > 2 || !first || !last || *first < 1 || *last < *first || *last > 100'000) {
    throw UsageError("--nnodes: '" + text + "' is not a number of hosts, nor MIN:MAX");
  }
  options.min_nodes = static_cast<int>(*first);
  options.nodes = static_cast<int>(*last);
}

/// "a,b,,c" as "a" and "b,c".
std::vector<std::string> parse_words(const std::string& text) {
  std::vector<std::string> words(1);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != ',') {
      words.back() += text[i];
    } else if (i + 1 < text.size() && text[i + 1] == ',') {
      words.back() += text[i++];
    } else {
      words.emplace_back();
    }
  }
  std::erase(words, "");
  return words;
}

void declare(Cli& cli, RawFlags& raw, RunOptions& options) {
  cli.example("lockstep run --nproc-per-node 2 ./mnist_distributed --epochs 3");
  cli.example("lockstep run --nproc-per-node 2 train.py --lr 0.1", "a Python script");
  cli.example("lockstep run --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 ./prog",
              "two hosts; on the second one with --node-rank 1");
  cli.example("lockstep run --nproc-per-node 4 --log-dir logs --redirects 3 --tee 0:3 ./prog",
              "all output into files, that of local rank 0 shown as well");
  cli.example("PET_NPROC_PER_NODE=4 lockstep run ./prog",
              "a flag's default may stand in PET_ and its name, as schedulers for torchrun set it");
  cli.also_called("--nproc-per-node", {"--devices", "--gpus", "--num-gpus", "--num-processes",
                                       "--nproc", "--nprocs", "--np"});
  cli.also_called("--nnodes", {"--num-machines", "--num-nodes"});
  cli.also_called("--node-rank", {"--machine-rank"});
  cli.also_called("--master-addr", {"--main-process-ip"});
  cli.also_called("--master-port", {"--main-process-port"});
  cli.group("Processes");
  cli.custom("--nproc-per-node", "N",
             "Ranks on this host: a number, cpu, gpu, or auto (a rank a GPU, else a rank a CPU)",
             "1", [&](const std::string& text) { options.nproc = parse_nproc(text); });
  cli.custom("--nnodes", "N",
             "Hosts. MIN:MAX lets hosts join and leave while the job runs, which counts as no "
             "restart: see --max-restarts for what ranks do then",
             "1", [&](const std::string& text) { take_nodes(text, options); });
  cli.option("--node-rank", options.node_rank,
             "This host's number, from 0; needed by the static meeting only", {0, 1e6});
  cli.option("--master-addr", raw.master_addr,
             "Address of host 0, which serves the store "
             "[127.0.0.1]",
             "ADDR");
  cli.option("--master-port", raw.master_port,
             "Port of the store [a free one; 29500 with several "
             "hosts]",
             {0, 65535});
  cli.flag("--standalone", raw.standalone, "One host, whatever --nnodes and --rdzv-* say");
  cli.choice("--rdzv-backend", raw.rdzv_backend, {"static", "c10d", "etcd", "etcd-v2"},
             "How hosts meet: static at host 0, of a fixed number; c10d at the host of "
             "--rdzv-endpoint; etcd at an etcd, so that any host may be lost");
  cli.option("--rdzv-endpoint", raw.rdzv_endpoint,
             "Where hosts meet; with static another way to give --master-addr and --master-port; "
             "of etcd all members, A:2379,B:2379",
             "ADDR:PORT,...");
  cli.option("--rdzv-conf", raw.rdzv_conf,
             "join_timeout (600 s for MIN hosts to come), last_call_timeout (0.3 s for more), "
             "is_host (0 or 1); for etcd protocol (https), cacert, cert, key, user, password",
             "K=V,...");
  cli.option("--local-addr", options.meeting.local_addr,
             "This host's address for the others [the way to where they meet]", "ADDR");
  cli.option("--keep-alive", raw.keep_alive,
             "Seconds after which a host that is silent counts as lost", {1, 3600});
  cli.option("--token-file", raw.token_file,
             "Hosts prove to each other that they know what stands in this file, of mode 0600 "
             "[the variable LOCKSTEP_TOKEN, else no proof]",
             "FILE");
  cli.option("--rdzv-id", raw.rdzv_id,
             "The run's name, in TORCHELASTIC_RUN_ID and log folders; etcd needs one", "ID");
  cli.option("--max-restarts", options.max_restarts,
             "How often ranks start again after one has failed: those of lockstep train and of an "
             "ElasticJob live on, and one takes its place; else all do",
             {0, 1e6});
  cli.option("--role", options.role, "In ROLE_NAME", "NAME");
  cli.choice(
      "--bind-to", options.bind_to, launch::binding_names(),
      "Keep each rank to its part of the cores (core) or to a NUMA domain (numa); auto: numa "
      "where there are several domains, unless this process is bound to cores already");
  cli.option("--numa-binding", raw.numa_binding,
             "torchrun's name for it: node is --bind-to numa, exclusive is --bind-to core", "NAME");
  cli.flag("--virtual-local-rank", options.virtual_local_rank,
           "LOCAL_RANK is 0 in every rank, and CUDA_VISIBLE_DEVICES names its own GPU");
  cli.group("Program");
  cli.flag("-m,--module", raw.module, "PROGRAM is a Python module");
  cli.flag("--no-python", raw.no_python, "PROGRAM is executed as it is, even if it is named *.py");
  cli.flag("--run-path", raw.run_path, "PROGRAM is run by Python's runpy.run_path");
  cli.group("Output");
  cli.flag("--no-prefix", options.no_prefix,
           "No [rankN]: before each line. One rank that writes to a terminal has none anyway, and "
           "reads the terminal");
  cli.custom("--stdin", "RANK|none",
             "The rank that has this command's standard input; the others read nothing. "
             "breakpoint() of PyTorch's torch.distributed asks there",
             "0", [&](const std::string& text) { options.stdin_rank = parse_stdin(text); });
  cli.option("--log-dir", options.log_dir,
             "Keep logs and error files in "
             "DIR/<run id>_<random>/attempt_N/<local rank>",
             "DIR");
  const auto streams = [](const char* flag, StreamMap& map) {
    return [flag, &map](const std::string& text) { map = parse_streams(flag, text); };
  };
  cli.custom("-r,--redirects", "STREAMS,...",
             "Into files only: 0 nothing, 1 standard output, 2 standard error, 3 both; or by local "
             "rank, 0:3,1:1",
             "0", streams("--redirects", options.redirects));
  cli.custom("-t,--tee", "STREAMS,...", "Into files and shown", "0", streams("--tee", options.tee));
  cli.option("--local-ranks-filter", raw.filter, "Show the output of these local ranks only",
             "R1,R2");
  cli.custom("--duplicate-stdout-filters", "A,B",
             "Lines of standard output that contain one of these words go into "
             "attempt_N/filtered_stdout.log as well; ,, is a comma",
             "", [&](const std::string& text) { options.out_filters = parse_words(text); });
  cli.custom("--duplicate-stderr-filters", "A,B",
             "The same for standard error and filtered_stderr.log", "",
             [&](const std::string& text) { options.err_filters = parse_words(text); });
  cli.choice(
      "--event-log-handler", options.event_log, {"null", "console"},
      "console: a line of JSON on standard error, as torchrun's, when a worker starts or ends or "
      "is replaced, all start again, hosts come or go, and at the end");
  cli.group("End");
  cli.option(
      "--signals-to-handle", raw.signals,
      "Forwarded to the workers, who are then to end; a second signal ends them at once. USR1 "
      "and USR2 are forwarded always, and end nothing unless they are named here",
      "NAME,...");
  cli.option("--shutdown-timeout", raw.shutdown_timeout,
             "Seconds between a signal to the ranks and KILL [TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else "
             "0.8 for the others when a rank has failed, and 30 after a signal to this command]",
             {0, 86400});
  cli.group("Of torchrun, without effect here");
  cli.flag("--use-env", raw.use_env, "The launcher's variables are always set");
  for (const auto& known : kNoEffect) {
    std::string help = known.why;
    help[0] = static_cast<char>(std::toupper(help[0]));
    cli.custom(known.flag, known.placeholder, help, "", [&options, &known](const auto&) {
      options.without_effect.push_back(std::string(known.flag) +
                                       " has no effect here: " + known.why);
    });
  }
}

uint16_t parse_port(const std::string& flag, const std::string& text) {
  const auto port = parse_int(text);
  if (!port || *port < 0 || *port > 65535) {
    throw UsageError(flag + ": '" + text + "' is not a port from 0 to 65535");
  }
  return static_cast<uint16_t>(*port);
}

void take_endpoint(const std::string& text, RunOptions& options) {
  const size_t colon = text.find(':', text.starts_with('[') ? text.find(']') : 0);
  const auto host = without_brackets(text.substr(0, colon));
  if (host.empty()) throw UsageError("--rdzv-endpoint: '" + text + "' is not ADDR:PORT");
  check_host("--rdzv-endpoint", host);
  if (colon != std::string::npos && text.find(':', colon + 1) != std::string::npos) {
    throw UsageError("--rdzv-endpoint: '" + text + "' is not ADDR:PORT",
                     "an address with colons stands in brackets: [::1]:29500");
  }
  options.master_addr = host;
  if (colon != std::string::npos) {
    options.master_port = parse_port("--rdzv-endpoint", text.substr(colon + 1));
  }
}

std::chrono::milliseconds parse_seconds(const std::string& what, const std::string& text) {
  const auto seconds = parse_double(text);
  if (!seconds || !(*seconds >= 0 && *seconds <= 1e7))
    throw UsageError(what + "=" + text + " is not a number of seconds");
  return std::chrono::milliseconds(static_cast<int64_t>(*seconds * 1000));
}

/// --rdzv-conf. `protocol`: of etcd's endpoints.
void take_conf(const std::string& text, MeetingOptions& meeting, std::string& protocol) {
  auto& etcd = meeting.etcd;
  const std::map<std::string, std::chrono::milliseconds*> times = {
      {"join_timeout", &meeting.join_timeout},
      {"timeout", &meeting.join_timeout},
      {"last_call_timeout", &meeting.last_call}};
  const std::map<std::string, std::filesystem::path*> files = {
      {"cacert", &etcd.ca_file}, {"cert", &etcd.certificate}, {"key", &etcd.key}};
  const std::map<std::string, std::string*> words = {
      {"protocol", &protocol}, {"user", &etcd.user}, {"password", &etcd.password}};
  for (const auto& part : split(text, ',')) {
    if (part.empty()) continue;
    const auto name = part.substr(0, part.find('='));
    const auto value = part.substr(std::min(part.size(), name.size() + 1));
    expect_one_of("--rdzv-conf", name,
                  {"join_timeout", "timeout", "last_call_timeout", "is_host", "protocol", "cacert",
                   "cert", "key", "user", "password"});
    if (times.count(name)) *times.at(name) = parse_seconds("--rdzv-conf " + name, value);
    if (files.count(name)) *files.at(name) = value;
    if (words.count(name)) *words.at(name) = value;
    if (name == "is_host") meeting.is_host = to_lower(value) == "true" || value == "1";
  }
}

void take_etcd(const RawFlags& raw, const std::string& protocol, RunOptions& options) {
  if (raw.rdzv_endpoint.empty())
    throw UsageError("--rdzv-backend etcd: --rdzv-endpoint is missing",
                     "name etcd's members: --rdzv-endpoint host0:2379,host1:2379");
  if (!raw.rdzv_id)
    throw UsageError("--rdzv-backend etcd: --rdzv-id is missing, as an etcd serves many jobs",
                     "name this job, the same on all its hosts and as no other: --rdzv-id my-run");
  for (const auto& endpoint : split(raw.rdzv_endpoint, ',')) {
    options.meeting.etcd.endpoints.push_back(
        endpoint.find("://") == std::string::npos ? protocol + "://" + endpoint : endpoint);
  }
  // The way to it tells which of this host's addresses the others reach.
  const std::string& first = options.meeting.etcd.endpoints.front();
  RunOptions meeting;
  take_endpoint(first.substr(first.find("://") + 3), meeting);
  options.master_addr = meeting.master_addr;
}

void check_node_rank(const RunOptions& options) {
  if (options.node_rank.value_or(0) >= options.nodes) {
    throw UsageError("--node-rank " + std::to_string(*options.node_rank) + " with --nnodes " +
                         std::to_string(options.nodes),
                     "hosts are numbered from 0 to " + std::to_string(options.nodes - 1));
  }
  const bool fixed = options.meeting.backend == MeetingOptions::Backend::fixed;
  if (fixed && options.min_nodes != options.nodes) {
    throw UsageError("--nnodes " + std::to_string(options.min_nodes) + ":" +
                         std::to_string(options.nodes) +
                         " with --rdzv-backend static, whose hosts are fixed",
                     "take --rdzv-backend c10d and --rdzv-endpoint, or etcd");
  }
}

void take_address(const RawFlags& raw, RunOptions& options) {
  if (!raw.rdzv_endpoint.empty()) take_endpoint(raw.rdzv_endpoint, options);
  if (raw.master_addr) options.master_addr = without_brackets(*raw.master_addr);
  check_host("--master-addr", options.master_addr);
  if (raw.master_port) options.master_port = static_cast<uint16_t>(*raw.master_port);
  if (options.nodes > 1 && options.master_port.value_or(kDefaultPort) == 0) {
    throw UsageError("--master-port 0 with several hosts: they could not know the port",
                     "give all hosts the same port, free on host 0");
  }
  const bool fixed = options.meeting.backend == MeetingOptions::Backend::fixed;
  const bool placeless = raw.rdzv_endpoint.empty() && !raw.master_addr;
  if (options.nodes > 1 && fixed && placeless && !options.node_rank)
    throw UsageError(
        "--nnodes " + std::to_string(options.nodes) + ": each host would take itself for host 0",
        "give each its number by --node-rank, from 0, and all the address of host 0 "
        "by --master-addr");
  if (options.nodes > 1 && !fixed && placeless)
    throw UsageError(
        "--rdzv-backend c10d: --rdzv-endpoint is missing",
        "name one of the hosts, the same in all commands: --rdzv-endpoint host0:29400");
  if (options.nodes > 1 && !options.master_port)
    options.master_port = fixed ? kDefaultPort : kMeetingPort;
}

void resolve_meeting(const RawFlags& raw, RunOptions& options) {
  using Backend = MeetingOptions::Backend;
  MeetingOptions& meeting = options.meeting;
  meeting.keep_alive = std::chrono::milliseconds(static_cast<int64_t>(raw.keep_alive * 1000));
  meeting.token_file = raw.token_file;
  std::string protocol = "http";
  take_conf(raw.rdzv_conf, meeting, protocol);
  if (raw.standalone) {
    options.node_rank = 0;
    options.min_nodes = options.nodes = 1;
  } else {
    if (raw.rdzv_backend == "c10d") meeting.backend = Backend::embedded;
    if (raw.rdzv_backend.starts_with("etcd")) meeting.backend = Backend::etcd;
    check_node_rank(options);
    if (meeting.backend == Backend::etcd) {
      take_etcd(raw, protocol, options);
    } else {
      take_address(raw, options);
    }
  }
  const bool proves = options.has_meeting() && meeting.backend != Backend::etcd;
  if (!raw.token_file.empty() && !proves)
    options.without_effect.emplace_back(
        options.has_meeting() ? "--token-file has no effect with etcd, which has users and TLS"
                              : "--token-file has no effect on one host, which meets no others");
  const bool named = raw.rdzv_id && !raw.standalone;
  if (named) options.run_id = *raw.rdzv_id;
  if (!named) options.run_id = options.has_meeting() ? "none" : random_hex(16);
}

std::set<int> parse_filter(const std::string& text, int nproc) {
  std::set<int> ranks;
  if (text.empty()) return ranks;
  for (const auto& part : split(text, ',')) {
    const auto rank = parse_int(part);
    if (!rank || *rank < 0 || *rank >= nproc) {
      throw UsageError(
          "--local-ranks-filter: '" + part + "' is not a local rank",
          "local ranks go from 0 to " + std::to_string(nproc - 1) + ", several as in 0,1");
    }
    ranks.insert(static_cast<int>(*rank));
  }
  return ranks;
}

int signal_number(const std::string& name) {
  for (int number = 1; number < NSIG; ++number) {
    const char* known = sigabbrev_np(number);
    if (known && (name == known || name == std::string("SIG") + known)) return number;
  }
  throw UsageError("--signals-to-handle: '" + name + "' is not a signal's name",
                   "as in SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1");
}

std::vector<int> parse_signals(const std::string& text) {
  std::vector<int> signals;
  for (const auto& name : split(text, ',')) {
    const int number = signal_number(name);
    const std::array refused = {SIGKILL, SIGSTOP, SIGCHLD, SIGPIPE};
    if (std::find(refused.begin(), refused.end(), number) != refused.end()) {
      throw UsageError("--signals-to-handle: " + name + " cannot be handled");
    }
    signals.push_back(number);
  }
  return signals;
}

/// The word of --bind-to for torchrun's.
void resolve_binding(const RawFlags& raw, bool bind_to_given, RunOptions& options) {
  if (!raw.numa_binding) return;
  expect_one_of("--numa-binding", *raw.numa_binding,
                {"node", "socket", "exclusive", "core-complex"});
  if (*raw.numa_binding == "socket" || *raw.numa_binding == "core-complex") {
    throw UsageError("--numa-binding " + *raw.numa_binding + " is not there",
                     "--bind-to numa keeps a rank to a NUMA domain, --bind-to core to cores");
  }
  const std::string word = *raw.numa_binding == "node" ? "numa" : "core";
  if (bind_to_given && options.bind_to != word) {
    throw UsageError("--numa-binding " + *raw.numa_binding + " and --bind-to " + options.bind_to +
                     " contradict each other");
  }
  options.bind_to = word;
}

launch::ProgramKind program_kind(const RawFlags& raw) {
  if (raw.run_path) return launch::ProgramKind::path;  // As with torchrun it wins.
  if (raw.module && raw.no_python) throw UsageError("-m and --no-python exclude each other");
  if (raw.module) return launch::ProgramKind::module;
  return raw.no_python ? launch::ProgramKind::executable : launch::ProgramKind::guess;
}

void resolve_output(const RawFlags& raw, RunOptions& options) {
  for (const auto* map : {&options.redirects, &options.tee}) {
    const int largest = map->empty() ? -1 : map->rbegin()->first;
    if (largest >= options.nproc) {
      throw UsageError(std::string(map == &options.tee ? "--tee" : "--redirects") +
                           ": there is no local rank " + std::to_string(largest),
                       "local ranks go from 0 to " + std::to_string(options.nproc - 1));
    }
  }
  options.shown = parse_filter(raw.filter, options.nproc);
  const int ranks = options.nodes * options.nproc;
  if (options.stdin_rank >= ranks) {
    throw UsageError("--stdin: there is no rank " + std::to_string(options.stdin_rank),
                     "ranks go from 0 to " + std::to_string(ranks - 1));
  }
}

/// Makes sense of the flags.
void resolve(const RawFlags& raw, const Cli& cli, RunOptions& options) {
  resolve_meeting(raw, options);
  resolve_output(raw, options);
  options.signals = parse_signals(raw.signals);
  options.signal_names = raw.signals;
  if (raw.shutdown_timeout)
    options.shutdown_timeout =
        std::chrono::milliseconds(static_cast<int64_t>(*raw.shutdown_timeout * 1000));
  resolve_binding(raw, cli.given("--bind-to"), options);
  options.kind = program_kind(raw);
  if (options.program.empty()) {
    throw UsageError("no program to run",
                     "lockstep run [FLAGS] PROGRAM [ARGS...]; 'lockstep run --help' has examples");
  }
}

}  // namespace

StreamMap parse_streams(const std::string& flag, const std::string& text) {
  const auto named = [&](const std::string& number) {
    if (number.size() != 1 || number[0] < '0' || number[0] > '3') {
      throw UsageError(flag + ": '" + text + "' is neither 0, 1, 2 or 3 nor a list such as 0:3,1:1",
                       "1 is standard output, 2 standard error, 3 both");
    }
    return Streams{((number[0] - '0') & 1) != 0, ((number[0] - '0') & 2) != 0};
  };
  if (text.find(':') == std::string::npos) return {{-1, named(text)}};
  StreamMap map;
  for (const auto& part : split(text, ',')) {
    const size_t colon = part.find(':');
    const auto rank = parse_int(part.substr(0, colon));
    const bool good = colon != std::string::npos && rank && *rank >= 0 && *rank < 1'000'000;
    map[good ? static_cast<int>(*rank) : 0] = named(good ? part.substr(colon + 1) : "");
  }
  return map;
}

Streams streams_of(const StreamMap& map, int local_rank) {
  for (const int rank : {local_rank, -1})
    if (const auto found = map.find(rank); found != map.end()) return found->second;
  return {};
}

std::optional<RunOptions> parse_run_options(const std::vector<std::string>& args) {
  RunOptions options;
  RawFlags raw;
  Cli cli("lockstep run",
          "Starts a program as several ranks, on this host or, with the same command on each, on "
          "several: torchrun's flags, for programs in any language.");
  declare(cli, raw, options);
  cli.trailing("PROGRAM [ARGS...]", options.program,
               "What every rank executes; a *.py that is not executable is given to python3 -u");
  cli.defaults_from_environment("PET_");  // Schedulers for torchrun set these.
  if (!cli.parse(args)) return std::nullopt;
  resolve(raw, cli, options);
  return options;
}

int count_gpus() {
  namespace fs = std::filesystem;
  int present = 0;
  std::error_code ignored;
  // A container has the device files of those GPUs only that it was given.
  for (const auto& entry : fs::directory_iterator("/dev", ignored)) {
    const auto name = entry.path().filename().string();
    if (name.rfind("nvidia", 0) == 0 && parse_int(name.substr(6))) ++present;
  }
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return present;
  int listed = 0;
  for (const auto& device : split(visible, ',')) {
    if (device.empty() || device[0] == '-') break;  // CUDA stops at the first that is no device
    ++listed;
  }
  return std::min(present, listed);
}

}  // namespace lockstep::tool
