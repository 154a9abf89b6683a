// The DCGAN of PyTorch's C++ examples (pytorch/examples, cpp/dcgan) on Lockstep's Trainer: two
// networks that learn against each other, each with an optimizer of its own.
//
// One host, one process and two:
//   build/examples/dcgan/dcgan --epochs 5
//   build/examples/dcgan/dcgan --epochs 5 --devices 2
// Two hosts, IP being the address of the first, there:
//   HOSTS="--nnodes 2 --nproc-per-node 1 --master-addr IP --master-port 29500"
//   build/bin/lockstep run $HOSTS --node-rank 0 build/examples/dcgan/dcgan --epochs 5
// and the same on the second with --node-rank 1.
//
// Images that the generator makes are written to dcgan-samples.safetensors after each epoch.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include <cstdio>

#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

namespace F = torch::nn::functional;
namespace nn = torch::nn;

nn::Sequential make_generator(int64_t noise_size) {
  using Up = nn::ConvTranspose2dOptions;
  return nn::Sequential{nn::ConvTranspose2d(Up(noise_size, 256, 4).bias(false)),
                        nn::BatchNorm2d(256),
                        nn::ReLU(),
                        nn::ConvTranspose2d(Up(256, 128, 3).stride(2).padding(1).bias(false)),
                        nn::BatchNorm2d(128),
                        nn::ReLU(),
                        nn::ConvTranspose2d(Up(128, 64, 4).stride(2).padding(1).bias(false)),
                        nn::BatchNorm2d(64),
                        nn::ReLU(),
                        nn::ConvTranspose2d(Up(64, 1, 4).stride(2).padding(1).bias(false)),
                        nn::Tanh()};
}

nn::Sequential make_discriminator() {
  using Down = nn::Conv2dOptions;
  const auto leaky = [] { return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)); };
  return nn::Sequential{nn::Conv2d(Down(1, 64, 4).stride(2).padding(1).bias(false)),
                        leaky(),
                        nn::Conv2d(Down(64, 128, 4).stride(2).padding(1).bias(false)),
                        nn::BatchNorm2d(128),
                        leaky(),
                        nn::Conv2d(Down(128, 256, 4).stride(2).padding(1).bias(false)),
                        nn::BatchNorm2d(256),
                        leaky(),
                        nn::Conv2d(Down(256, 1, 3).bias(false)),
                        nn::Sigmoid()};
}

class Dcgan : public lockstep::TrainingModule<lockstep::Batch> {
 public:
  explicit Dcgan(int64_t noise_size)
      : noise_size_(noise_size),
        generator_(register_module("generator", make_generator(noise_size))),
        discriminator_(register_module("discriminator", make_discriminator())) {}

  at::Tensor generate(int64_t count) {
    return generator_->forward(at::randn({count, noise_size_, 1, 1}, device()));
  }

  bool automatic_optimization() const override { return false; }

  at::Tensor training_step(const lockstep::Batch& batch, int64_t) override {
    const int64_t count = batch.size();
    const auto judge = [&](const at::Tensor& images, const at::Tensor& labels) {
      return F::binary_cross_entropy(discriminator_->forward(images).reshape(-1), labels);
    };
    const auto labels = [&] { return at::empty({count}, at::device(device())); };
    log("d_loss",
        update("discriminator",
               [&] {
                 // Real images, then made ones, whose generator is not to learn here.
                 return judge(batch.data, labels().uniform_(0.8, 1.0)) +
                        judge(generate(count).detach(), labels().zero_());
               }),
        count);
    log("g_loss", update("generator", [&] { return judge(generate(count), labels().fill_(1)); }),
        count);
    return {};
  }

  std::vector<lockstep::OptimizerConfig> configure_optimizers() override {
    const auto adam = lockstep::optimizer_factory("adam", {.lr = 2e-4, .beta1 = 0.5, .beta2 = 0.5});
    return {{.make = adam, .module = discriminator_.ptr(), .name = "discriminator"},
            {.make = adam, .module = generator_.ptr(), .name = "generator"}};
  }

  /// The held-out part is not looked at: ten images are made instead.
  void validation_step(const lockstep::Batch&, int64_t index) override {
    if (index == 0) samples_ = generate(10);
  }
  const at::Tensor& samples() const { return samples_; }

 private:
  int64_t noise_size_;
  nn::Sequential generator_;
  nn::Sequential discriminator_;
  at::Tensor samples_;
};

/// On rank 0: the example's lines and its images.
class Report : public lockstep::Callback {
 public:
  explicit Report(const Dcgan& gan) : gan_(gan) {}
  void on_log(lockstep::Trainer& trainer, const lockstep::LogResult& log) override {
    std::printf("[%2lld/%lld][%3lld/%lld] D_loss: %.4f | G_loss: %.4f\n",
                static_cast<long long>(log.step.epoch + 1),
                static_cast<long long>(trainer.options().max_epochs),
                static_cast<long long>(log.step.step), static_cast<long long>(log.step.total_steps),
                log.metrics.values.at("d_loss"), log.metrics.values.at("g_loss"));
    std::fflush(stdout);
  }
  void on_epoch_end(lockstep::Trainer&, const lockstep::EpochResult& result) override {
    lockstep::save_safetensors("dcgan-samples.safetensors", {{"images", gan_.samples().cpu()}});
    std::printf("-> samples of epoch %lld in dcgan-samples.safetensors\n",
                static_cast<long long>(result.epoch + 1));
  }

 private:
  const Dcgan& gan_;
};

struct Args {
  int64_t epochs = 30;
  int64_t batch_size = 64;
  int64_t noise_size = 100;
  int64_t devices = 1;
  std::string checkpoint_dir;
  lockstep::TrainerOptions trainer;
  examples::DataOptions data;
};

Args read_args(int argc, char** argv) {
  Args args;
  args.trainer.log_every_n_steps = 100;
  examples::Flags flags("DCGAN on MNIST");
  flags.option("--epochs", args.epochs, "Passes over the data", {1});
  flags.option("--batch-size", args.batch_size, "Images of each process in a batch", {2});
  flags.option("--noise-size", args.noise_size, "Numbers from which an image is made", {1});
  flags.option("--devices", args.devices, "Processes to start", {1});
  flags.option("--log-every-n-steps", args.trainer.log_every_n_steps, "Steps between lines", {1});
  flags.choice("--strategy", args.trainer.strategy, lockstep::strategy_names(),
               "How both networks are spread over the processes");
  flags.choice("--precision", args.trainer.precision.precision, lockstep::precision_names(),
               "Numbers to compute in");
  flags.option("--checkpoint-dir", args.checkpoint_dir,
               "Save both networks and their optimizers here, and go on from there", "DIR");
  examples::add_data_flags(flags, args.data);
  examples::parse(flags, argc, argv);
  return args;
}

void run(const Args& args) {
  const auto world = lockstep::init();
  const auto splits = examples::mnist(args.data);
  const lockstep::Compose transforms = {lockstep::normalize({0.5}, {0.5}),
                                        lockstep::reshape({1, 28, 28})};
  const auto loader = [&](const lockstep::TensorDataset& dataset) {
    const lockstep::DistributedSampler share({dataset.size(), world.rank(), world.size()});
    return lockstep::DataLoader(dataset, share, transforms, {.batch_size = args.batch_size});
  };
  at::manual_seed(0);
  const auto gan = std::make_shared<Dcgan>(args.noise_size);
  at::manual_seed(static_cast<uint64_t>(world.rank()));  // each rank draws noise of its own

  lockstep::TrainerOptions options = args.trainer;
  options.max_epochs = args.epochs;
  options.limit_val_batches = 1;
  lockstep::Trainer trainer(world, options);
  if (world.rank() == 0) trainer.add_callback(std::make_shared<Report>(*gan));
  if (!args.checkpoint_dir.empty()) {
    lockstep::CheckpointFolder folder(args.checkpoint_dir);
    const auto saved = lockstep::load_checkpoint(world.group(), "auto", &folder,
                                                 trainer.options().identity, world.device());
    if (saved) trainer.restore(*saved);
    trainer.add_callback(std::make_shared<lockstep::Checkpointer>(folder, 0));
  }
  trainer.fit(gan, loader(splits.train), loader(splits.test));
}

}  // namespace

int main(int argc, char** argv) try {
  const Args args = read_args(argc, argv);
  if (args.devices > 1 && lockstep::spawn(static_cast<int>(args.devices))) return 0;
  run(args);
  return 0;
} catch (...) {
  return examples::report_error();
}
