// PyTorch's tutorial "Distributed Pipeline Parallelism Using RPC". A ResNet-like model lies in two
// parts on two workers. A master cuts each batch into parts (micro-batches) and sends them through
// both: while the second worker computes one, the first computes the next. More parts keep the
// workers busier, and cost more messages. At the end the workers train the same model by Lockstep's
// own pipeline, which needs no master and does backward in parts as well.
//   build/examples/003_rpc/rpc_pipeline
// Under a launcher:
//   build/bin/lockstep run --nproc-per-node 3 build/examples/003_rpc/rpc_pipeline
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "003_rpc/references.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace nn = torch::nn;
namespace rpc = lockstep::rpc;
using rpc_tutorial::Parameters;
using Clock = std::chrono::steady_clock;

struct Options {
  int64_t batches = 4;
  int64_t batch_size = 32;
  int64_t image_size = 32;
  int64_t blocks = 6;
  std::vector<int64_t> splits = {1, 2, 4, 8};
  double lr = 0.05;
};

constexpr int64_t kChannels = 16;
constexpr int64_t kClasses = 10;

/// Two convolutions, whose result is added to their input (He et al. 2015).
struct Block : nn::Module {
  Block() {
    for (int i = 0; i < 2; ++i) {
      const auto number = std::to_string(i + 1);
      const auto options = nn::Conv2dOptions(kChannels, kChannels, 3).padding(1).bias(false);
      convs.push_back(register_module("conv" + number, nn::Conv2d(options)));
      norms.push_back(register_module("bn" + number, nn::BatchNorm2d(kChannels)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = norms[0]->forward(convs[0]->forward(x)).relu();
    return (norms[1]->forward(convs[1]->forward(y)) + x).relu();
  }
  std::vector<nn::Conv2d> convs;
  std::vector<nn::BatchNorm2d> norms;
};

/// Takes images [B, 3, H, W], gives scores [B, kClasses].
struct ResNet : nn::Module {
  explicit ResNet(int64_t blocks)
      : stem(nn::Conv2dOptions(3, kChannels, 3).padding(1)), head(kChannels, kClasses) {
    register_module("stem", stem);
    for (int64_t i = 0; i < blocks; ++i) {
      layers_of_blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<Block>()));
    }
    register_module("head", head);
  }
  std::vector<lockstep::Layer> layers() {
    std::vector<lockstep::Layer> all;
    all.push_back({"stem", stem.ptr(),
                   [stem = stem](const at::Tensor& x) mutable { return stem->forward(x).relu(); }});
    for (size_t i = 0; i < layers_of_blocks.size(); ++i) {
      const auto block = layers_of_blocks[i];
      all.push_back({"block" + std::to_string(i), block,
                     [block](const at::Tensor& x) { return block->forward(x); }});
    }
    all.push_back({"head", head.ptr(), [head = head](const at::Tensor& x) mutable {
                     return head->forward(x.mean({2, 3}));
                   }});
    return all;
  }
  nn::Conv2d stem;
  std::vector<std::shared_ptr<Block>> layers_of_blocks;
  nn::Linear head;
};

std::shared_ptr<ResNet> make_model(int64_t blocks) {
  at::manual_seed(1);  // The same values everywhere.
  return std::make_shared<ResNet>(blocks);
}

/// One half of the layers, on a worker.
class Shard {
 public:
  Shard(int64_t blocks, bool second) {
    auto all = make_model(blocks)->layers();
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    layers_.assign(second ? middle : all.begin(), second ? all.end() : middle);
  }
  /// One micro-batch at a time: batch norm keeps statistics.
  at::Tensor forward(const rpc::RRef<at::Tensor>& input) {
    at::Tensor x = input.to_here();
    const std::lock_guard lock(mutex_);
    for (const auto& layer : layers_) x = layer.forward(x);
    return x;
  }
  Parameters parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& layer : layers_) {
      for (const auto& parameter : layer.module->parameters()) all.push_back(parameter);
    }
    return rpc_tutorial::references_to(all);
  }

 private:
  std::mutex mutex_;
  std::vector<lockstep::Layer> layers_;
};

const auto make_shard = rpc::function("make_shard", [](int64_t blocks, bool second) {
  return std::make_shared<Shard>(blocks, second);
});
const auto forward = rpc::method("Shard.forward", &Shard::forward);
const auto parameters = rpc::method("Shard.parameters", &Shard::parameters);

/// The parts on their workers, as one model.
class DistributedResNet {
 public:
  DistributedResNet(int64_t blocks, int64_t splits)
      : first_(rpc::remote("worker1", make_shard, blocks, false)),
        second_(rpc::remote("worker2", make_shard, blocks, true)),
        splits_(splits) {}

  at::Tensor forward(const at::Tensor& images) {
    std::vector<rpc::Future<at::Tensor>> parts;
    for (const auto& part : images.chunk(splits_)) {
      // The first worker's output goes to the second, not by way of this one.
      const auto middle = first_.remote(::forward, rpc::RRef<at::Tensor>::own(part));
      parts.push_back(second_.rpc_async(::forward, middle));
    }
    return at::cat(rpc::when_all(parts).wait());
  }
  Parameters parameters() const {
    auto all = first_.rpc_sync(::parameters);
    for (const auto& one : second_.rpc_sync(::parameters)) all.push_back(one);
    return all;
  }

 private:
  rpc::RRef<Shard> first_, second_;
  int64_t splits_;
};

struct Batch {
  at::Tensor images, classes;
};
std::vector<Batch> random_batches(const Options& options) {
  at::manual_seed(2);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < options.batches; ++i) {
    batches.push_back({at::rand({options.batch_size, 3, options.image_size, options.image_size}),
                       at::randint(kClasses, {options.batch_size}, at::kLong)});
  }
  return batches;
}

/// Trains on all batches and prints how fast. `step` gives a batch's loss.
template <class Step>
void measure(const std::string& what, const Options& options, const Step& step) {
  double loss = 0;
  const auto batches = random_batches(options);
  const auto begin = Clock::now();
  for (const Batch& batch : batches) loss = step(batch);
  const std::chrono::duration<double> time = Clock::now() - begin;
  std::printf("%s: %.0f images/s, last loss %.4f\n", what.c_str(),
              static_cast<double>(options.batches * options.batch_size) / time.count(), loss);
  std::fflush(stdout);
}

std::string parts_text(int64_t splits) {
  return std::to_string(splits) + (splits == 1 ? " part" : " parts");
}

void run_master(const Options& options) {
  for (const int64_t splits : options.splits) {
    DistributedResNet model(options.blocks, splits);
    rpc::DistributedOptimizer optimizer("sgd", model.parameters(), {.lr = options.lr});
    measure("RPC, " + parts_text(splits), options, [&](const Batch& batch) {
      rpc::AutogradContext context;
      const auto loss = nn::functional::cross_entropy(model.forward(batch.images), batch.classes);
      context.backward({loss});
      optimizer.step(context);
      return loss.item<double>();
    });
  }
}

/// The same by Lockstep's pipeline among the two workers.
void run_stage(const lockstep::ProcessGroup& stages, const Options& options) {
  for (const int64_t splits : options.splits) {
    const auto model = make_model(options.blocks);
    const auto strategy = lockstep::make_strategy(
        "pipeline", {.module = model,
                     .layers = model->layers(),
                     .make_optimizer =
                         [&](std::vector<at::Tensor> tensors) {
                           return lockstep::make_optimizer("sgd", std::move(tensors),
                                                           {.lr = options.lr});
                         },
                     .group = stages,
                     .options = {.pipeline = lockstep::PipelineOptions{.num_micro_batches = splits,
                                                                       .balance = "parameters"}}});
    double loss = 0;
    const auto step = [&](const Batch& batch) {
      loss = 0;
      lockstep::BatchWork work;
      work.input = batch.images;
      work.target = batch.classes;
      work.criterion = [&](const at::Tensor& output, const at::Tensor& target) {
        const at::Tensor part = nn::functional::cross_entropy(output, target);
        loss += part.item<double>() / static_cast<double>(splits);
        return part;
      };
      strategy->run_batch(work);
      strategy->step();
      strategy->zero_grad();
      return loss;
    };
    if (stages.rank() == 1) {
      measure("Lockstep's pipeline, " + parts_text(splits), options, step);
    } else {
      for (const Batch& batch : random_batches(options)) step(batch);
    }
  }
}

void run_worker(const Options& options) {
  at::set_num_threads(1);
  const auto world = lockstep::init();
  if (world.size() != 3)
    throw lockstep::UsageError("three workers are needed: a master and one for each part");
  const bool leads = world.rank() == 0;
  const auto role = world.group().split(leads ? 0 : 1);
  {
    auto agent = rpc::init(world, leads ? "master" : "worker" + std::to_string(world.rank()));
    if (leads) run_master(options);
    agent.shutdown();
  }
  if (!leads) run_stage(role, options);
}

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("A model in two parts on two workers, as a pipeline over RPC");
  flags.option("--batches", options.batches, "Batches to train on, each time", {1});
  flags.option("--batch-size", options.batch_size, "Images of a batch", {1});
  flags.option("--image-size", options.image_size, "Height and width of an image", {4});
  flags.option("--blocks", options.blocks, "Residual blocks of the model", {1});
  flags.list("--splits", options.splits, "Into how many parts a batch is cut, each in turn", {1});
  flags.option("--lr", options.lr, "The learning rate");
  examples::parse(flags, argc, argv);
  for (const int64_t splits : options.splits) {
    if (splits < 1 || options.batch_size % splits != 0) {
      throw lockstep::UsageError("--splits " + std::to_string(splits) + " does not divide " +
                                 "--batch-size " + std::to_string(options.batch_size));
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto options = read_options(argc, argv);
  lockstep::spawn([&](int) { run_worker(options); }, 3);
  return 0;
} catch (...) {
  return examples::report_error();
}
