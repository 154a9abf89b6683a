#include "lockstep/rpc/value.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"

namespace shapes {

struct Point {
  double x = 0;
  at::Tensor weights;
  std::optional<std::string> name;
};
auto rpc_fields(Point& point) {
  return std::tie(point.x, point.weights, point.name);
}

enum class Colour : int8_t { red, green };

}  // namespace shapes

namespace lockstep::rpc {
namespace value_test {

using Random = std::mt19937_64;

template <class T>
T there_and_back(const T& value) {
  return Value<T>::from(Value<T>::to(value));
}

template <class T>
void expect_same(const T& value, const std::string& type) {
  EXPECT_EQ(there_and_back(value), value) << type;
  EXPECT_EQ(Value<T>::type(), type);
}

TEST(Value, TypesComeBackAsTheyWere) {
  expect_same(true, "bool");
  expect_same(-7, "int32");
  expect_same(int64_t{1} << 40, "int64");
  expect_same(uint8_t{200}, "uint8");
  expect_same(UINT64_MAX, "uint64");
  expect_same(0.1, "float64");
  expect_same(0.1F, "float32");
  expect_same(std::string("a\0b", 3), "string");
  expect_same(shapes::Colour::green, "enum[int8]");
  expect_same(std::vector<double>{0.1, -0.0}, "list[float64]");
  expect_same(std::vector<int64_t>{}, "list[int64]");
  expect_same(std::vector<bool>{true, false}, "list[bool]");
  expect_same(std::vector<std::string>{"a", ""}, "list[string]");
  expect_same(std::optional<int>(), "optional[int32]");
  expect_same(std::optional<int>(3), "optional[int32]");
  expect_same(std::optional<std::optional<int>>(std::optional<int>()), "optional[optional[int32]]");
  expect_same(std::map<std::string, std::vector<int64_t>>{{"a", {1}}, {"b", {}}},
              "dict[string, list[int64]]");
  expect_same(std::unordered_map<int, bool>{{1, true}}, "dict[int32, bool]");
  expect_same(std::pair<int, std::string>(1, "x"), "tuple[int32, string]");
  expect_same(std::tuple<bool, double, std::vector<float>>(true, 2, {3}),
              "tuple[bool, float64, list[float32]]");
}

TEST(Value, TensorsShareTheirMemory) {
  const auto tensor = at::arange(3);
  EXPECT_TRUE(there_and_back(tensor).is_same(tensor));
  EXPECT_FALSE(there_and_back(at::Tensor()).defined());
  const auto list = there_and_back(std::vector<at::Tensor>{tensor, {}});
  EXPECT_TRUE(list[0].is_same(tensor));
  EXPECT_FALSE(list[1].defined());
}

TEST(Value, AStructTravelsByItsFields) {
  using shapes::Point;
  const auto point = there_and_back(Point{.x = 2, .weights = at::arange(2), .name = "p"});
  EXPECT_EQ(point.x, 2);
  EXPECT_TRUE(at::equal(point.weights, at::arange(2)));
  EXPECT_EQ(point.name, "p");
  EXPECT_EQ(Value<std::vector<Point>>::type(), "list[struct[float64, Tensor, optional[string]]]");
}

TEST(Value, AnotherKindIsRefused) {
  EXPECT_THROW(Value<bool>::from(at::IValue(1)), DataError);
  EXPECT_THROW(Value<int>::from(at::IValue(1.0)), DataError);
  EXPECT_THROW(Value<int8_t>::from(at::IValue(200)), DataError);
  EXPECT_THROW(Value<double>::from(at::IValue()), DataError);
  EXPECT_THROW(Value<std::string>::from(at::IValue(1)), DataError);
  EXPECT_THROW(Value<at::Tensor>::from(at::IValue("x")), DataError);
  EXPECT_THROW(Value<std::vector<double>>::from(at::arange(3)), DataError);
  EXPECT_THROW(Value<std::vector<bool>>::from(at::IValue(1)), DataError);
  EXPECT_THROW((Value<std::pair<int, int>>::from(detail::make_tuple({1, 2, 3}))), DataError);
  EXPECT_THROW((Value<std::map<int, int>>::from(detail::make_tuple({1}))), DataError);
  EXPECT_THROW(Value<std::optional<int>>::from(detail::make_tuple({1, 2})), DataError);
  EXPECT_THROW(Value<shapes::Point>::from(detail::make_tuple({1.0})), DataError);
}

uint64_t below(Random& random, uint64_t limit) {
  return random() % limit;
}

at::IValue random_value(Random& random, int depth) {
  switch (below(random, depth > 0 ? 9 : 7)) {
    case 0:
      return {};
    case 1:
      return static_cast<int64_t>(random());
    case 2:
      return std::bit_cast<double>(random());
    case 3:
      return below(random, 2) == 1;
    case 4:
      return std::string(below(random, 40), static_cast<char>(random()));
    case 5:
      return at::ones({static_cast<int64_t>(below(random, 4))});
    case 6:
      return at::ones({2, 2}, at::kByte).t();
    default: {
      std::vector<at::IValue> parts;
      for (uint64_t left = below(random, 6); left > 0; --left) {
        parts.push_back(random_value(random, depth - 1));
      }
      return detail::make_tuple(std::move(parts));
    }
  }
}

/// The value is read, or refused.
template <class... T>
void read_as(const at::IValue& sent, int64_t& read) {
  const auto one = [&](auto type) {
    try {
      Value<decltype(type)>::from(sent);
      ++read;
    } catch (const DataError&) {
    }
  };
  (one(T{}), ...);
}

TEST(Value, AnyValueIsReadOrRefused) {
  const auto given = env_string("LOCKSTEP_FUZZ_SEED");
  const uint64_t seed = given ? std::stoull(*given) : std::random_device{}();
  SCOPED_TRACE(seed);
  Random random(seed);
  int64_t read = 0;
  for (int i = 0; i < 3'000; ++i) {
    const at::IValue sent = random_value(random, 4);
    read_as<bool, int8_t, int64_t, uint64_t, float, std::string, at::Tensor, std::vector<double>,
            std::vector<uint8_t>, std::vector<bool>, std::vector<std::string>,
            std::vector<at::Tensor>, std::map<std::string, int>, std::optional<std::vector<int>>,
            std::pair<int, std::string>, std::tuple<at::Tensor, std::optional<bool>>>(sent, read);
  }
  EXPECT_GT(read, 1'500);
}

struct NoFields {};
static_assert(!Sendable<NoFields>);
static_assert(!Sendable<std::shared_ptr<NoFields>>);
static_assert(Sendable<std::vector<shapes::Point>>);

}  // namespace value_test
}  // namespace lockstep::rpc
