#include "run_options.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/binding.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

/// torchrun's own default for several hosts.
constexpr uint16_t kDefaultPort = 29500;

struct Absent {
  const char* flag;
  const char* instead;
};

/// torchrun's flags that are not here, and what serves instead.
constexpr Absent kAbsent[] = {
    {"--rdzv-conf", "the static meeting needs no settings"},
    {"--monitor-interval", "not needed: the end of a worker is noticed at once"},
    {"--start-method", "not needed: workers are always programs of their own"},
    {"--run-path", "start the script itself"},
    {"--event-log-handler", "see --log-dir for files"},
    {"--logs-specs", "see --log-dir, --tee and --redirects"},
    {"--duplicate-stdout-filters", "see --local-ranks-filter"},
    {"--duplicate-stderr-filters", "see --local-ranks-filter"},
    {"--local-addr", "see --master-addr"},
    {"--numa-binding", "see --bind-to"},
    {"--virtual-local-rank", "the program finds its device by LOCAL_RANK"},
};

/// What the flags say, before it is made sense of.
struct RawFlags {
  std::string nproc = "1";
  std::string nodes = "1";
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::optional<std::string> rdzv_id;
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  std::string redirects = "0";
  std::string tee = "0";
  std::string filter;
  std::string signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::optional<double> shutdown_timeout;
  int max_restarts = 0;
  bool standalone = false;
  bool module = false;
  bool no_python = false;
};

void declare(Cli& cli, RawFlags& raw, RunOptions& options) {
  cli.example("lockstep run --nproc-per-node 2 ./mnist_distributed --epochs 3");
  cli.example("lockstep run --nproc-per-node 2 train.py --lr 0.1", "a Python script");
  cli.example("lockstep run --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 ./prog",
              "two hosts; on the second one with --node-rank 1");
  cli.example("lockstep run --nproc-per-node 4 --log-dir logs --redirects 3 --tee 0:3 ./prog",
              "all output into files, that of local rank 0 shown as well");
  cli.group("Processes");
  cli.option("--nproc-per-node", raw.nproc,
             "Ranks on this host: a number, cpu, gpu, or auto (a "
             "rank a GPU, else a rank a CPU)",
             "N");
  cli.option("--nnodes", raw.nodes, "Hosts", "N");
  cli.option("--node-rank", options.node_rank, "This host's number, from 0", {0, 1e6});
  cli.option("--master-addr", raw.master_addr,
             "Address of host 0, which serves the store "
             "[127.0.0.1]",
             "ADDR");
  cli.option("--master-port", raw.master_port,
             "Port of the store [a free one; 29500 with several "
             "hosts]",
             {0, 65535});
  cli.flag("--standalone", raw.standalone, "One host, whatever --nnodes and --rdzv-* say");
  cli.option("--rdzv-backend", raw.rdzv_backend, "How hosts meet; only static with several",
             "NAME");
  cli.option("--rdzv-endpoint", raw.rdzv_endpoint,
             "Another way to give --master-addr and "
             "--master-port",
             "ADDR:PORT");
  cli.option("--rdzv-id", raw.rdzv_id, "The run's name, in TORCHELASTIC_RUN_ID and log folders",
             "ID");
  cli.option("--max-restarts", raw.max_restarts, "Only 0: restarts are not there yet");
  cli.option("--role", options.role, "In ROLE_NAME", "NAME");
  cli.choice(
      "--bind-to", options.bind_to, launch::binding_names(),
      "Keep each rank to its part of the cores (core) or to a NUMA domain (numa); auto: numa "
      "where there are several domains and nobody else has bound us");
  cli.group("Program");
  cli.flag("-m,--module", raw.module, "PROGRAM is a Python module");
  cli.flag("--no-python", raw.no_python, "PROGRAM is executed as it is, even if it is named *.py");
  cli.group("Output");
  cli.option("--log-dir", options.log_dir,
             "Keep logs and error files in "
             "DIR/<run id>_<random>/attempt_0/<local rank>",
             "DIR");
  cli.option("-r,--redirects", raw.redirects,
             "Into files only: 0 nothing, 1 standard output, 2 "
             "standard error, 3 both; or by local rank, 0:3,1:1",
             "STREAMS");
  cli.option("-t,--tee", raw.tee, "Into files and shown", "STREAMS");
  cli.option("--local-ranks-filter", raw.filter, "Show the output of these local ranks only",
             "R1,R2");
  cli.group("End");
  cli.option("--signals-to-handle", raw.signals,
             "Forwarded to the workers, who then have 30 s; a "
             "second signal ends them at once",
             "NAMES");
  cli.option("--shutdown-timeout", raw.shutdown_timeout,
             "Seconds between TERM and KILL for the "
             "others when a rank has failed [0.8]",
             {0, 86400});
}

std::string to_dashes(std::string word) {
  const auto end =
      word.begin() + static_cast<std::ptrdiff_t>(std::min(word.find('='), word.size()));
  std::replace(word.begin(), end, '_', '-');
  return word;
}

void refuse_absent(const std::vector<std::string>& args) {
  for (const auto& arg : args) {
    if (arg.empty() || arg[0] != '-') return;  // roughly the program; CLI finds what is left
    const auto name = to_dashes(arg.substr(0, arg.find('=')));
    for (const auto& absent : kAbsent) {
      if (name == absent.flag) {
        throw UsageError(name + " of torchrun is not supported by lockstep run", absent.instead);
      }
    }
  }
}

/// torchrun reads each flag's default from PET_NAME; schedulers set those.
std::vector<std::string> flags_from_environment(const Cli& cli) {
  std::vector<std::string> args;
  for (const auto& name : cli.long_names()) {
    std::string variable = "PET_" + name.substr(2);
    for (char& c : variable) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
    const auto value = env_string(variable);
    if (!value) continue;
    const bool is_flag = name == "--standalone" || name == "--module" || name == "--no-python";
    if (!is_flag) args.push_back(name + "=" + *value);
    if (is_flag && env_flag(variable)) args.push_back(name);
  }
  return args;
}

int parse_nproc(const std::string& text) {
  if (const auto number = parse_int(text)) {
    if (*number >= 1 && *number <= 4096) return static_cast<int>(*number);
    throw UsageError("--nproc-per-node: " + text + " is not from 1 to 4096");
  }
  const int gpus = count_gpus();
  if (text == "cpu" || (text == "auto" && gpus == 0)) return count_cpus();
  if (text == "auto" || (text == "gpu" && gpus > 0)) return gpus;
  if (text == "gpu") {
    throw UsageError("--nproc-per-node gpu: no GPU was found",
                     "give a number, or cpu; CUDA_VISIBLE_DEVICES may hide GPUs");
  }
  throw UsageError("--nproc-per-node: '" + text + "' is neither a number nor auto, cpu or gpu");
}

int parse_nodes(const std::string& text) {
  const auto parts = split(text, ':');
  const auto first = parse_int(parts[0]);
  const auto last = parse_int(parts.back());
  if (parts.size() > 2 || !first || !last || *first < 1 || *last < *first || *last > 100'000) {
    throw UsageError("--nnodes: '" + text + "' is not a number of hosts");
  }
  if (*first != *last) {
    throw UsageError("--nnodes " + text + ": a changing number of hosts is not supported yet",
                     "give the one number of hosts that all take part");
  }
  return static_cast<int>(*first);
}

uint16_t parse_port(const std::string& flag, const std::string& text) {
  const auto port = parse_int(text);
  if (!port || *port < 0 || *port > 65535) {
    throw UsageError(flag + ": '" + text + "' is not a port from 0 to 65535");
  }
  return static_cast<uint16_t>(*port);
}

void take_endpoint(const std::string& text, RunOptions& options) {
  const size_t colon = text.rfind(':');
  const auto host = text.substr(0, colon);
  if (host.empty()) throw UsageError("--rdzv-endpoint: '" + text + "' is not ADDR:PORT");
  options.master_addr = host;
  if (colon != std::string::npos) {
    options.master_port = parse_port("--rdzv-endpoint", text.substr(colon + 1));
  }
}

void resolve_meeting(const RawFlags& raw, RunOptions& options) {
  if (raw.max_restarts != 0) {
    throw UsageError(
        "--max-restarts " + std::to_string(raw.max_restarts) + ": restarts are not supported yet",
        "leave it at 0 and start the job again, from its checkpoint");
  }
  options.nodes = raw.standalone ? 1 : parse_nodes(raw.nodes);
  if (raw.standalone) options.node_rank = 0;
  expect_one_of("--rdzv-backend", raw.rdzv_backend, {"static", "c10d", "etcd", "etcd-v2"});
  if (!raw.standalone && raw.rdzv_backend != "static" &&
      (options.nodes > 1 || raw.rdzv_backend != "c10d")) {
    throw UsageError("--rdzv-backend " + raw.rdzv_backend + " is not supported yet",
                     "give every host --node-rank, --master-addr and --master-port (static)");
  }
  if (!raw.standalone) {
    if (!raw.rdzv_endpoint.empty()) take_endpoint(raw.rdzv_endpoint, options);
    if (raw.master_addr) options.master_addr = *raw.master_addr;
    if (raw.master_port) options.master_port = static_cast<uint16_t>(*raw.master_port);
  }
  if (options.node_rank >= options.nodes) {
    throw UsageError("--node-rank " + std::to_string(options.node_rank) + " with --nnodes " +
                         std::to_string(options.nodes),
                     "hosts are numbered from 0 to " + std::to_string(options.nodes - 1));
  }
  if (options.nodes > 1 && options.master_port.value_or(kDefaultPort) == 0) {
    throw UsageError("--master-port 0 with several hosts: they could not know the port",
                     "give all hosts the same port, free on host 0");
  }
  if (options.nodes > 1 && !options.master_port) options.master_port = kDefaultPort;
  const bool named = raw.rdzv_id && !raw.standalone;
  if (named) options.run_id = *raw.rdzv_id;
  if (!named) options.run_id = options.nodes > 1 ? "none" : random_hex(16);
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

void resolve_output(const RawFlags& raw, RunOptions& options) {
  options.redirects = StreamMap::parse("--redirects", raw.redirects);
  options.tee = StreamMap::parse("--tee", raw.tee);
  for (const auto* map : {&options.redirects, &options.tee}) {
    if (map->largest() >= options.nproc) {
      throw UsageError(std::string(map == &options.tee ? "--tee" : "--redirects") +
                           ": there is no local rank " + std::to_string(map->largest()),
                       "local ranks go from 0 to " + std::to_string(options.nproc - 1));
    }
  }
  options.shown = parse_filter(raw.filter, options.nproc);
}

}  // namespace

StreamMap StreamMap::parse(const std::string& flag, const std::string& text) {
  const auto streams_of = [&](const std::string& number) {
    if (number.size() != 1 || number[0] < '0' || number[0] > '3') {
      throw UsageError(flag + ": '" + text + "' is neither 0, 1, 2 or 3 nor a list such as 0:3,1:1",
                       "1 is standard output, 2 standard error, 3 both");
    }
    return Streams{((number[0] - '0') & 1) != 0, ((number[0] - '0') & 2) != 0};
  };
  StreamMap map;
  if (text.find(':') == std::string::npos) {
    map.all_ = streams_of(text);
    return map;
  }
  for (const auto& part : split(text, ',')) {
    const size_t colon = part.find(':');
    const auto rank = parse_int(part.substr(0, colon));
    const bool good = colon != std::string::npos && rank && *rank >= 0 && *rank < 1'000'000;
    map.single_.emplace_back(good ? static_cast<int>(*rank) : 0,
                             streams_of(good ? part.substr(colon + 1) : ""));
  }
  return map;
}

Streams StreamMap::of(int local_rank) const {
  if (all_) return *all_;
  Streams streams;
  for (const auto& [rank, named] : single_) {
    if (rank == local_rank) streams = named;
  }
  return streams;
}

int StreamMap::largest() const {
  int largest = -1;
  for (const auto& [rank, streams] : single_) largest = std::max(largest, rank);
  return largest;
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
  refuse_absent(args);
  auto all = flags_from_environment(cli);
  all.insert(all.end(), args.begin(), args.end());
  if (!cli.parse(all)) return std::nullopt;
  options.nproc = parse_nproc(raw.nproc);
  resolve_meeting(raw, options);
  resolve_output(raw, options);
  options.signals = parse_signals(raw.signals);
  options.signal_names = raw.signals;
  if (raw.shutdown_timeout) {
    options.grace = std::chrono::milliseconds(static_cast<int64_t>(*raw.shutdown_timeout * 1000));
  }
  if (raw.module && raw.no_python) throw UsageError("-m and --no-python exclude each other");
  if (raw.module) options.kind = launch::ProgramKind::module;
  if (raw.no_python) options.kind = launch::ProgramKind::executable;
  if (options.program.empty()) {
    throw UsageError("no program to run",
                     "lockstep run [FLAGS] PROGRAM [ARGS...]; 'lockstep run --help' has examples");
  }
  return options;
}

int count_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
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
