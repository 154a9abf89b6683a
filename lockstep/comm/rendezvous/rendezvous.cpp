#include "lockstep/comm/rendezvous/rendezvous.h"

#include <filesystem>
#include <map>
#include <regex>
#include <tuple>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/mpi/mpi.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Url {
  std::string scheme;
  std::string rest;  // Between "://" and "?".
  std::map<std::string, std::string> query;
};

Url parse_url(const std::string& text) {
  static const std::regex form(R"((env|tcp|file)://([^?]*)(?:\?(\w+=[^&]*(?:&\w+=[^&]*)*))?)");
  std::smatch parts;
  if (!std::regex_match(text, parts, form))
    throw UsageError("init method '" + text +
                     "': expected env://, tcp://HOST:PORT or file:///PATH");
  Url url{parts[1], parts[2], {}};
  if (!parts[3].matched) return url;
  for (const auto& pair : split(parts[3].str(), '&'))
    url.query[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
  return url;
}

int query_number(const Url& url, const std::string& name) {
  const auto found = url.query.find(name);
  if (found == url.query.end()) return -1;
  const auto value = parse_int(found->second);
  if (!value || *value < 0 || *value > INT32_MAX) {
    throw UsageError("init method: " + name + "=" + found->second +
                     " is no whole number of at least 0");
  }
  return static_cast<int>(*value);
}

// The environment with the caller's own rank and size in place of unset ones; where both are there
// they must agree.
Lookup overlay(const Lookup& lookup, const std::map<std::string, int>& given) {
  for (const auto& [name, value] : given) {
    const auto set = lookup(name);
    if (value >= 0 && set && *set != std::to_string(value)) {
      throw UsageError("the program asked for " + name + " " + std::to_string(value) +
                       ", but the environment says " + name + "=" + *set);
    }
  }
  return [lookup, given](const std::string& name) -> std::optional<std::string> {
    const auto found = given.find(name);
    if (found != given.end() && found->second >= 0) return std::to_string(found->second);
    return lookup(name);
  };
}

void read_endpoint(const std::string& text, const std::string& method, JobEnvironment& job) {
  auto [host, port] = parse_endpoint(text).value_or(std::pair(std::string(), uint16_t{0}));
  host = without_brackets(host);
  if (host.empty()) {
    throw UsageError("init method '" + method +
                     "': expected tcp://HOST:PORT, PORT from 1 to 65535");
  }
  job.master_addr = host;
  job.master_port = port;
}

// The caller names rank and size; the environment may still say which of this host's ranks it is.
JobEnvironment explicit_job(int rank, int world_size, const Lookup& lookup) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw UsageError("rank " + std::to_string(rank) + " is out of range: a job of " +
                     std::to_string(world_size) + " has ranks 0 to " +
                     std::to_string(world_size - 1));
  }
  JobEnvironment job;
  job.launcher = "explicit";
  job.rank = rank;
  job.world_size = world_size;
  job.single_host = world_size == 1;
  const auto local = lookup("LOCAL_RANK");
  const auto local_size = lookup("LOCAL_WORLD_SIZE");
  if (local && local_size) {
    job.local_rank = static_cast<int>(parse_int(*local).value_or(-1));
    job.local_size = static_cast<int>(parse_int(*local_size).value_or(-1));
  }
  return job;
}

// tcp:// and file:// need no MASTER_ADDR and MASTER_PORT of the environment.
JobEnvironment environment_job(const Lookup& lookup) {
  return read_job_environment([&lookup](const std::string& name) -> std::optional<std::string> {
    if (name == "MASTER_ADDR") return "127.0.0.1";
    if (name == "MASTER_PORT") return "1";
    return lookup(name);
  });
}

void take_endpoint(const std::string& text, JobEnvironment& job) {
  const auto told = parse_endpoint(text);
  if (!told) throw CommError("init: rank 0 told '" + text + "', expected HOST:PORT");
  std::tie(job.master_addr, job.master_port) = *told;
}

std::string endpoint(const std::string& host, const UniqueFd& socket) {
  return host + ":" + std::to_string(bound_port(socket.get()));
}

UniqueFd meet_by_file(JobEnvironment& job, std::chrono::milliseconds timeout) {
  if (job.rank == 0) {
    UniqueFd socket = listen_on("127.0.0.1", 0);
    const std::string told = endpoint("127.0.0.1", socket);
    write_file_atomically(job.meeting_file, told);
    take_endpoint(told, job);
    return socket;
  }
  const auto deadline = Clock::now() + timeout;
  std::error_code ignored;
  for (PollPause pause; !fs::exists(job.meeting_file, ignored); pause.sleep()) {
    if (Clock::now() < deadline) continue;
    throw TimeoutError("init: rank 0 has not told where it listens within " +
                           human_seconds(static_cast<double>(timeout.count()) / 1000) + " (" +
                           job.meeting_file + " does not appear)",
                       "did rank 0 start? Else set MASTER_ADDR and MASTER_PORT: mpirun -x");
  }
  take_endpoint(read_file(job.meeting_file), job);
  return {};
}

UniqueFd meet_by_mpi(JobEnvironment& job) {
  UniqueFd socket;
  std::string told;
  if (job.rank == 0) {
    socket = listen_on(job.single_host ? "127.0.0.1" : "", 0);
    const std::string host = job.master_addr.empty() ? outward_address() : job.master_addr;
    told = endpoint(host, socket);
  }
  take_endpoint(mpi::broadcast_from_first(told, job.rank, job.world_size), job);
  return socket;
}

}  // namespace

Rendezvous plan_rendezvous(const std::string& init_method, int asked_rank, int asked_size,
                           const Lookup& lookup) {
  const Url url = parse_url(init_method);
  const int rank = asked_rank >= 0 ? asked_rank : query_number(url, "rank");
  const int size = asked_size >= 0 ? asked_size : query_number(url, "world_size");
  Rendezvous plan;
  if (url.scheme == "env") {
    plan.job = read_job_environment(overlay(lookup, {{"RANK", rank}, {"WORLD_SIZE", size}}));
    const bool alone = plan.job.world_size == 1 && !plan.job.agent_store;
    plan.kind = alone ? Rendezvous::Kind::none : Rendezvous::Kind::tcp;
    return plan;
  }
  plan.job = rank >= 0 && size >= 0
                 ? explicit_job(rank, size, lookup)
                 : environment_job(overlay(lookup, {{"RANK", rank}, {"WORLD_SIZE", size}}));
  if (plan.job.launcher == "none") {
    throw UsageError("init method '" + init_method + "': rank and world_size are missing",
                     "give both in the options, or start the program by `lockstep run`");
  }
  plan.job.agent_store = false;
  if (url.scheme == "tcp") {
    plan.kind = Rendezvous::Kind::tcp;
    const bool said_single =
        plan.job.launcher != "explicit" && plan.job.local_size == plan.job.world_size;
    read_endpoint(url.rest, init_method, plan.job);
    plan.job.single_host =
        plan.job.world_size == 1 || said_single || is_loopback_host(plan.job.master_addr);
  } else {
    plan.kind = Rendezvous::Kind::file;
    plan.path = url.rest;
    if (plan.path.empty()) throw UsageError("init method 'file://': the path is missing");
    plan.job.single_host = plan.job.local_size == plan.job.world_size || plan.job.world_size == 1;
  }
  return plan;
}

Rendezvous plan_over_store(const Store& store, int rank, int world_size) {
  Rendezvous plan;
  plan.job = explicit_job(rank, world_size, [](const std::string&) { return std::nullopt; });
  plan.job.agent_store = true;  // Somebody else serves it.
  if (const auto endpoint = tcp_endpoint(store)) {
    plan.kind = Rendezvous::Kind::tcp;
    plan.job.master_addr = endpoint->first;
    plan.job.master_port = endpoint->second;
  }
  plan.job.single_host = world_size == 1 || is_loopback_host(plan.job.master_addr);
  return plan;
}

Rendezvous plan_over_mpi(const MpiCommunicator& communicator, std::chrono::milliseconds timeout,
                         bool for_backend) {
  const auto place = mpi::use(communicator, timeout, for_backend);
  Rendezvous plan;
  plan.job.launcher = "mpi";
  plan.job.rank = place.rank;
  plan.job.world_size = place.size;
  plan.job.local_rank = place.local_rank;
  plan.job.local_size = place.local_size;
  plan.job.single_host = place.local_size == place.size;
  plan.job.master_unknown = place.size > 1;
  if (plan.job.single_host) plan.job.master_addr = "127.0.0.1";
  if (place.size > 1) plan.kind = Rendezvous::Kind::tcp;
  return plan;
}

bool holds_store(const Rendezvous& plan) {
  return plan.kind == Rendezvous::Kind::tcp && !plan.job.agent_store && plan.job.rank == 0;
}

void find_master(Rendezvous& plan, std::chrono::milliseconds timeout) {
  JobEnvironment& job = plan.job;
  if (plan.kind != Rendezvous::Kind::tcp || !job.master_unknown) return;
  if (!job.meeting_file.empty() && fs::is_directory(fs::path(job.meeting_file).parent_path())) {
    plan.listen_fd = meet_by_file(job, timeout).release();
  } else if (mpi::info().available) {
    plan.listen_fd = meet_by_mpi(job).release();
  } else if (job.master_addr.empty()) {
    throw UsageError(
        "Open MPI's variables do not say on which host rank 0 runs, and this build of "
        "Lockstep has no MPI to ask",
        "mpirun -x MASTER_ADDR=HOST, with the host of rank 0; or install "
        "libopenmpi-dev and build again");
  }
}

void forget_meeting(const JobEnvironment& job) noexcept {
  if (job.rank != 0 || job.meeting_file.empty()) return;
  std::error_code ignored;
  fs::remove(job.meeting_file, ignored);
}

Store open_store(const Rendezvous& plan, std::chrono::milliseconds timeout) {
  if (plan.kind == Rendezvous::Kind::none) return hash_store();
  if (plan.kind == Rendezvous::Kind::file) {
    Store store = file_store(plan.path, plan.job.world_size);
    store.set_timeout(timeout);
    return store;
  }
  TcpStoreOptions options;
  options.host = plan.job.master_addr;
  options.port = plan.job.master_port;
  options.is_listener = holds_store(plan);
  options.listen_fd = plan.listen_fd;
  if (options.is_listener && options.listen_fd < 0) {
    options.listen_fd =
        listen_as_master(options.host, options.port, plan.job.single_host).release();
  }
  options.world_size = plan.job.world_size;
  options.timeout = timeout;
  return tcp_store(options);
}

}  // namespace lockstep
