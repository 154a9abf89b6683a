// HogWild on one host, to compare with parameter_server: no server and no RPC. All processes have
// the same parameters in shared memory. Each trains on a part of MNIST and writes its steps into
// them at once, without a lock (Recht et al., "Hogwild!", NIPS 2011).
//   build/examples/003_rpc/hogwild
//   build/bin/lockstep run --nproc-per-node 2 build/examples/003_rpc/hogwild
#include <ATen/ops/from_file.h>
#include <sys/mman.h>
#include <torch/nn/functional/loss.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "003_rpc/net.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

struct Options {
  int processes = 2;
  int epochs = 1;
  int64_t batch_size = 32;
  double lr = 0.03;
  examples::DataOptions data;
};

/// Memory of the first rank's, which ends with the last process that has it. [numel], zeros.
at::Tensor shared_floats(int64_t numel, const lockstep::World& world) {
  std::string path;
  int file = -1;
  if (world.rank() == 0) {
    file = ::memfd_create("hogwild", MFD_CLOEXEC);
    if (file < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
    path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(file);
  }
  path = world.group().broadcast_object(path, 0).get<std::string>();
  const at::Tensor floats = at::from_file(path, /*shared=*/true, numel, at::kFloat);
  world.group().barrier();  // All have it.
  if (file >= 0) ::close(file);
  return floats;
}

/// The first rank's parameters become those of all.
void share_parameters(torch::nn::Module& model, const lockstep::World& world) {
  int64_t numel = 0;
  for (const auto& parameter : model.parameters()) numel += parameter.numel();
  const at::Tensor memory = shared_floats(numel, world);
  int64_t at = 0;
  for (auto& parameter : model.parameters()) {
    const at::Tensor place = memory.narrow(0, at, parameter.numel()).view(parameter.sizes());
    if (world.rank() == 0) place.copy_(parameter.detach());
    parameter.set_data(place);
    at += parameter.numel();
  }
  world.group().barrier();
}

double accuracy(rpc_tutorial::Net& model, const lockstep::TensorDataset& test) {
  const at::NoGradGuard no_grad;
  const lockstep::DistributedSampler in_order({.dataset_size = test.size(), .shuffle = false});
  lockstep::DataLoader loader(test, in_order, {lockstep::normalize()}, {.batch_size = 250});
  int64_t right = 0;
  for (const auto& batch : loader.epoch(0)) {
    right += model->forward(batch.data, false).argmax(1).eq(batch.target).sum().item<int64_t>();
  }
  return static_cast<double>(right) / static_cast<double>(test.size());
}

void run(const Options& options) {
  const auto world = lockstep::init();
  if (world.local_size() != world.size())
    throw lockstep::UsageError("hogwild: all processes must be on one host");
  at::manual_seed(world.rank() + 1);
  rpc_tutorial::Net model;
  share_parameters(*model, world);
  const auto parameters = model->parameters();
  const auto optimizer = lockstep::make_optimizer("sgd", parameters, {.lr = options.lr});

  const auto data = examples::mnist(options.data);
  const lockstep::DistributedSampler sampler(
      {.dataset_size = data.train.size(), .rank = world.rank(), .world_size = world.size()});
  lockstep::DataLoader loader(data.train, sampler, {lockstep::normalize()},
                              {.batch_size = options.batch_size});
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      lockstep::zero_grad(parameters);
      const auto loss =
          torch::nn::functional::nll_loss(model->forward(batch.data, true), batch.target);
      loss.backward();
      optimizer->step();
      if (batch.index % 50 == 0) {
        std::printf("process %d: epoch %d, batch %lld, loss %.4f\n", world.rank(), epoch + 1,
                    static_cast<long long>(batch.index), loss.item<double>());
        std::fflush(stdout);
      }
    }
  }
  world.group().barrier();  // Else the first one would see a model that is still learning.
  std::printf("process %d: accuracy %.4f\n", world.rank(), accuracy(model, data.test));
}

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("MNIST in HogWild's way: processes that share their parameters");
  flags.option("--processes", options.processes, "How many train", {1, 64});
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
  lockstep::spawn([&](int) { run(options); }, options.processes);
  return 0;
} catch (...) {
  return examples::report_error();
}
