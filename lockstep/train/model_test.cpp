// Loss, evaluation, weights and random state, on models and data of a few numbers.

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/batch_feed.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/model_training.h"
#include "lockstep/train/random_state.h"
#include "lockstep/train/stop_agreement.h"
#include "lockstep/train/weights.h"

namespace lockstep {
namespace model_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Loss, CountsWhatArgmaxFindsWhateverTheLayout) {
  const at::Tensor output = at::randn({50, 7});
  const at::Tensor target = at::randint(7, {50}, at::kLong);
  const int64_t expected = output.argmax(1).eq(target).sum().item<int64_t>();
  EXPECT_EQ(count_correct(output, target), expected);
  EXPECT_EQ(count_correct(output.t().contiguous().t(), target), expected);
}

TEST(Loss, SumIsTheMeanTimesTheRows) {
  const auto both = [](LossKind kind, const at::Tensor& output, const at::Tensor& target) {
    return std::pair(batch_loss(kind, output, target).item<double>(),
                     batch_loss(kind, output, target, at::Reduction::Sum).item<double>());
  };
  const auto [mean, sum] =
      both(LossKind::cross_entropy, at::randn({8, 5}), at::randint(5, {8}, at::kLong));
  EXPECT_NEAR(sum, 8 * mean, 1e-4);
  const auto [square, squares] = both(LossKind::mean_squared, at::randn({8, 3}), at::zeros({8, 3}));
  EXPECT_NEAR(squares, 24 * square, 1e-4);
}

TensorDataset noise_images(int64_t count) {
  TensorDataset dataset;
  dataset.name = "noise";
  dataset.data = at::rand({count, 784});
  dataset.targets = at::randint(10, {count}, at::kLong);
  dataset.num_classes = 10;
  return dataset;
}

DataLoader share_of(const TensorDataset& dataset, int rank, int ranks) {
  SamplerOptions sampler;
  sampler.dataset_size = dataset.size();
  sampler.rank = rank;
  sampler.world_size = ranks;
  sampler.shuffle = false;
  LoaderOptions options;
  options.batch_size = 3;
  return DataLoader(dataset, DistributedSampler(sampler), {}, options);
}

Metrics evaluated(const std::shared_ptr<Model>& model, DataLoader loader, const World& world,
                  int64_t limit = 0) {
  const auto module = std::make_shared<ModelTraining>(model, ModelTrainingOptions{});
  const auto feed = detail::feed_of(module, std::move(loader));
  return evaluate(*module, {}, *feed, world.group(), limit);
}

TEST(Evaluate, CountsEverySampleOnceHoweverManyRanksShareThem) {
  const World world = init();
  const auto model = make_model("mlp");
  const TensorDataset dataset = noise_images(23);
  const auto on = [&](int rank, int ranks) {
    return evaluated(model, share_of(dataset, rank, ranks), world);
  };
  const Metrics whole = on(0, 1);
  const at::Tensor output = model->forward(dataset.data);
  EXPECT_EQ(whole.samples, 23);
  EXPECT_NEAR(whole.loss, at::cross_entropy_loss(output, dataset.targets).item<double>(), 1e-6);
  EXPECT_DOUBLE_EQ(whole.accuracy * 23, output.argmax(1).eq(dataset.targets).sum().item<int64_t>());
  // 23 samples on 4 ranks are 6 each, the last of one rank being padding. On 30 ranks some have
  // nothing but padding.
  for (const int ranks : {4, 30}) {
    int64_t samples = 0;
    double loss = 0;
    double correct = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Metrics part = on(rank, ranks);
      if (part.samples == 0) continue;
      samples += part.samples;
      loss += part.loss * static_cast<double>(part.samples);
      correct += part.accuracy * static_cast<double>(part.samples);
    }
    EXPECT_EQ(samples, 23) << ranks;
    EXPECT_NEAR(loss / 23, whole.loss, 1e-6) << ranks;
    EXPECT_NEAR(correct / 23, whole.accuracy, 1e-9) << ranks;
  }
}

TEST(Evaluate, LeavesTheModelInItsModeAndStopsAtTheLimit) {
  const World world = init();
  const auto model = make_model("convnet");
  const at::Tensor before = model->buffers().front().clone();
  const Metrics some = evaluated(model, share_of(noise_images(20), 0, 1), world, 2);
  EXPECT_EQ(some.samples, 6);
  EXPECT_TRUE(model->is_training());
  EXPECT_TRUE(at::equal(before, model->buffers().front()))
      << "batch norm learned from the test part";
}

TEST(Weights, HaveTheNamesOfPythonsStateDict) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state_dict(*make_model("convnet"))) names.push_back(name);
  EXPECT_THAT(names, testing::IsSupersetOf({"layer1.0.weight", "layer1.1.running_mean",
                                            "layer1.1.num_batches_tracked", "fc.bias"}));
}

TEST(Weights, ComeBackFromEachFormatAndFromWhatWrapsThem) {
  TemporaryDirectory folder;
  const auto saved = make_model("convnet");
  const StateDict expected = state_dict(*saved);
  for (const std::string prefix : {"", "module.", "_orig_mod.module.", "model_state_dict."}) {
    for (const std::string name : {"w.safetensors", "w.pt"}) {
      StateDict prefixed = expected;
      for (auto& [key, tensor] : prefixed) key = prefix + key;
      prefixed.emplace_back("optimizer.step", at::ones({1}));
      if (prefix.empty()) prefixed.pop_back();
      save_weights(prefixed, folder.path() / name);
      const auto loaded = make_model("convnet");
      load_weights(*loaded, folder.path() / name);
      const StateDict found = state_dict(*loaded);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i].second, expected[i].second)) << name << found[i].first;
      }
    }
  }
}

/// Whether a new model has the weights of `saved` after they were read under other names.
bool is_loaded(const StateDict& saved, const std::function<std::string(std::string)>& other,
               const StateDict& more, const WeightsSelection& selection = {}) {
  TemporaryDirectory folder;
  StateDict renamed = more;
  for (const auto& [name, tensor] : saved) renamed.emplace_back(other(name), tensor.detach());
  save_weights(renamed, folder.path() / "w.safetensors");
  const auto model = make_model("mlp");
  load_weights(*model, folder.path() / "w.safetensors", selection);
  const StateDict loaded = state_dict(*model);
  return std::equal(loaded.begin(), loaded.end(), saved.begin(), [](const auto& a, const auto& b) {
    return a.first == b.first && at::equal(a.second, b.second);
  });
}

TEST(Weights, TheOnlyPrefixOfAllNamesIsTakenAway) {
  const StateDict saved = state_dict(*make_model("mlp"));
  const auto in_app = [](const std::string& name) { return "app.model." + name; };
  const StateDict beside = {{"app.optim.state.layers.0.weight.exp_avg", at::ones({2})}};
  EXPECT_TRUE(is_loaded(saved, in_app, beside));
  StateDict two = beside;
  for (const auto& [name, tensor] : saved) two.emplace_back("ema." + name, tensor.detach());
  EXPECT_THAT(
      [&] { is_loaded(saved, in_app, two); },
      ThrowsMessage<CheckpointError>(AllOf(
          HasSubstr("--load-only '*' --load-rename 'app.model.*=*'"), HasSubstr("'ema.*=*'"))));
  EXPECT_TRUE(is_loaded(saved, in_app, two, {.only = {"*"}, .rename = {"app.model.*=*"}}));
  EXPECT_THAT([&] { is_loaded(saved, in_app, beside, {.only = {"layers.0.*"}}); },
              ThrowsMessage<CheckpointError>(HasSubstr("--load-rename 'app.model.*=*'")));
}

TEST(Weights, WhatATrainingSavesBesideAModelIsLeftAside) {
  const StateDict saved = state_dict(*make_model("mlp"));
  const auto same = [](std::string name) { return name; };
  EXPECT_TRUE(is_loaded(saved, same,
                        {{"optimizer.state.layers.0.weight.exp_avg", at::ones({2})},
                         {"train_state.token", at::ones({1})}}));
  EXPECT_THROW(is_loaded(saved, same, {{"head.weight", at::ones({2})}}), CheckpointError);
}

TEST(Weights, WrappersOfSingleLayersDoNotCount) {
  const StateDict saved = state_dict(*make_model("mlp"));
  for (const std::string wrapper :
       {"_orig_mod.", "_checkpoint_wrapped_module.", "_checkpoint_wrapped_module._orig_mod."}) {
    EXPECT_TRUE(is_loaded(
        saved,
        [&](std::string name) { return "module." + name.insert(name.rfind('.') + 1, wrapper); },
        {}))
        << wrapper;
  }
  EXPECT_EQ(detail::without_layer_wrappers("a.my_orig_mod.w"), "a.my_orig_mod.w");
}

TEST(Weights, BatchNormMayLackItsCountAsInOldFiles) {
  TemporaryDirectory folder;
  const auto saved = make_model("convnet");
  StateDict old;
  for (const auto& [name, tensor] : state_dict(*saved)) {
    if (!name.ends_with("num_batches_tracked")) old.emplace_back(name, tensor.detach() + 1);
  }
  for (const std::string file : {"w.pt", "w.safetensors"}) {
    save_weights(old, folder.path() / file);
    const auto loaded = make_model("convnet");
    EXPECT_TRUE(load_weights(*loaded, folder.path() / file).empty());
    EXPECT_EQ(loaded->named_buffers()["layer1.1.num_batches_tracked"].item<int64_t>(), 0);
    EXPECT_TRUE(at::equal(loaded->named_buffers()["layer2.1.running_var"], at::full({32}, 2)));
  }
  std::erase_if(old, [](const auto& item) { return item.first.ends_with("running_mean"); });
  save_weights(old, folder.path() / "w.pt");
  EXPECT_THAT([&] { load_weights(*saved, folder.path() / "w.pt"); },
              ThrowsMessage<CheckpointError>(HasSubstr("4 missing")));
}

/// The mlp's tensors as "net.encoder.N.weight", those of layer 4 of another size, and one more.
StateDict of_another_task(const StateDict& saved) {
  StateDict tensors = {{"net.extra", at::ones({2})}};
  for (const auto& [name, tensor] : saved) {
    std::string other = name;
    tensors.emplace_back("net." + other.replace(0, std::string("layers").size(), "encoder"),
                         name.starts_with("layers.4.") ? at::zeros({7}) : tensor.detach());
  }
  return tensors;
}

TEST(Weights, APartIsLoadedUnderOtherNames) {
  TemporaryDirectory folder;
  const auto saved = make_model("mlp");
  const StateDict source = state_dict(*saved);
  const auto path = folder.path() / "w.safetensors";
  save_weights(of_another_task(source), path);
  CheckpointFolder run(folder.path() / "run");
  Checkpoint checkpoint;
  checkpoint.model = of_another_task(source);
  run.write(checkpoint);
  for (const auto& from : {path, run.path()}) {
    const auto model = make_model("mlp");
    std::vector<at::Tensor> before;
    for (const auto& [name, tensor] : state_dict(*model)) before.push_back(tensor.clone());
    load_weights(*model, from,
                 {.only = {"layers.0.*", "*.2.bias"}, .rename = {"net.encoder.*=layers.*"}});
    const StateDict loaded = state_dict(*model);
    for (size_t i = 0; i < loaded.size(); ++i) {
      const std::string& name = loaded[i].first;
      const bool wanted = name.starts_with("layers.0.") || name == "layers.2.bias";
      EXPECT_TRUE(at::equal(loaded[i].second, wanted ? source[i].second : before[i])) << name;
    }
  }
}

TEST(Weights, APartThatDoesNotFitIsListedAtOnce) {
  TemporaryDirectory folder;
  const auto model = make_model("mlp");
  const auto path = folder.path() / "w.safetensors";
  save_weights(of_another_task(state_dict(*model)), path);
  const auto load = [&](WeightsSelection selection) {
    return [&model, &path, selection] { load_weights(*model, path, selection); };
  };
  EXPECT_THAT(load({.only = {"layers.*"}, .rename = {"net.encoder.*.weight=layers.*.weight"}}),
              ThrowsMessage<CheckpointError>(AllOf(
                  HasSubstr("3 missing (layers.0.bias [128], layers.2.bias [64], layers.4.bias"),
                  HasSubstr("1 of another shape (layers.4.weight [7] in place of [10, 64])"),
                  ::testing::Not(HasSubstr("unexpected")))));
  EXPECT_THAT(load({.only = {}, .rename = {"net.encoder.*=layers.*"}}),
              ThrowsMessage<CheckpointError>(AllOf(HasSubstr("1 unexpected (net.extra [2])"),
                                                   HasSubstr("2 of another shape"))));
  EXPECT_THAT(load({.only = {"layer.*"}}), ThrowsMessage<UsageError>(HasSubstr("'layer.*'")));
  EXPECT_THAT(load({.rename = {"net.decoder.*=layers.*"}}),
              ThrowsMessage<UsageError>(HasSubstr("no tensor to rename by 'net.decoder.*=")));
  EXPECT_THAT(load({.rename = {"net.encoder.0.bias=net.extra"}}),
              ThrowsMessage<UsageError>(HasSubstr("would both become net.extra")));
  for (const char* rule : {"a", "a=b=c", "a.*=b", "*.*=*.*"})
    EXPECT_THROW(load({.rename = {rule}})(), UsageError) << rule;
}

TEST(Weights, ANameOfAnotherFormatIsRefused) {
  for (const char* name : {"m.safetensors", "folder.d/m", "m"}) check_weights_name("-s", name);
  EXPECT_THAT([] { check_weights_name("-s", "out.onnx"); },
              ThrowsMessage<UsageError>(HasSubstr("-s out.onnx: weights are written as")));
  EXPECT_THROW(BestModel("m.onnx"), UsageError);
}

TEST(Weights, ThoseThatDoNotFitAreNamedAndChangeNothing) {
  const auto model = make_model("mlp");
  StateDict tensors;
  for (const auto& [name, tensor] : state_dict(*model))
    tensors.emplace_back(name, at::zeros_like(tensor));
  tensors[0].first = "layers.9.weight";
  tensors[1].second = at::zeros({127});
  EXPECT_THAT([&] { load_state_dict(*model, tensors, "FILE"); },
              ThrowsMessage<CheckpointError>(AllOf(
                  HasSubstr("FILE does not fit the model; tensors: 1 missing (layers.0.weight "
                            "[128, 784]), 1 unexpected (layers.9.weight [128, 784]), 1 of another "
                            "shape (layers.0.bias [127] in place of [128])"))));
  EXPECT_GT(model->parameters().back().abs().sum().item<double>(), 0);
}

TEST(Weights, ThoseOfAnotherModelAreSummedUp) {
  try {
    load_state_dict(*make_model("convnet"), state_dict(*make_model("mlp")), "FILE");
    FAIL() << "nothing was thrown";
  } catch (const CheckpointError& error) {
    const std::string text = error.what();
    EXPECT_THAT(text, AllOf(HasSubstr("16 missing (layer1.0.weight [16, 1, 5, 5], "),
                            HasSubstr("6 unexpected (layers.0.bias [128], "),
                            HasSubstr("layers.4.weight [10, 64])")));
    EXPECT_LT(text.size(), 1000u);
  }
}

TEST(Weights, ComeFromAFolderOfCheckpointsAndFromOneOfThem) {
  TemporaryDirectory folder;
  const auto saved = make_model("mlp");
  Checkpoint checkpoint;
  checkpoint.model = state_dict(*saved);
  for (auto& [name, tensor] : checkpoint.model) tensor = tensor.detach();
  CheckpointFolder checkpoints(folder.path() / "run");
  for (const int64_t step : {1, 2}) {
    checkpoint.info.step = step;
    checkpoints.write(checkpoint);
    for (auto& [name, tensor] : checkpoint.model) tensor = tensor + 1;
  }
  const auto first_value = [&](const std::filesystem::path& path) {
    const auto model = make_model("mlp");
    load_weights(*model, path);
    return (model->parameters().front() - saved->parameters().front()).mean().item<double>();
  };
  EXPECT_NEAR(first_value(checkpoints.path() / "step-00000001"), 0, 1e-6);
  EXPECT_NEAR(first_value(checkpoints.path() / "latest"), 1, 1e-6);
  EXPECT_NEAR(first_value(checkpoints.path()), 1, 1e-6);
  save_weights(*saved, folder.path() / "model.safetensors");
  EXPECT_NEAR(first_value(folder.path()), 0, 1e-6);
  std::filesystem::remove(folder.path() / "model.safetensors");
  EXPECT_THAT([&] { first_value(folder.path()); },
              ThrowsMessage<DataError>(HasSubstr("holds no weights")));
  EXPECT_THAT([&] { first_value(folder.path() / "none"); },
              ThrowsMessage<DataError>(
                  AllOf(HasSubstr("none: there is no such file or folder"), HasSubstr("hint:"))));
}

TEST(RandomState, GoesOnWhereItWasTaken) {
  const StateDict state = random_state(c10::kCPU);
  const at::Tensor first = at::randn({5});
  at::rand({100});
  set_random_state(state, c10::kCPU);
  EXPECT_TRUE(at::equal(at::randn({5}), first));
  EXPECT_THROW(set_random_state({}, c10::kCPU), CheckpointError);
}

TEST(StopAgreement, AGroupOfOneNeedsNoAgreement) {
  const World world = init();
  StopAgreement agreement(world.group(), c10::kCPU);
  EXPECT_EQ(agreement.after_step(0), 0);
  EXPECT_EQ(agreement.after_step(15), 15);
}

}  // namespace model_test
}  // namespace lockstep
