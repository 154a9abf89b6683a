// Operations on watched memory find it filled, in forward and in backward.
#include "lockstep/parallel/fsdp/watched_memory.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace watched_memory_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Fills a memory before each operation and takes it away after it.
struct Filler : MemoryWatcher {
  std::vector<WatchedMemory> memories;
  std::vector<at::Tensor> values;
  std::vector<std::vector<size_t>> uses;
  std::vector<size_t> there;

  at::Tensor add(const at::Tensor& data, bool converts = false) {
    memories.emplace_back(*this, memories.size(), data.numel(), data.scalar_type(), c10::kCPU,
                          converts);
    values.push_back(data.contiguous().view({-1}));
    const Unwatched unwatched;
    return memories.back().tensor().view(data.sizes()).detach();
  }
  void before_use(const std::vector<size_t>& used) override {
    uses.push_back(used);
    there = used;
    for (const size_t index : used) memories[index].put(values[index]);
  }
  void after_use() noexcept override {
    for (const size_t index : there) memories[index].take();
    there.clear();
  }
  void before_write(size_t, const std::string& operation) override { throw UsageError(operation); }
};

TEST(WatchedMemory, IsFilledForEachOperationAndEmptyBetween) {
  Filler filler;
  filler.memories.reserve(2);
  const at::Tensor data = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor a = filler.add(data), b = filler.add(data + 1);
  EXPECT_TRUE(at::equal(a + a, data + data));
  EXPECT_TRUE(at::equal(at::cat({a, b}), at::cat({data, data + 1})));
  EXPECT_THAT(filler.uses, ElementsAre(ElementsAre(0), ElementsAre(0, 1)));
  // Through views.
  EXPECT_TRUE(at::equal(a.t()[1] * 2, data.t()[1] * 2));
  // Not for other tensors.
  filler.uses.clear();
  data.clone().mul_(2);
  EXPECT_THAT(filler.uses, IsEmpty());
  EXPECT_THROW(a.const_data_ptr(), c10::Error);
}

TEST(WatchedMemory, BackwardFindsWhatForwardSaved) {
  Filler filler;
  filler.memories.reserve(1);
  const at::Tensor data = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor weight = filler.add(data).requires_grad_();
  const at::Tensor plain = data.clone().requires_grad_();
  const at::Tensor x = at::ones({4, 3}).requires_grad_(), y = at::ones({4, 3}).requires_grad_();
  at::linear(x, weight).square().sum().backward();
  at::linear(y, plain).square().sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  EXPECT_TRUE(at::equal(weight.grad(), plain.grad()));
}

TEST(WatchedMemory, WritesAreTold) {
  Filler filler;
  filler.memories.reserve(1);
  const at::Tensor a = filler.add(at::ones({4}));
  EXPECT_THROW(a.add_(1), UsageError);
  EXPECT_THROW(a.narrow(0, 0, 2).zero_(), UsageError);
  at::Tensor out = at::zeros({4});
  at::add_out(out, a, a);
  EXPECT_EQ(out.sum().item<float>(), 8);
  EXPECT_THROW(at::add_out(const_cast<at::Tensor&>(a), out, out), UsageError);
  // These change no values.
  a.unsqueeze_(0);
  a.requires_grad_(false);
}

TEST(WatchedMemory, ConvertsOtherArgumentsWhereToldTo) {
  Filler filler;
  filler.memories.reserve(2);
  EXPECT_THROW(at::linear(at::ones({4, 3}), filler.add(at::ones({2, 3}, at::kBFloat16))),
               c10::Error);
  const at::Tensor weight = filler.add(at::ones({2, 3}, at::kBFloat16), /*converts=*/true);
  const at::Tensor x = at::ones({4, 3}).requires_grad_();
  const at::Tensor output = at::linear(x, weight);
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  // The conversion is a part of the graph.
  output.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(x.grad().sum().item<float>(), 24);
}

TEST(WatchedMemory, ATensorThatOutlivesItsOwnerSaysSo) {
  at::Tensor empty, full;
  {
    Filler filler;
    filler.memories.reserve(2);
    empty = filler.add(at::ones({2}));
    full = filler.add(at::ones({2}));
    filler.memories[1].put(filler.values[1]);
  }
  EXPECT_THROW(empty + 1, UsageError);
  EXPECT_EQ((full + 1).sum().item<float>(), 4);
}

}  // namespace watched_memory_test
}  // namespace lockstep::detail
