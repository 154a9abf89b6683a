// A rank that calls all others by small calls, and says how many went the fast way, and by what.
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/socket_link.h"
#include "lockstep/rpc/worker.h"

namespace {

namespace rpc = lockstep::rpc;

const auto square = rpc::function("hosts.square", [](int64_t number) { return number * number; });

const auto doubled =
    rpc::function("hosts.doubled", [](const at::Tensor& data) { return data * 2; });

/// Large tensors go LibTorch's way.
void send_large_ones(const rpc::Agent& agent) {
  const at::Tensor data = at::arange(1'000'000, at::kFloat);
  for (const auto& other : agent.workers()) {
    if (other != agent.name() && !at::equal(rpc::call(other, doubled, data), data * 2))
      throw lockstep::Error("a wrong tensor from " + other);
  }
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

}  // namespace

int main() {
  try {
    const auto world = lockstep::init();
    auto agent = rpc::init(world, "w" + std::to_string(world.rank()));
    call_all(agent);
    send_large_ones(agent);
    agent.shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}
