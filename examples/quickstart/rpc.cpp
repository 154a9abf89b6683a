// Two workers: a server keeps weights, a trainer computes with them there and updates them.
//   build/examples/quickstart/rpc
#include <ATen/ATen.h>

#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace rpc = lockstep::rpc;

struct Server {
  at::Tensor weights = at::zeros({4, 1}).requires_grad_();
  at::Tensor predict(const at::Tensor& x) const { return x.matmul(weights); }
  rpc::RRef<at::Tensor> parameter() const { return rpc::RRef<at::Tensor>::own(weights); }
};
// What workers can call: each process registers it under the same name.
const auto make_server = rpc::function("make_server", [] { return std::make_shared<Server>(); });
const auto predict = rpc::method("Server.predict", &Server::predict);
const auto parameter = rpc::method("Server.parameter", &Server::parameter);

void train() {
  const auto server = rpc::remote("server", make_server);  // an RRef: the object stays there
  rpc::DistributedOptimizer optimizer("sgd", {server.rpc_sync(parameter)}, {.lr = 0.02});
  const auto truth = at::arange(4, at::kFloat).view({4, 1});
  for (int step = 1; step <= 100; ++step) {
    const auto x = at::randn({16, 4});
    rpc::AutogradContext context;
    const auto loss = (server.rpc_sync(predict, x) - x.matmul(truth)).square().mean();
    context.backward({loss});  // goes through the server, where the gradient then lies
    optimizer.step(context);
    if (step % 25 == 0) std::printf("step %3d: loss %.4f\n", step, loss.item<double>());
  }
}

int main() {
  if (lockstep::spawn(2)) return 0;  // the parent: both workers are done
  const auto world = lockstep::init();
  auto agent = rpc::init(world, world.rank() == 0 ? "server" : "trainer");
  if (world.rank() == 1) train();
  agent.shutdown();  // serves until all workers have come here
}
