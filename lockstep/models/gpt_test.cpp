#include "lockstep/models/models.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace gpt_test {

using testing::HasSubstr;
using testing::ThrowsMessage;

GptOptions small() {
  return {.vocabulary = 11, .context = 8, .layers = 2, .heads = 2, .channels = 16};
}

int64_t parameters_of(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

TEST(Gpt, TheDefaultIsNanoGptsSmallShape) {
  EXPECT_EQ(parameters_of(*make_gpt({})), 10'746'624);
  EXPECT_EQ(parameters_of(*make_gpt({.bias = false})), 10'746'624 - 25'728);
}

TEST(Gpt, GivesLogitsForEachTokenAndTakesShorterSequences) {
  const auto model = make_gpt(small());
  for (const int64_t tokens : {1, 5, 8}) {
    const at::Tensor out = model->forward(at::randint(11, {3, tokens}, at::kLong));
    EXPECT_EQ(out.sizes(), at::IntArrayRef({3, tokens, 11}));
  }
  const at::Tensor tokens = at::randint(11, {2, 8}, at::kLong);
  EXPECT_TRUE(at::equal(model->forward(tokens), model->forward(tokens.to(at::kInt))));
}

TEST(Gpt, LooksAtNoLaterToken) {
  const auto model = make_gpt(small());
  const at::Tensor tokens = at::randint(11, {2, 8}, at::kLong);
  at::Tensor other = tokens.clone();
  other.select(1, 5).add_(1).remainder_(11);
  const at::Tensor a = model->forward(tokens), b = model->forward(other);
  // Rows of a product may be summed in another order when other rows differ: not to the bit.
  EXPECT_TRUE(at::allclose(a.narrow(1, 0, 5), b.narrow(1, 0, 5), 1e-5, 1e-6));
  for (int64_t t = 5; t < 8; ++t) {
    EXPECT_FALSE(at::allclose(a.select(1, t), b.select(1, t), 1e-4, 1e-5)) << t;
  }
}

TEST(Gpt, EveryParameterLearns) {
  const auto model = make_gpt(small());
  model->forward(at::randint(11, {2, 8}, at::kLong)).pow(2).sum().backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0) << item.key();
  }
}

TEST(Gpt, DropsOutInTrainingOnly) {
  GptOptions options = small();
  options.dropout = 0.5;
  const auto model = make_gpt(options);
  const at::Tensor tokens = at::randint(11, {2, 8}, at::kLong);
  EXPECT_FALSE(at::equal(model->forward(tokens), model->forward(tokens)));
  model->eval();
  EXPECT_TRUE(at::equal(model->forward(tokens), model->forward(tokens)));
}

TEST(Gpt, RefusesWhatItCannotTake) {
  const auto model = make_gpt(small());
  EXPECT_THAT(
      [&] {
        model->forward(at::zeros({2, 9}, at::kLong));
      },
      ThrowsMessage<UsageError>(HasSubstr("expected tokens [batch, 1 to 8]")));
  EXPECT_THAT(
      [&] {
        model->forward(at::zeros({2, 8}));
      },
      ThrowsMessage<UsageError>(HasSubstr("[2, 8] of Float")));
  GptOptions uneven = small();
  uneven.heads = 3;
  EXPECT_THAT([&] { make_gpt(uneven); },
              ThrowsMessage<UsageError>(HasSubstr("16 channels cannot be shared by 3 heads")));
  GptOptions none = small();
  none.layers = 0;
  EXPECT_THAT([&] { make_gpt(none); }, ThrowsMessage<UsageError>(HasSubstr("layers is 0")));
  GptOptions all = small();
  all.dropout = 1;
  EXPECT_THAT([&] { make_gpt(all); }, ThrowsMessage<UsageError>(HasSubstr("dropout is 1")));
}

}  // namespace gpt_test
}  // namespace lockstep
