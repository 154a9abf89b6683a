#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/autograd/activation_checkpoint.h"
#include "lockstep/data/loader.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/train/all_finite.h"
#include "lockstep/train/random_state.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_module.h"
#include "tests/cuda/cuda_testing.h"
#include "tests/support/small_task.h"

namespace lockstep::cuda_test {
namespace {

class CudaTrainTest : public Cuda {};

TEST_F(CudaTrainTest, TheScalerSkipsAStepThatOverflowed) {
  for (const char* name : {"sgd", "adam", "adamw"}) {
    const auto make = [&](at::Device device) {
      return at::arange(6, at::kFloat).div(7).to(device).requires_grad_();
    };
    at::Tensor on_gpu = make(kGpu), plain = make(kGpu);
    const auto optimizer = make_optimizer(name, {on_gpu}, {.lr = 0.1});
    const auto without = make_optimizer(name, {plain}, {.lr = 0.1});
    GradScaler scaler;
    const auto step = [&](double factor) {
      scaler.scale((on_gpu * factor).sum()).backward();
      const bool stepped = scaler.step(*optimizer);
      scaler.update();
      zero_grad({on_gpu});
      return stepped;
    };
    const at::Tensor before = on_gpu.detach().clone();
    step(1e38);
    expect_equal(on_gpu.detach(), before, name);
    EXPECT_EQ(scaler.get_scale(), 32768);
    step(0.5);
    EXPECT_EQ(scaler.get_scale(), 32768);
    (plain * 0.5).sum().backward();
    without->step();
    EXPECT_TRUE(at::allclose(on_gpu, plain, 1e-6, 1e-7)) << name << on_gpu << plain;
  }
}

TEST_F(CudaTrainTest, AnOptimizersStateGoesToTheCpuAndBack) {
  for (const std::string name : {"sgd", "adam", "adamw", "rmsprop", "adagrad"}) {
    std::map<std::string, std::pair<at::Tensor, std::unique_ptr<Optimizer>>> all;
    const auto make = [&](const std::string& where, at::Device device) -> auto& {
      at::Tensor p = at::arange(6, at::kFloat).div(7).to(device).requires_grad_();
      OptimizerOptions options{.lr = 0.1};
      if (name == "sgd") options.momentum = 0.9;
      return all.emplace(where, std::pair(p, make_optimizer(name, {p}, options))).first->second;
    };
    const auto step = [](auto& one) {
      one.first.square().sum().backward();
      one.second->step();
      zero_grad({one.first});
    };
    auto& first = make("first", kGpu);
    step(first);
    step(first);
    StateDict saved;
    for (const auto& [key, tensor] : first.second->state()) saved.emplace_back(key, tensor.cpu());
    for (const at::Device device : {at::Device(at::kCPU), kGpu}) {
      auto& other = make("other " + device.str(), device);
      {
        const at::NoGradGuard no_grad;
        other.first.copy_(first.first);
      }
      other.second->load_state(saved);
    }
    for (auto& [where, one] : all) step(one);
    for (auto& [where, one] : all)
      EXPECT_TRUE(at::allclose(one.first.detach().cpu(), first.first.detach().cpu(), 1e-5, 1e-6))
          << name << " " << where << one.first << first.first;
  }
}

TEST_F(CudaTrainTest, PinnedBatchesArriveWhole) {
  TensorDataset dataset = test::noise_images(1000);
  SamplerOptions sampler;
  sampler.dataset_size = dataset.size();
  sampler.shuffle = false;
  LoaderOptions options;
  options.batch_size = 50;
  options.num_workers = 3;
  options.pin_memory = true;
  const at::Tensor data = dataset.data, targets = dataset.targets;
  DataLoader loader(std::move(dataset), DistributedSampler(sampler), Compose(), options);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    at::Tensor busy = at::rand({4096, 4096}, kGpu);
    std::vector<Batch> moved;
    for (const Batch& batch : loader.epoch(epoch)) {
      EXPECT_TRUE(batch.data.is_pinned());
      busy = at::mm(busy, busy).mul_(1e-6);  // The copies wait behind it.
      moved.push_back(BatchTraits<Batch>::to(batch, kGpu));
    }
    for (size_t i = 0; i < moved.size(); ++i) {
      const auto begin = static_cast<int64_t>(50 * i);
      expect_equal(moved[i].target, targets.narrow(0, begin, 50));
      EXPECT_TRUE(at::equal(moved[i].data.cpu().view({50, -1}), data.narrow(0, begin, 50)));
    }
  }
}

TEST_F(CudaTrainTest, RandomStatesAreSavedAndSet) {
  at::manual_seed(3);
  const StateDict state = random_state(kGpu);
  const at::Tensor on_gpu = at::rand({100}, kGpu), on_cpu = at::rand({100});
  for (const auto& [name, tensor] : state) EXPECT_TRUE(tensor.is_cpu()) << name;
  EXPECT_FALSE(at::equal(at::rand({100}, kGpu), on_gpu));
  set_random_state(state, kGpu);
  expect_equal(at::rand({100}, kGpu), on_gpu);
  expect_equal(at::rand({100}), on_cpu);
}

TEST_F(CudaTrainTest, ACheckpointedLayerDrawsTheSameDropoutAgain) {
  const auto gradient = [&](bool checkpointed) {
    at::manual_seed(3);
    const at::Tensor w = at::rand({64, 64}, kGpu).requires_grad_();
    const at::Tensor x = at::rand({64, 64}, kGpu).requires_grad_();
    const auto layer = [&](const at::Tensor& in) { return at::dropout(at::mm(in, w), 0.5, true); };
    const at::Tensor out = checkpointed ? checkpoint(layer, x) : layer(x);
    at::rand({10}, kGpu);
    out.square().sum().backward();
    return w.grad();
  };
  expect_equal(gradient(true), gradient(false));
}

TEST_F(CudaTrainTest, NumbersThatAreNotFiniteAreFound) {
  const at::Tensor good = at::ones({10}, kGpu),
                   half = at::full({3}, 60000, good.options()).to(at::kHalf);
  EXPECT_TRUE(all_finite({good, half, at::ones({2})}));
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
    at::Tensor spoilt = good.clone();
    spoilt[3] = bad;
    EXPECT_FALSE(all_finite({half, spoilt, good}));
    EXPECT_FALSE(all_finite({good, spoilt.cpu()}));
  }
}

class CudaTrainerTest : public Nccl {};

TEST_F(CudaTrainerTest, TrainsAsOnTheCpu) {
  TrainerOptions options;
  options.max_epochs = 2;
  const auto fit = [&](const World& world) {
    auto task = test::small_task();
    const auto module = task.module;
    Trainer trainer(world, options);
    const FitResult result = trainer.fit(std::move(task));
    return result.test.loss;
  };
  InitOptions on_cpu;
  on_cpu.cpu_only = true;
  const double cpu = fit(init(on_cpu));
  EXPECT_NEAR(fit(world_of_one()), cpu, 1e-4);
}

TEST_F(CudaTrainerTest, GoesOnFromACheckpointWithTheSameBits) {
  const std::filesystem::path files =
      std::filesystem::path(testing::TempDir()) / ("lockstep_cuda_" + std::to_string(getpid()));
  TrainerOptions options;
  options.max_epochs = 2;
  // Dropout and batch norm: random state and buffers matter.
  const World world = world_of_one();
  const auto fit = [&](bool resumes, int64_t epochs) {
    at::globalContext().setDeterministicCuDNN(true);
    options.max_epochs = epochs;
    Trainer trainer(world, options);
    CheckpointFolder folder(files / "run");
    if (resumes) {
      auto stored = load_checkpoint(world.group(), "auto", &folder, {}, world.device());
      EXPECT_TRUE(stored.has_value());
      trainer.restore(std::move(*stored));
    }
    trainer.fit(test::small_task("fashion-cnn"));
    if (!resumes && epochs == 1) trainer.save(folder, CheckpointOverlap::wait);
    trainer.finish_saves();
    return trainer.model_state();
  };
  fit(false, 1);
  const StateDict resumed = fit(true, 2);
  expect_same_state(resumed, fit(false, 2));
  std::filesystem::remove_all(files);
}

}  // namespace
}  // namespace lockstep::cuda_test
