// The parameter server of PyTorch's RPC tutorial, in the spirit of HogWild: the parameters lie with
// one or more servers, and several trainers update them at once without waiting for each other.
// Each trains on a part of MNIST: it gets the parameters, computes with them, and sends gradients.
//
// A server and two trainers on this host:
//   build/examples/003_rpc/parameter_server --world-size 3
// Two servers with half of the parameters each, and trainers that are at most four steps apart:
//   build/examples/003_rpc/parameter_server --world-size 4 --servers 2 --max-staleness 4
// The same started one by one, as in the tutorial. The first ranks are the servers:
//   build/examples/003_rpc/parameter_server --world-size 3 --rank 0 --master-port 29500
//   build/examples/003_rpc/parameter_server --world-size 3 --rank 1 --master-port 29500
//   build/examples/003_rpc/parameter_server --world-size 3 --rank 2 --master-port 29500
// Under a launcher:
//   build/bin/lockstep run --nproc-per-node 3 build/examples/003_rpc/parameter_server
#include <ATen/ops/cat.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "003_rpc/net.h"
#include "003_rpc/staleness_bound.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace rpc = lockstep::rpc;
using Tensors = std::vector<at::Tensor>;

struct Options {
  int world_size = 3;
  int servers = 1;
  int rank = -1;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int epochs = 1;
  int64_t batch_size = 32;
  double lr = 0.03;
  std::optional<int64_t> max_staleness;
  int64_t straggle_ms = 0;
  examples::DataOptions data;
};

std::string server_name(int index) {
  return "server_" + std::to_string(index);
}
std::string trainer_name(int number) {
  return "trainer_" + std::to_string(number);
}

Tensors flat(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(tensor.flatten());
  return all;
}

/// What one of the servers has: its part of all parameters, put one behind the other. The parts are
/// of one size, whatever the layers are. By whole layers one server would have nearly all: fc1 has
/// 98% of the parameters.
class Shard {
 public:
  Shard(int index, int servers) {
    at::manual_seed(1);  // The same model on all servers.
    const at::NoGradGuard no_grad;
    const auto all = at::cat(flat(rpc_tutorial::Net()->parameters()));
    values_ = all.tensor_split(servers)[static_cast<size_t>(index)].clone();
    values_.set_requires_grad(true);
  }
  at::Tensor values() const { return values_; }
  rpc::RRef<at::Tensor> reference() const { return rpc::RRef<at::Tensor>::own(values_); }

 private:
  at::Tensor values_;
};

std::shared_ptr<Shard> get_shard_here(int index, int servers) {
  static const auto shard = std::make_shared<Shard>(index, servers);  // made by the first call
  return shard;
}

std::shared_ptr<rpc_tutorial::StepClocks> get_clocks_here(
    const std::vector<std::string>& trainers) {
  static const auto clocks = std::make_shared<rpc_tutorial::StepClocks>(trainers);
  return clocks;
}

const auto get_shard = rpc::function("get_shard", get_shard_here);
const auto get_clocks = rpc::function("get_clocks", get_clocks_here);
const auto values = rpc::method("Shard.values", &Shard::values);
const auto reference = rpc::method("Shard.reference", &Shard::reference);

/// The model as a trainer sees it.
class ServedNet {
 public:
  explicit ServedNet(int servers) {
    for (int i = 0; i < servers; ++i) {
      shards_.push_back(rpc::remote(server_name(i), get_shard, i, servers));
    }
    for (const auto& parameter : rpc_tutorial::Net()->parameters()) {
      shapes_.push_back(parameter.sizes().vec());
      numels_.push_back(parameter.numel());
    }
  }

  /// As they are now: while this trainer gets them, others write. In an autograd context gradients
  /// go the same way back.
  Tensors parameters() const {
    std::vector<rpc::Future<at::Tensor>> parts;
    for (const auto& shard : shards_) parts.push_back(shard.rpc_async(values));
    Tensors all = at::cat(rpc::when_all(parts).wait()).split_with_sizes(numels_);
    for (size_t i = 0; i < all.size(); ++i) all[i] = all[i].view(shapes_[i]);
    return all;
  }
  /// For the optimizer: each server updates its shard.
  std::vector<rpc::RRef<at::Tensor>> references() const {
    std::vector<rpc::RRef<at::Tensor>> all;
    for (const auto& shard : shards_) all.push_back(shard.rpc_sync(reference));
    return all;
  }

 private:
  std::vector<rpc::RRef<Shard>> shards_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<int64_t> numels_;
};

double accuracy(const ServedNet& net, const lockstep::TensorDataset& test) {
  const at::NoGradGuard no_grad;
  const Tensors parameters = net.parameters();
  const lockstep::DistributedSampler in_order({.dataset_size = test.size(), .shuffle = false});
  lockstep::DataLoader loader(test, in_order, {lockstep::normalize()}, {.batch_size = 250});
  int64_t right = 0;
  for (const auto& batch : loader.epoch(0)) {
    const auto output = rpc_tutorial::net_forward(parameters, batch.data, false);
    right += output.argmax(1).eq(batch.target).sum().item<int64_t>();
  }
  return static_cast<double>(right) / static_cast<double>(test.size());
}

double train_on(const lockstep::Batch& batch, const ServedNet& net,
                rpc::DistributedOptimizer& optimizer) {
  rpc::AutogradContext context;
  const auto output = rpc_tutorial::net_forward(net.parameters(), batch.data, true);
  const auto loss = torch::nn::functional::nll_loss(output, batch.target);
  context.backward({loss});
  optimizer.step(context);
  return loss.item<double>();
}

/// The clocks, by which trainers know of each other, lie with the first server.
rpc::RRef<rpc_tutorial::StepClocks> clocks_of(int trainers) {
  std::vector<std::string> names;
  for (int i = 1; i <= trainers; ++i) names.push_back(trainer_name(i));
  return rpc::remote(server_name(0), get_clocks, names);
}

/// `number`: from 1.
void run_trainer(const rpc::Agent& agent, int number, int trainers, const Options& options) {
  at::manual_seed(number);  // Each has a dropout of its own.
  const ServedNet net(options.servers);
  rpc::DistributedOptimizer optimizer("sgd", net.references(), {.lr = options.lr});
  const auto data = examples::mnist(options.data);
  const lockstep::DistributedSampler sampler(
      {.dataset_size = data.train.size(), .rank = number - 1, .world_size = trainers});
  lockstep::DataLoader loader(data.train, sampler, {lockstep::normalize()},
                              {.batch_size = options.batch_size});

  rpc_tutorial::StalenessBound bound(agent, clocks_of(trainers), options.max_staleness);
  int64_t samples = 0, most_ahead = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      const double loss = train_on(batch, net, optimizer);
      samples += batch.data.size(0);
      if (batch.index % 50 == 0) {
        std::printf("trainer %d: epoch %d, batch %lld, loss %.4f\n", number, epoch + 1,
                    static_cast<long long>(batch.index), loss);
        std::fflush(stdout);
      }
      if (number == trainers) {
        std::this_thread::sleep_for(std::chrono::milliseconds(options.straggle_ms));
      }
      most_ahead = std::max(most_ahead, bound.step());
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  bound.finish();  // Else the first one would see a model that is still learning.
  std::printf("trainer %d: %.0f samples/s, at most %lld steps ahead of the slowest\n", number,
              static_cast<double>(samples) / seconds.count(), static_cast<long long>(most_ahead));
  std::printf("trainer %d: accuracy %.4f\n", number, accuracy(net, data.test));
}

void run_worker(const Options& options) {
  const auto world = lockstep::init({.backend = "gloo"});
  const int trainers = world.size() - options.servers;
  if (trainers < 1) {
    throw lockstep::UsageError("--servers " + std::to_string(options.servers) + " of " +
                               std::to_string(world.size()) +
                               " processes leave none to train; expected at least one");
  }
  const int number = world.rank() - options.servers + 1;
  auto agent = rpc::init(world, number < 1 ? server_name(world.rank()) : trainer_name(number));
  if (number >= 1) run_trainer(agent, number, trainers, options);
  agent.shutdown();  // Servers answer calls until all have come here.
}

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("Parameter servers and trainers on MNIST, over RPC");
  flags.option("--world-size", options.world_size, "Servers and trainers together", {2, 64});
  flags.option("--servers", options.servers, "How many of them share the parameters", {1, 63});
  flags.option("--rank", options.rank, "Which of them this is, servers first; -1: start all",
               {-1, 63});
  flags.option("--master-addr", options.master_addr, "With --rank: where rank 0 is");
  flags.option("--master-port", options.master_port, "With --rank: the port at which they meet",
               {0, 65535});
  flags.option("--epochs", options.epochs, "How often to go through the data", {1});
  flags.option("--batch-size", options.batch_size, "Samples of a batch", {1});
  flags.option("--lr", options.lr, "The learning rate");
  flags.option("--max-staleness", options.max_staleness,
               "A trainer that is more steps ahead of the slowest one waits; 0: all go in step. "
               "Not given: nobody waits",
               {0});
  flags.option("--straggle", options.straggle_ms,
               "The last trainer rests for so many milliseconds after each step, to be slow", {0});
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
