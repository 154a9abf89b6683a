// The module's distributed_example: an image classifier trained by several processes, with the
// answers to the questions that the module asks of it.
//
// One host, two processes (this also sets the variables of question 4 by hand, and explains them):
//   examples/004_distributed_training/distributed_example.sh 2
//   P=build/examples/004_distributed_training/distributed_example
//   build/bin/lockstep run --standalone --nproc-per-node 2 $P
// Two hosts with two processes each, IP being the address of the first; there:
//   export MASTER_ADDR=IP NNODES=2
//   NODE_RANK=0 examples/004_distributed_training/distributed_example.sh 2
// and the same on the second with NODE_RANK=1.
#include <torch/nn/functional/loss.h>

#include <chrono>
#include <cstdio>

#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

struct Options {
  int epochs = 1;
  int64_t batch_size = 64;
  double lr = 0.01;
  std::string model = "fashion-cnn";
  examples::DataOptions data;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An image classifier trained by several processes");
  flags.option("--epochs", options.epochs, "Passes over the data", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a process in a step", {1});
  flags.option("--lr", options.lr, "Learning rate", {0});
  flags.choice("--model", options.model, {"fashion-cnn", "convnet"}, "What to train");
  examples::add_data_flags(flags, options.data, "Fashion-MNIST");
  examples::parse(flags, argc, argv);
  return options;
}

/// Rank 0 fetches the files if need be; the others wait for it and then read what is there.
lockstep::DatasetSplits load_data(const lockstep::World& world,
                                  const examples::DataOptions& options) {
  lockstep::DatasetSplits splits;
  if (world.rank() == 0) splits = examples::images("fashion-mnist", options);
  world.group().barrier();
  if (world.rank() != 0) splits = examples::images("fashion-mnist", options);
  return splits;
}

void train(const Options& options) {
  const auto world = lockstep::init();
  at::manual_seed(0);
  auto model = lockstep::make_model(options.model);
  model->to(world.device());

  // Question 1: what is the function of the DDP wrapper?
  //
  // It makes the copies of the model that the processes hold one model. When it is made, it checks
  // that they have the same parameters and gives all of them rank 0's values. Then it hooks into
  // autograd: as soon as backward has computed a group of gradients (a bucket), it starts to
  // average that bucket over all processes while backward goes on with the layers before. So after
  // backward() every process holds the same mean gradient, every optimizer takes the same step, and
  // the copies stay equal without ever being sent again. It also copies rank 0's buffers (here:
  // batch norm's running statistics) to all before each forward.
  lockstep::DistributedDataParallel ddp_model(model, world.group());
  const auto parameters = model->parameters();
  const auto optimizer =
      lockstep::make_optimizer("sgd", parameters, {.lr = options.lr, .momentum = 0.9});

  const auto splits = load_data(world, options.data);

  // Question 2: what is the function of the DistributedSampler?
  //
  // It deals the samples out. From (seed, epoch), which are the same everywhere, every process
  // computes the same shuffled order and takes every world_size-th of it, starting at its rank. So
  // no sample is seen by two processes in an epoch, none is left out, and nothing has to be sent to
  // agree on it. To give all processes equally many, the first few are given twice at the end.
  // Without it every process would train on all samples, and more processes would not be faster.
  const lockstep::DistributedSampler sampler(
      {.dataset_size = splits.train.size(), .rank = world.rank(), .world_size = world.size()});
  lockstep::DataLoader loader(
      splits.train, sampler, {lockstep::normalize(), lockstep::reshape({1, 28, 28})},
      {.batch_size = options.batch_size, .pin_memory = world.device().is_cuda()});

  const auto start = std::chrono::steady_clock::now();
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    // Question 3: why is it necessary to call dist.barrier() before passing a batch into the model?
    //
    // Processes come here at different times: one has read its data from a slow disk, another has
    // waited for a GPU. The barrier lets nobody go on before all are here. What follows are
    // collective operations (DDP's broadcast of buffers, then its all-reduces), in which a process
    // waits for all others, but only until a time-out: a process that is far ahead would run into
    // it. The barrier puts the wait in a place where it can be seen, keeps the clock below from
    // measuring it, and makes sure that what one process prepared for all (files, above) is there.
    // It is not needed for correct results: each all-reduce waits by itself.
    world.group().barrier();

    const auto epoch_start = std::chrono::steady_clock::now();
    auto loss_sum = at::zeros({}, at::dtype(at::kDouble).device(world.device()));
    for (const auto& batch : loader.epoch(epoch)) {
      const auto output = ddp_model.forward(batch.data.to(world.device()));
      const auto loss =
          torch::nn::functional::cross_entropy(output, batch.target.to(world.device()));
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      loss_sum += loss.detach();
    }
    world.group().all_reduce(loss_sum, lockstep::ReduceOp::avg);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - epoch_start;
    if (world.rank() == 0) {
      std::printf("Epoch %d: loss %.4f, %.0f samples/s over %d processes\n", epoch,
                  loss_sum.item<double>() / static_cast<double>(loader.batches_per_epoch()),
                  static_cast<double>(sampler.total_size()) / seconds.count(), world.size());
      std::fflush(stdout);
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (world.rank() == 0) std::printf("Done in %.1f s\n", seconds.count());
}

// Question 4, what the environment variables do, is answered in distributed_example.sh.

}  // namespace

int main(int argc, char** argv) try {
  train(read_options(argc, argv));
  return 0;
} catch (...) {
  return examples::report_error();
}
