// The parameter server of PyTorch's RPC tutorial, in the spirit of HogWild: the model lies with the
// server, and several trainers update it at once without waiting for each other. Each trains on a
// part of MNIST.
//
// A server and two trainers on this host:
//   build/examples/003_rpc/parameter_server --world-size 3
// The same started one by one, as in the tutorial. Rank 0 is the server:
//   build/examples/003_rpc/parameter_server --world-size 3 --rank 0 --master-port 29500
//   build/examples/003_rpc/parameter_server --world-size 3 --rank 1 --master-port 29500
//   build/examples/003_rpc/parameter_server --world-size 3 --rank 2 --master-port 29500
// Under a launcher:
//   build/bin/lockstep run --nproc-per-node 3 build/examples/003_rpc/parameter_server
#include <torch/nn/functional/loss.h>

#include <cstdio>
#include <vector>

#include "003_rpc/net.h"
#include "003_rpc/references.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace rpc = lockstep::rpc;

/// The model, on the server. All trainers call the same one.
class ParameterServer {
 public:
  at::Tensor forward(const at::Tensor& images, bool training) {
    return model_->forward(images, training);
  }
  rpc_tutorial::Parameters parameters() const {
    return rpc_tutorial::references_to(model_->parameters());
  }

 private:
  rpc_tutorial::Net model_;
};

std::shared_ptr<ParameterServer> get_parameter_server() {
  static const auto server = [] {  // made by the first call
    at::manual_seed(1);
    return std::make_shared<ParameterServer>();
  }();
  return server;
}

const auto get_server = rpc::function("get_parameter_server", get_parameter_server);
const auto forward = rpc::method("ParameterServer.forward", &ParameterServer::forward);
const auto parameters = rpc::method("ParameterServer.parameters", &ParameterServer::parameters);

struct Options {
  int world_size = 3;
  int rank = -1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int epochs = 1;
  int64_t batch_size = 32;
  double lr = 0.03;
  examples::DataOptions data;
};

double accuracy(const rpc::RRef<ParameterServer>& server, const lockstep::TensorDataset& test) {
  const lockstep::DistributedSampler in_order({.dataset_size = test.size(), .shuffle = false});
  lockstep::DataLoader loader(test, in_order, {lockstep::normalize()}, {.batch_size = 250});
  int64_t right = 0;
  for (const auto& batch : loader.epoch(0)) {
    const auto output = server.rpc_sync(forward, batch.data, false);
    right += output.argmax(1).eq(batch.target).sum().item<int64_t>();
  }
  return static_cast<double>(right) / static_cast<double>(test.size());
}

void run_trainer(const lockstep::World& world, const lockstep::ProcessGroup& trainers,
                 const Options& options) {
  const auto server = rpc::remote("parameter_server", get_server);
  rpc::DistributedOptimizer optimizer("sgd", server.rpc_sync(parameters), {.lr = options.lr});

  const auto data = examples::mnist(options.data);
  const lockstep::DistributedSampler sampler({.dataset_size = data.train.size(),
                                              .rank = world.rank() - 1,
                                              .world_size = world.size() - 1});
  lockstep::DataLoader loader(data.train, sampler, {lockstep::normalize()},
                              {.batch_size = options.batch_size});
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      rpc::AutogradContext context;
      const auto output = server.rpc_sync(forward, batch.data, true);
      const auto loss = torch::nn::functional::nll_loss(output, batch.target);
      context.backward({loss});
      optimizer.step(context);
      if (batch.index % 50 == 0) {
        std::printf("trainer %d: epoch %d, batch %lld, loss %.4f\n", world.rank(), epoch + 1,
                    static_cast<long long>(batch.index), loss.item<double>());
        std::fflush(stdout);
      }
    }
  }
  trainers.barrier();  // Else the first one would see a model that is still learning.
  std::printf("trainer %d: accuracy %.4f\n", world.rank(), accuracy(server, data.test));
}

void run_worker(const Options& options) {
  const auto world = lockstep::init({.backend = "gloo"});
  if (world.size() < 2) throw lockstep::UsageError("a server and at least one trainer are needed");
  const bool serves = world.rank() == 0;
  const auto role = world.group().split(serves ? 0 : 1);
  auto agent =
      rpc::init(world, serves ? "parameter_server" : "trainer_" + std::to_string(world.rank()));
  if (!serves) run_trainer(world, role, options);
  agent.shutdown();  // The server answers calls until all have come here.
}

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("A parameter server and trainers on MNIST, over RPC");
  flags.option("--world-size", options.world_size, "The server and the trainers together", {2, 64});
  flags.option("--rank", options.rank, "Which of them this is, 0 being the server; -1: start all",
               {-1, 63});
  flags.option("--master-addr", options.master_addr, "With --rank: where rank 0 is");
  flags.option("--master-port", options.master_port, "With --rank: the port at which they meet",
               {0, 65535});
  flags.option("--epochs", options.epochs, "How often to go through the data", {1});
  flags.option("--batch-size", options.batch_size, "Samples of a batch", {1});
  flags.option("--lr", options.lr, "The learning rate");
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv);
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto options = read_options(argc, argv);
  lockstep::SpawnOptions spawn;
  int processes = options.world_size;
  if (options.rank >= 0) {
    spawn = {.first_rank = options.rank,
             .world_size = options.world_size,
             .master_addr = options.master_addr,
             .master_port = options.master_port};
    processes = 1;
  }
  lockstep::spawn([&](int) { run_worker(options); }, processes, spawn);
  return 0;
} catch (...) {
  return examples::report_error();
}
