// A rank that calls all others by small calls, and says how many went the fast way, and by what.
// Then it sends large tensors, and says over how many connections they came.
//
// Arguments: the init method, "env://" where none is given. With --join ADDRESS it is a worker that
// comes later. Where ADDRESS_FILE is set, the ranks wait for such a one.
#include <ATen/ATen.h>
#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/world.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/rpc_worker.h"
#include "lockstep/rpc/socket_link.h"

namespace {

namespace rpc = lockstep::rpc;

const auto square = rpc::function("hosts.square", [](int64_t number) { return number * number; });

const auto doubled =
    rpc::function("hosts.doubled", [](const at::Tensor& data) { return data * 2; });

std::promise<void> last_came;
const auto came = rpc::function("hosts.came", [] { last_came.set_value(); });

/// Large tensors go LibTorch's way.
void send_large_ones(const rpc::Agent& agent) {
  const at::Tensor data = at::arange(1'000'000, at::kFloat);
  for (const auto& other : agent.workers()) {
    if (other != agent.name() && !at::equal(rpc::call(other, doubled, data), data * 2))
      throw lockstep::Error("a wrong tensor from " + other);
  }
}

/// TCP connections of this process that have brought so many bytes.
int connections_that_brought(uint64_t bytes) {
  DIR* all = opendir("/proc/self/fd");
  if (!all) throw lockstep::Error("no /proc");
  int found = 0;
  while (const dirent* entry = readdir(all)) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    const auto fd = static_cast<int>(lockstep::parse_int(entry->d_name).value_or(-1));
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    if (info.tcpi_bytes_received >= bytes) ++found;
  }
  closedir(all);
  return found;
}

void call_all(const rpc::Agent& agent) {
  auto* const path = rpc::detail::this_worker("a test")->fast_path();
  if (!path) throw lockstep::Error("there is no fast path");
  int64_t calls = 0;
  for (const auto& other : agent.workers()) {
    if (other == agent.name()) continue;
    for (int64_t i = 0; i < 100; ++i, ++calls) {
      if (rpc::call(other, square, i) != i * i) throw lockstep::Error("a wrong square");
    }
  }
  const bool tcp = dynamic_cast<rpc::detail::SocketLink*>(&path->link()) != nullptr;
  std::printf("%s: %lld of %lld calls by %s\n", agent.name().c_str(),
              static_cast<long long>(path->calls_sent()), static_cast<long long>(calls),
              tcp ? "TCP" : "memory");
}

void run_rank(const std::string& init_method) {
  lockstep::InitOptions options;
  options.init_method = init_method;
  const auto world = lockstep::init(options);
  auto agent = rpc::init(world, "w" + std::to_string(world.rank()));
  call_all(agent);
  send_large_ones(agent);
  world.group().barrier();
  std::printf("%s: %d connections at %s\n", agent.name().c_str(), connections_that_brought(100'000),
              world.address().c_str());
  const auto file = lockstep::env_string("ADDRESS_FILE");
  if (file && world.rank() == 0) lockstep::write_file_atomically(*file, agent.address());
  if (file) last_came.get_future().wait();
  agent.shutdown();
}

void run_joined(const std::string& address) {
  auto agent = rpc::join(address, "last");
  send_large_ones(agent);
  for (const auto& other : agent.workers())
    if (other != agent.name()) rpc::call(other, came);
  agent.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 3 && std::strcmp(argv[1], "--join") == 0) {
      run_joined(argv[2]);
    } else {
      run_rank(argc > 1 ? argv[1] : "env://");
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}
