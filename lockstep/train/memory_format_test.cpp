#include "lockstep/train/memory_format.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"
#include "lockstep/train/weights.h"

namespace lockstep {
namespace memory_format_test {

constexpr auto kContiguous = at::MemoryFormat::Contiguous;
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

TEST(MemoryFormat, AutoIsChannelsLastForConvolutionsOnTheCpu) {
  const auto with_onednn = at::hasMKLDNN() ? kChannelsLast : kContiguous;
  const auto convnet = make_model("convnet"), mlp = make_model("mlp");
  EXPECT_EQ(memory_format_of("auto", *convnet, c10::kCPU), with_onednn);
  EXPECT_EQ(memory_format_of("auto", *convnet, c10::Device(c10::kCUDA, 0)), kContiguous);
  EXPECT_EQ(memory_format_of("auto", *mlp, c10::kCPU), kContiguous);
  EXPECT_EQ(memory_format_of("contiguous", *convnet, c10::kCPU), kContiguous);
  EXPECT_EQ(memory_format_of("channels-last", *mlp, c10::kCPU), kChannelsLast);
  EXPECT_THAT([&] { memory_format_of("channel-last", *mlp, c10::kCPU); },
              testing::ThrowsMessage<UsageError>(testing::HasSubstr("'channels-last'")));
}

TEST(MemoryFormat, LaysOutConvolutionsAndKeepsNamesAndValues) {
  const auto model = make_model("fashion-cnn");
  StateDict before;
  for (const auto& [name, tensor] : state_dict(*model)) {
    before.emplace_back(name, tensor.detach().clone());
  }
  const at::Tensor first = model->named_parameters()["layer1.0.weight"];
  set_memory_format(*model, kContiguous);
  EXPECT_EQ(first.strides(), (std::vector<int64_t>{9, 9, 3, 1}));
  set_memory_format(*model, kChannelsLast);
  const auto after = state_dict(*model);
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].first, before[i].first);
    EXPECT_TRUE(at::equal(after[i].second, before[i].second)) << after[i].first;
  }
  // The tensors that others hold already are the same ones, also where strides alone do not tell.
  EXPECT_EQ(first.strides(), (std::vector<int64_t>{9, 1, 3, 1}));
  EXPECT_EQ(model->named_parameters()["layer2.0.weight"].strides(),
            (std::vector<int64_t>{288, 1, 96, 32}));
}

TEST(MemoryFormat, TheModelComputesTheSameUpToRounding) {
  at::manual_seed(1);
  const at::NoGradGuard no_grad;
  for (const char* name : {"convnet", "fashion-cnn"}) {
    const auto model = make_model(name);
    model->eval();
    const at::Tensor batch = at::randn({7, 1, 28, 28});
    const at::Tensor expected = model->forward(batch);
    set_memory_format(*model, kChannelsLast);
    const at::Tensor output = model->forward(with_memory_format(batch, kChannelsLast));
    // Sums of some hundred products around 0.1 in another order.
    EXPECT_TRUE(at::allclose(output, expected, 1e-4, 1e-5)) << name;
  }
}

TEST(MemoryFormat, BatchesKeepTheirValues) {
  const at::Tensor gray = at::randn({5, 1, 6, 4}), color = at::randn({5, 3, 6, 4});
  const at::Tensor gray_last = with_memory_format(gray, kChannelsLast);
  EXPECT_EQ(gray_last.strides(), (std::vector<int64_t>{24, 1, 4, 1}));
  EXPECT_EQ(gray_last.data_ptr(), gray.data_ptr()) << "no copy";
  const at::Tensor color_last = with_memory_format(color, kChannelsLast);
  EXPECT_EQ(color_last.strides(), (std::vector<int64_t>{72, 1, 12, 3}));
  EXPECT_TRUE(at::equal(gray_last, gray));
  EXPECT_TRUE(at::equal(color_last, color));
  const at::Tensor turned = with_memory_format(gray.transpose(2, 3), kChannelsLast);
  EXPECT_TRUE(at::equal(turned, gray.transpose(2, 3)));
  EXPECT_TRUE(with_memory_format(color, kContiguous).is_same(color));
  const at::Tensor rows = at::randn({5, 24});
  EXPECT_TRUE(with_memory_format(rows, kChannelsLast).is_same(rows));
}

TEST(MemoryFormat, FilesHaveNoneOfIt) {
  const TemporaryDirectory folder;
  const auto model = make_model("convnet");
  save_weights(*model, folder.path() / "a.safetensors");
  set_memory_format(*model, kChannelsLast);
  save_weights(*model, folder.path() / "b.safetensors");
  EXPECT_EQ(read_file(folder.path() / "a.safetensors"), read_file(folder.path() / "b.safetensors"));
  const auto other = make_model("convnet");
  set_memory_format(*other, kChannelsLast);
  load_weights(*other, folder.path() / "a.safetensors");
  const at::Tensor weight = other->named_parameters()["layer2.0.weight"];
  EXPECT_FALSE(weight.is_contiguous());
  EXPECT_TRUE(at::equal(weight, model->named_parameters()["layer2.0.weight"]));
}

}  // namespace memory_format_test
}  // namespace lockstep
