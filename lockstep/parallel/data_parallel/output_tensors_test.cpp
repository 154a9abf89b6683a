#include "lockstep/parallel/data_parallel/output_tensors.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <unordered_map>
#include <variant>

namespace lockstep {
namespace output_tensors_test {

using at::Tensor;
using ::testing::ElementsAre;

enum class Mode { a, b };
struct Plain {
  Tensor logits;
  int64_t samples = 3;
  std::optional<Tensor> more;
};
struct Nested {
  double scale = 1;
  Plain inner;
  std::map<std::string, std::vector<Tensor>> rest;
  std::string name;
  Mode mode = Mode::a;
};
struct WithArray {
  Tensor a;
  Tensor b[2];
};
struct ArrayFirst {
  int a[3];
  Tensor b;
};
struct WithStdArray {
  Tensor a;
  std::array<Tensor, 2> b;
};
struct Base {
  Tensor a;
};
struct Derived : Base {
  Tensor b;
};
struct DerivedOnly : Base {};
struct NoTensors {
  int a;
  std::string b;
};
struct Empty {};
struct WithReference {
  Tensor& a;
  int b;
};
Tensor elsewhere;
struct WithReferenceOfItsOwn {
  Tensor a;
  Tensor& b = elsewhere;
};
/// May hold tensors that nobody can see.
struct WithPointer {
  Tensor a;
  std::shared_ptr<Tensor> b;
};
struct Many {
  Tensor a, b, c, d, e, f, g, h, i, j, k, l;
};
struct TooMany {
  Tensor a, b, c, d, e, f, g, h, i, j, k, l, m;
};
struct MoveOnly {
  std::unique_ptr<int> a;
  std::variant<int, Tensor> b;
  std::function<void()> c;
};
class Hidden {
 public:
  explicit Hidden(Tensor tensor) : tensor_(std::move(tensor)) {}

 private:
  Tensor tensor_;
};

TEST(OutputTensors, KnowsSimpleStructs) {
  static_assert(CarriesTensors<Plain> && CarriesTensors<Nested> && CarriesTensors<WithStdArray> &&
                CarriesTensors<Many> && CarriesTensors<std::vector<Plain>>);
  static_assert(!CarriesTensors<WithArray> && !CarriesTensors<ArrayFirst> &&
                !CarriesTensors<Derived> && !CarriesTensors<DerivedOnly> &&
                !CarriesTensors<NoTensors> && !CarriesTensors<Empty> &&
                !CarriesTensors<WithReference> && !CarriesTensors<WithReferenceOfItsOwn> &&
                !CarriesTensors<WithPointer> && !CarriesTensors<TooMany> &&
                !CarriesTensors<Hidden> && !CarriesTensors<int>);
  static_assert(detail::count_fields<MoveOnly>() == 3);
}

TEST(OutputTensors, VisitsTheFieldsInTheirOrder) {
  const auto number = [](int64_t value) { return at::full({1}, value, at::kLong); };
  Nested output;
  output.inner.logits = number(1);
  output.inner.more = number(2);
  output.rest = {{"x", {number(3), number(4)}}, {"y", {number(5)}}};
  std::vector<int64_t> seen;
  visit_tensors(output, [&](Tensor& tensor) {
    seen.push_back(tensor.item<int64_t>());
    tensor = tensor + 10;
  });
  EXPECT_THAT(seen, ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(output.inner.logits.item<int64_t>(), 11);
  EXPECT_EQ(output.rest["y"][0].item<int64_t>(), 15);

  Many many;
  many.a = number(1);
  many.l = number(12);
  seen.clear();
  visit_tensors(many, [&](Tensor& tensor) { seen.push_back(tensor.item<int64_t>()); });
  EXPECT_THAT(seen, ElementsAre(1, 12));  // Those that are defined.
}

TEST(OutputTensors, AreVisitedInTheOrderOfTheKeys) {
  // Two maps that hold the same keys in another order each.
  std::unordered_map<int, Tensor> few(1), many(1'000);
  std::vector<int> order;
  for (int key = 0; key < 50; ++key) {
    few[key * 7 % 50] = at::full({1}, key * 7 % 50, at::kInt);
    many[key] = at::full({1}, key, at::kInt);
  }
  for (auto* map : {&few, &many}) {
    order.clear();
    visit_tensors(*map, [&](Tensor& tensor) { order.push_back(tensor.item<int>()); });
    EXPECT_EQ(order.size(), 50);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
}

}  // namespace output_tensors_test
}  // namespace lockstep
