// distributed_data_parallel.cpp with metrics that are gathered as detectron2's `comm` module does:
// each process counts on its own share, the counts travel as objects (JSON here, pickles there),
// and the main process puts them together. It can save the model after each epoch.
//
// One host, two processes:
//   P=build/examples/000_playground/distributed_data_parallel2
//   $P -n 1 -g 2 -r 0 -ip 127.0.0.1 --port 8889 -s model.safetensors
// Two hosts with two processes each, IP being the address of the first; there, with P as above:
//   $P -n 2 -g 2 -r 0 -ip IP --port 8889
// and on the second:
//   $P -n 2 -g 2 -r 1 -ip IP --port 8889
//
// MASTER_ADDR and MASTER_PORT of the environment win over -ip and --port.
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "000_playground/mlp.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

struct Options {
  int nodes = 1;
  int gpus = 1;
  int node_rank = 0;
  std::string ip = "127.0.0.1";
  int port = 8888;
  std::string savefile;
  int epochs = 3;
  int64_t batch_size = 64;
  double lr = 0.01;
  std::string backend = "auto";
  examples::DataOptions data;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An MLP on MNIST with DistributedDataParallel and gathered metrics");
  flags.option("-n,--nodes", options.nodes, "Machines", {1});
  flags.option("-g,--gpus", options.gpus, "Processes of a machine, one a GPU", {1});
  flags.option("-r,--rank", options.node_rank, "Which of the machines this is, from 0", {0});
  flags.option("--ip", options.ip, "-ip: the address of machine 0", "ADDRESS");
  flags.option("--port", options.port, "Where machine 0 listens", {1, 65535});
  flags.option("-s,--savefile", options.savefile,
               "Save the model here after each epoch: safetensors, or FILE.pt", "FILE");
  flags.option("--epochs", options.epochs, "Passes over the data", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a process in a step", {1});
  flags.option("--lr", options.lr, "Learning rate", {0});
  flags.option("--backend", options.backend, "auto, gloo or nccl", "NAME");
  flags.also_called("--rank", {"--nr", "--node-rank"});
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv, {"-ip"});
  examples::check_node_rank("-r", options.node_rank, options.nodes);
  lockstep::check_weights_name("--savefile", options.savefile);
  return options;
}

/// What detectron2.utils.comm offers, over a World.
namespace comm {

using nlohmann::json;

bool is_main_process(const lockstep::World& world) {
  return world.rank() == 0;
}

/// Every process gets everyone's object, in the order of ranks.
std::vector<json> all_gather(const lockstep::World& world, const json& object) {
  return world.group().all_gather_object(object);
}

/// The main process gets everyone's object, in the order of ranks; the others get none.
std::vector<json> gather(const lockstep::World& world, const json& object) {
  return world.group().gather_object(object, 0);
}

/// The same number on all processes, although each draws one of its own.
uint64_t shared_random_seed(const lockstep::World& world) {
  const uint64_t own = lockstep::KeyedRandom(0, static_cast<uint64_t>(world.rank())).next();
  return all_gather(world, own).front().get<uint64_t>();
}

}  // namespace comm

/// What a process saw of a part of the data. Sums, not means: sums of shares of different sizes add
/// up to the exact mean over all samples.
struct Metrics {
  double loss_sum = 0;
  int64_t correct = 0;
  int64_t samples = 0;

  nlohmann::json to_json() const {
    return {{"loss_sum", loss_sum}, {"correct", correct}, {"samples", samples}};
  }
  static Metrics total(const std::vector<nlohmann::json>& parts) {
    Metrics all;
    for (const auto& part : parts) {
      all.loss_sum += part["loss_sum"].get<double>();
      all.correct += part["correct"].get<int64_t>();
      all.samples += part["samples"].get<int64_t>();
    }
    return all;
  }
  double loss() const { return loss_sum / static_cast<double>(samples); }
  double accuracy() const { return static_cast<double>(correct) / static_cast<double>(samples); }
};

/// Adds a batch to the counts, without the samples that only fill up the last batches.
void count(Metrics& metrics, const at::Tensor& output, const at::Tensor& target, int64_t padding) {
  const at::NoGradGuard no_grad;
  const int64_t own = target.size(0) - padding;
  if (own == 0) return;
  const auto shown = output.narrow(0, 0, own);
  const auto wanted = target.narrow(0, 0, own);
  metrics.loss_sum +=
      torch::nn::functional::cross_entropy(
          shown, wanted, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
          .item<double>();
  metrics.correct += shown.argmax(1).eq(wanted).sum().item<int64_t>();
  metrics.samples += own;
}

lockstep::DataLoader make_loader(const lockstep::TensorDataset& dataset,
                                 const lockstep::World& world, bool shuffle, uint64_t seed,
                                 int64_t batch_size) {
  return lockstep::DataLoader(dataset,
                              lockstep::DistributedSampler({.dataset_size = dataset.size(),
                                                            .rank = world.rank(),
                                                            .world_size = world.size(),
                                                            .shuffle = shuffle,
                                                            .seed = seed}),
                              {lockstep::normalize(), lockstep::flatten()},
                              {.batch_size = batch_size});
}

void train(const Options& options) {
  const auto world = lockstep::init({.backend = options.backend});
  at::manual_seed(0);
  auto model = playground::make_mlp();
  model->to(world.device());
  lockstep::DistributedDataParallel ddp_model(model, world.group());
  const auto parameters = model->parameters();
  const auto optimizer =
      lockstep::make_optimizer("sgd", parameters, {.lr = options.lr, .momentum = 0.9});

  const auto splits = examples::mnist(options.data);
  const uint64_t seed = comm::shared_random_seed(world);
  auto train_loader = make_loader(splits.train, world, true, seed, options.batch_size);
  auto test_loader = make_loader(splits.test, world, false, seed, 1000);

  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    Metrics train_share;
    for (const auto& batch : train_loader.epoch(epoch)) {
      const auto target = batch.target.to(world.device());
      const auto output = ddp_model.forward(batch.data.to(world.device()));
      const auto loss = torch::nn::functional::cross_entropy(output, target);
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      count(train_share, output, target, 0);
    }
    Metrics test_share;
    {
      const at::NoGradGuard no_grad;
      for (const auto& batch : test_loader.epoch(0)) {
        count(test_share, model->forward(batch.data.to(world.device())),
              batch.target.to(world.device()), batch.padding);
      }
    }
    const auto train_parts = comm::gather(world, train_share.to_json());
    const auto test_parts = comm::gather(world, test_share.to_json());
    if (!comm::is_main_process(world)) continue;

    const auto trained = Metrics::total(train_parts);
    const auto tested = Metrics::total(test_parts);
    std::printf(
        "Epoch %d/%d train loss %.4f accuracy %.4f | test loss %.4f accuracy %.4f (%lld samples)\n",
        epoch + 1, options.epochs, trained.loss(), trained.accuracy(), tested.loss(),
        tested.accuracy(), static_cast<long long>(tested.samples));
    if (!options.savefile.empty()) {
      lockstep::save_weights(lockstep::state_dict(*model), options.savefile,
                             {{"epoch", std::to_string(epoch + 1)}});
      std::printf("Epoch %d/%d saved to %s\n", epoch + 1, options.epochs, options.savefile.c_str());
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = read_options(argc, argv);
  lockstep::SpawnOptions spawn_options;
  spawn_options.first_rank = options.node_rank * options.gpus;
  spawn_options.world_size = options.nodes * options.gpus;
  spawn_options.master_addr = lockstep::env_string("MASTER_ADDR").value_or(options.ip);
  spawn_options.master_port =
      static_cast<int>(lockstep::env_int("MASTER_PORT", 1, 65535).value_or(options.port));
  spawn_options.master_port_flag = "--port or MASTER_PORT";
  lockstep::spawn([&](int) { train(options); }, options.gpus, spawn_options);
  return 0;
} catch (...) {
  return examples::report_error();
}
