// Does in C++ what rpc_parity_worker.py does in Python: lockstep_rpc_parity OUTPUT
#include <ATen/Functions.h>

#include <cstdio>

#include "lockstep/base/error.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace rpc = lockstep::rpc;

struct Layer {
  explicit Layer(int64_t seed) {
    at::manual_seed(static_cast<uint64_t>(seed));
    weight = at::randn({20, 20}).mul_(0.2).requires_grad_();
  }
  at::Tensor forward(const at::Tensor& x) const { return x.matmul(weight).tanh(); }
  rpc::RRef<at::Tensor> parameter() const { return rpc::RRef<at::Tensor>::own(weight); }
  at::Tensor weight;
};

const auto make_layer =
    rpc::function("make_layer", [](int64_t seed) { return std::make_shared<Layer>(seed); });
const auto forward = rpc::method("forward", &Layer::forward);
const auto parameter = rpc::method("parameter", &Layer::parameter);
const auto gradient = rpc::function("gradient", [](const rpc::RRef<Layer>& layer, int64_t context) {
  return rpc::gradients_of(context, {layer.local_value().weight}).front();
});
// The first layer's worker calls the second's.
const auto forward_through = rpc::function(
    "forward_through",
    [](const rpc::RRef<Layer>& first, const rpc::RRef<Layer>& second, const at::Tensor& x) {
      return second.rpc_sync(forward, first.local_value().forward(x));
    });

void train(const std::string& output) {
  lockstep::StateDict results;
  const auto one = rpc::remote("worker1", make_layer, 3);
  const auto two = rpc::remote("worker2", make_layer, 4);
  rpc::DistributedOptimizer optimizer("sgd", {one.rpc_sync(parameter), two.rpc_sync(parameter)},
                                      {.lr = 0.05, .momentum = 0.9});
  for (int step = 0; step < 5; ++step) {
    at::manual_seed(100 + static_cast<uint64_t>(step));
    const auto x = at::randn({8, 20});
    rpc::AutogradContext context;
    const auto y = one.rpc_sync(forward_through, two, x) + one.rpc_sync(forward, x);
    const auto loss = y.square().mean();
    context.backward({loss});
    const auto name = std::to_string(step);
    results.emplace_back("loss." + name, loss.detach().view({1}));
    results.emplace_back("one." + name, rpc::call("worker1", gradient, one, context.id()));
    results.emplace_back("two." + name, rpc::call("worker2", gradient, two, context.id()));
    optimizer.step(context);
  }
  results.emplace_back("one", one.rpc_sync(parameter).to_here().detach());
  results.emplace_back("two", two.rpc_sync(parameter).to_here().detach());
  lockstep::save_safetensors(output, results);
}

}  // namespace

int main(int, char** argv) try {
  const auto world = lockstep::init();
  auto agent = rpc::init(world, "worker" + std::to_string(world.rank()));
  if (world.rank() == 0) train(argv[1]);
  agent.shutdown();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return lockstep::exit_code_of(error);
}
