#include "lockstep/optim/dense_layout.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "lockstep/optim/optim.h"

namespace lockstep {
namespace flat_runs_test {

/// Parameters whose gradients are views of one bucket, in the reverse of their order, as a
/// reducer's are.
struct InBucket {
  InBucket() : bucket(at::arange(26, at::kFloat).sub(13)) {
    const std::vector<std::vector<int64_t>> shapes = {{3, 4}, {4}, {2, 5}};
    int64_t end = bucket.numel();
    for (const auto& shape : shapes) {
      at::Tensor parameter = at::zeros(shape).requires_grad_();
      const int64_t size = parameter.numel();
      parameter.mutable_grad() = bucket.narrow(0, end - size, size).view(shape);
      parameters.push_back(parameter);
      end -= size;
    }
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : parameters) all.push_back(parameter.grad());
    return all;
  }
  at::Tensor bucket;
  std::vector<at::Tensor> parameters;
};

TEST(FlatRuns, ABucketsViewsBecomeOneVector) {
  const InBucket model;
  const auto runs = flat_runs(model.gradients());
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].data_ptr(), model.bucket.data_ptr());
  EXPECT_TRUE(at::equal(runs[0], model.bucket));
}

TEST(FlatRuns, AGapOrAnotherStorageParts) {
  const InBucket model;
  auto gradients = model.gradients();
  gradients.erase(gradients.begin() + 1);
  gradients.push_back(at::ones({3}));
  EXPECT_EQ(flat_runs(gradients).size(), 3u);
  EXPECT_TRUE(flat_runs({}).empty());
}

TEST(FlatRuns, OtherDtypesAndWhatIsNotDenseStayThemselves) {
  const at::Tensor bytes = at::zeros({16}, at::kByte);
  const at::Tensor first = bytes.narrow(0, 0, 4);
  const at::Tensor second =
      bytes.narrow(0, 4, 4).view(at::kFloat);  // At element 1 of its own kind.
  EXPECT_EQ(flat_runs({first, second}).size(), 2u);
  const at::Tensor columns = at::zeros({4, 4}).narrow(1, 0, 2);
  const auto runs = flat_runs({columns});
  EXPECT_EQ(runs.at(0).sizes(), columns.sizes());
}

TEST(FlatRuns, ChannelsLastIsTakenInItsOwnOrder) {
  const at::Tensor bucket = at::arange(48, at::kFloat);
  const at::Tensor image = bucket.narrow(0, 0, 24).as_strided({1, 2, 3, 4}, {24, 1, 8, 2});
  const at::Tensor rest = bucket.narrow(0, 24, 24);
  const auto runs = flat_runs({rest, image});
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_TRUE(at::equal(runs[0], bucket));
}

TEST(FlatRuns, ClippingABucketHasTheBitsOfClippingItsParts) {
  InBucket model;
  std::vector<at::Tensor> alone;
  for (const auto& parameter : model.parameters) {
    at::Tensor copy = at::zeros_like(parameter).requires_grad_();
    copy.mutable_grad() = parameter.grad().clone();
    alone.push_back(copy);
  }
  EXPECT_EQ(clip_grad_norm(model.parameters, 0.7), clip_grad_norm(alone, 0.7));
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_TRUE(at::equal(model.parameters[i].grad(), alone[i].grad()));
  }
}

TEST(ZeroGrad, FillsBucketsInPlaceWhereGradientsAreToStay) {
  InBucket model;
  model.parameters.push_back(at::zeros({3}).requires_grad_());
  zero_grad(model.parameters, /*set_to_none=*/false);
  EXPECT_EQ(model.bucket.abs().sum().item<float>(), 0);
  EXPECT_TRUE(model.parameters[0].grad().is_alias_of(model.bucket));
  EXPECT_FALSE(model.parameters[3].grad().defined());
  zero_grad(model.parameters);
  EXPECT_FALSE(model.parameters[0].grad().defined());
}

}  // namespace flat_runs_test
}  // namespace lockstep
