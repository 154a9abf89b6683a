// The batch parameter server of PyTorch's tutorial on asynchronous execution. Trainers compute
// gradients with their own copy of a model, send them, and get the new parameters. The server
// either steps for each request, or gathers the gradients of all trainers and steps once with their
// mean (rpc::batched): while it gathers, no thread waits. Both ways run, one after the other:
//   build/examples/003_rpc/batch_parameter_server --world-size 3
// Under a launcher:
//   build/bin/lockstep run --nproc-per-node 3 build/examples/003_rpc/batch_parameter_server
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <vector>

#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace nn = torch::nn;
namespace rpc = lockstep::rpc;
using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

struct Options {
  int world_size = 3;
  int epochs = 1;
  int64_t batch_size = 32;
  double lr = 0.1;
  int batch_update_size = 0;
  examples::DataOptions data;
} options;  // Read before anything calls.

nn::Sequential make_model() {
  at::manual_seed(0);  // The same on all workers.
  return nn::Sequential{nn::Flatten(), nn::Linear(784, 128), nn::ReLU(), nn::Linear(128, 10)};
}

/// The parameters on the server, and the optimizer that updates them.
class Server {
 public:
  /// One step with the mean of the requests' gradients.
  Tensors update(const std::vector<Tensors>& requests) {
    const std::lock_guard lock(mutex_);
    served_ += requests.size();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      at::Tensor sum = requests[0][i].clone();
      for (size_t r = 1; r < requests.size(); ++r) sum += requests[r][i];
      parameters_[i].mutable_grad() = sum / static_cast<double>(requests.size());
    }
    optimizer_->step();
    Tensors copies;  // The next step does not change what is being sent.
    for (const auto& parameter : parameters_) copies.push_back(parameter.detach().clone());
    last_ = Clock::now();
    return copies;
  }

  /// From the first step to the last one.
  double requests_per_second() const {
    return static_cast<double>(served_) / std::chrono::duration<double>(last_ - first_).count();
  }

 private:
  std::mutex mutex_;
  Clock::time_point first_ = Clock::now(), last_;
  size_t served_ = 0;
  Tensors parameters_ = make_model()->parameters();
  std::unique_ptr<lockstep::Optimizer> optimizer_ =
      lockstep::make_optimizer("sgd", parameters_, {.lr = options.lr});
};

Server& plain_server() {
  static Server server;
  return server;
}
Server& batching_server() {
  static Server server;
  return server;
}

using BatchedUpdate = rpc::Function<rpc::Future<Tensors>(Tensors)>;

const auto update = rpc::function(
    "update", [](const Tensors& gradients) { return plain_server().update({gradients}); });

// Registered when the number of trainers is known.
BatchedUpdate register_batched_update() {
  const auto run = [](const std::vector<Tensors>& requests) {
    return std::vector<Tensors>(requests.size(), batching_server().update(requests));
  };
  return rpc::batched("batched_update", run,
                      {.size = options.batch_update_size, .delay = std::chrono::milliseconds(200)});
}

double accuracy(nn::Sequential& model, const lockstep::TensorDataset& test) {
  const lockstep::Compose transforms = {lockstep::normalize()};
  const at::Tensor images = transforms(test.data);
  return model->forward(images).argmax(1).eq(test.targets).to(at::kDouble).mean().item<double>();
}

template <class F>
void train(const lockstep::World& world, const lockstep::ProcessGroup& trainers, const char* name,
           const F& function, const lockstep::DatasetSplits& data) {
  auto model = make_model();
  const auto parameters = model->parameters();
  const lockstep::DistributedSampler sampler({.dataset_size = data.train.size(),
                                              .rank = world.rank() - 1,
                                              .world_size = world.size() - 1});
  lockstep::DataLoader loader(data.train, sampler, {lockstep::normalize()},
                              {.batch_size = options.batch_size});
  int64_t requests = 0;
  trainers.barrier();  // Else the two ways would be measured beside each other.
  const auto start = Clock::now();
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      lockstep::zero_grad(parameters);
      nn::functional::cross_entropy(model->forward(batch.data), batch.target).backward();
      Tensors gradients;
      for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
      const Tensors updated = rpc::call("server", function, gradients);
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(updated[i]);
      ++requests;
    }
  }
  const std::chrono::duration<double> seconds = Clock::now() - start;
  std::printf("trainer %d: %s: %.0f requests/s, accuracy %.4f\n", world.rank(), name,
              static_cast<double>(requests) / seconds.count(), accuracy(model, data.test));
  std::fflush(stdout);
}

void run_worker() {
  const auto world = lockstep::init();
  if (world.size() < 2) throw lockstep::UsageError("a server and at least one trainer are needed");
  if (options.batch_update_size == 0) options.batch_update_size = world.size() - 1;
  const auto batched_update = register_batched_update();
  const bool serves = world.rank() == 0;
  const auto role = world.group().split(serves ? 0 : 1);
  auto agent = rpc::init(world, serves ? "server" : "trainer_" + std::to_string(world.rank()));
  if (!serves) {
    const auto data = examples::mnist(options.data);
    train(world, role, "a step per request", update, data);
    train(world, role, "batched", batched_update, data);
  }
  agent.shutdown();
  if (serves) {
    const double plain = plain_server().requests_per_second();
    const double batched = batching_server().requests_per_second();
    std::printf(
        "server: a step per request: %.0f requests/s; batched: %.0f requests/s, %.2f times\n",
        plain, batched, batched / plain);
  }
}

void read_options(int argc, char** argv) {
  examples::Flags flags("A batching parameter server and trainers on MNIST, over RPC");
  flags.option("--world-size", options.world_size, "The server and the trainers together", {2, 64});
  flags.option("--batch-update-size", options.batch_update_size,
               "So many requests make a step; 0: as many as there are trainers", {0});
  flags.option("--epochs", options.epochs, "How often to go through the data", {1});
  flags.option("--batch-size", options.batch_size, "Samples of a batch", {1});
  flags.option("--lr", options.lr, "The learning rate");
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv);
}

}  // namespace

int main(int argc, char** argv) try {
  read_options(argc, argv);
  lockstep::spawn([](int) { run_worker(); }, options.world_size);
  return 0;
} catch (...) {
  return examples::report_error();
}
