// single_gpu.cpp made distributed: -n machines with -g processes each train one MLP on MNIST in
// lockstep. Every process has the whole model and a share of each epoch's samples; gradients are
// averaged over all processes while backward runs.
//
// One host, two processes (a GPU each, or the CPU where there is none):
//   build/examples/000_playground/distributed_data_parallel -n 1 -g 2 -nr 0 -ip 127.0.0.1
// Two hosts with two processes each, IP being the address of the first; there:
//   build/examples/000_playground/distributed_data_parallel -n 2 -g 2 -nr 0 -ip IP
// and on the second:
//   build/examples/000_playground/distributed_data_parallel -n 2 -g 2 -nr 1 -ip IP
//
// The first host listens on port 8888. MASTER_ADDR and MASTER_PORT of the environment win over -ip
// and that port.
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "000_playground/mlp.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

constexpr int kPort = 8888;

struct Options {
  int nodes = 1;
  int gpus = 1;
  int node_rank = 0;
  std::string ip = "127.0.0.1";
  int epochs = 3;
  int64_t batch_size = 64;
  double lr = 0.01;
  std::string backend = "auto";
  examples::DataOptions data;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An MLP on MNIST with DistributedDataParallel");
  flags.option("-n,--nodes", options.nodes, "Machines", {1});
  flags.option("-g,--gpus", options.gpus, "Processes of a machine, one a GPU", {1});
  flags.option("--nr", options.node_rank, "-nr: which of the machines this is, from 0", {0});
  flags.option("--ip", options.ip, "-ip: the address of machine 0", "ADDRESS");
  flags.option("--epochs", options.epochs, "Passes over the data", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a process in a step", {1});
  flags.option("--lr", options.lr, "Learning rate", {0});
  flags.option("--backend", options.backend, "auto, gloo or nccl", "NAME");
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv, {"-nr", "-ip"});
  examples::check_node_rank("-nr", options.node_rank, options.nodes);
  return options;
}

/// The share of samples, of those of all ranks, that the model gets right. A sampler gives some
/// samples twice so that all ranks have equally many; those, the batch's padding, are not counted.
double accuracy(torch::nn::Sequential& model, lockstep::DataLoader& loader,
                const lockstep::World& world) {
  const at::NoGradGuard no_grad;
  auto counts = at::zeros({2}, at::dtype(at::kLong).device(world.device()));  // correct, seen
  for (const auto& batch : loader.epoch(0)) {
    const int64_t own = batch.size() - batch.padding;
    const auto predicted = model->forward(batch.data.to(world.device())).argmax(1);
    counts[0] += predicted.eq(batch.target.to(world.device())).narrow(0, 0, own).sum();
    counts[1] += own;
  }
  world.group().all_reduce(counts);
  return counts[0].item<double>() / counts[1].item<double>();
}

/// What each process runs: single_gpu.cpp's train with what the comments mark.
void train(const Options& options) {
  // Meet the other processes. spawn() below has put the address of rank 0, the number of processes
  // and this one's rank into the environment, where init() finds them.
  const auto world = lockstep::init({.backend = options.backend});

  at::manual_seed(0);
  auto model = playground::make_mlp();
  model->to(world.device());
  // Wrap the model: rank 0's weights go to all, and each backward averages gradients over ranks.
  lockstep::DistributedDataParallel ddp_model(model, world.group());
  const auto parameters = model->parameters();
  const auto optimizer =
      lockstep::make_optimizer("sgd", parameters, {.lr = options.lr, .momentum = 0.9});

  const auto splits = examples::mnist(options.data);
  const lockstep::Compose transforms = {lockstep::normalize(), lockstep::flatten()};
  // Samplers that know of the other ranks: no two of them see the same sample in an epoch.
  lockstep::DataLoader train_loader(
      splits.train,
      lockstep::DistributedSampler(
          {.dataset_size = splits.train.size(), .rank = world.rank(), .world_size = world.size()}),
      transforms, {.batch_size = options.batch_size});
  lockstep::DataLoader test_loader(splits.test,
                                   lockstep::DistributedSampler({.dataset_size = splits.test.size(),
                                                                 .rank = world.rank(),
                                                                 .world_size = world.size(),
                                                                 .shuffle = false}),
                                   transforms, {.batch_size = 1000});

  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    auto loss_sum = at::zeros({}, at::dtype(at::kDouble).device(world.device()));
    for (const auto& batch : train_loader.epoch(epoch)) {
      const auto output = ddp_model.forward(batch.data.to(world.device()));
      const auto loss =
          torch::nn::functional::cross_entropy(output, batch.target.to(world.device()));
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      loss_sum += loss.detach();
    }
    world.group().all_reduce(loss_sum, lockstep::ReduceOp::avg);
    const double test_accuracy = accuracy(model, test_loader, world);
    if (world.rank() == 0) {
      std::printf("Epoch %d/%d loss %.4f test accuracy %.4f (%d processes)\n", epoch + 1,
                  options.epochs,
                  loss_sum.item<double>() / static_cast<double>(train_loader.batches_per_epoch()),
                  test_accuracy, world.size());
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = read_options(argc, argv);
  // As torch.multiprocessing.spawn: `gpus` processes on this machine run train(). The machines
  // before this one have ranks 0 to node_rank * gpus - 1.
  lockstep::SpawnOptions spawn_options;
  spawn_options.first_rank = options.node_rank * options.gpus;
  spawn_options.world_size = options.nodes * options.gpus;
  spawn_options.master_addr = lockstep::env_string("MASTER_ADDR").value_or(options.ip);
  spawn_options.master_port =
      static_cast<int>(lockstep::env_int("MASTER_PORT", 1, 65535).value_or(kPort));
  lockstep::spawn([&](int) { train(options); }, options.gpus, spawn_options);
  return 0;
} catch (...) {
  return examples::report_error();
}
