#include "lockstep/comm/check_equal.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/world.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

constexpr const char* kDriftHint =
    "usual causes: weights that were loaded or changed on some ranks only, another learning rate "
    "on some, an exception that a rank caught, and so left out a step, random numbers in the model "
    "or the optimizer. docs/debugging.md says what ends these comparisons";
constexpr const char* kStepHint =
    "look for a rank that left out a step, or caught an exception in it";

/// The name, dtype and shape, which stand in messages, and the hash of the values.
Json describe(const std::string& name, const at::Tensor& tensor) {
  const std::string kind =
      std::string(c10::toString(tensor.scalar_type())) + " " + c10::str(tensor.sizes());
  if (tensor.layout() != at::kStrided || tensor.is_meta()) return {name, kind, ""};
  // By an operation: FullyShardedDataParallel gathers what is used.
  const at::Tensor values =
      at::empty(tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false))
          .copy_(tensor);
  Hasher hasher(Hasher::Algorithm::xxh128);
  hasher.update(values.const_data_ptr(), values.nbytes());
  return {name, kind, hasher.finish()};
}

Json describe(const StateDict& tensors) {
  Json all = Json::array();
  for (const auto& [name, tensor] : tensors) all.push_back(describe(name, tensor));
  return all;
}

/// The ranks of the group that have not what most have, and one that has it: of equal numbers of
/// ranks the one with rank 0.
struct Odd {
  size_t other = 0;
  std::vector<size_t> ranks;
};

Odd odd_of(const std::vector<Json>& values) {
  Odd odd;
  const auto count = [&](size_t rank) { return std::ranges::count(values, values[rank]); };
  for (size_t rank = 1; rank < values.size(); ++rank) {
    if (count(rank) > count(odd.other)) odd.other = rank;
  }
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (values[rank] != values[odd.other]) odd.ranks.push_back(rank);
  }
  return odd;
}

class Comparison {
 public:
  Comparison(const Compared& mine, const ProcessGroup& group) : mine_(mine), group_(group) {}

  void run() {
    const c10::AutoGradMode no_grad(false);
    const Json tensors = describe(mine_.tensors);
    Hasher hasher(Hasher::Algorithm::xxh128);
    const std::string text = tensors.dump();
    hasher.update(text.data(), text.size());
    const auto all = gather({mine_.steps, mine_.settings, hasher.finish(), mine_.what});
    const auto each = [&](const auto& of) {
      std::vector<Json> values;
      for (const Json& its : all) values.push_back(of(its));
      return values;
    };
    expect_same_comparison(each([](const Json& its) { return its[3]; }),
                           each([](const Json& its) { return its[0]; }));
    expect_same("steps", "number of steps", each([](const Json& its) { return its[0]; }));
    for (const auto& item : mine_.settings) {
      const std::string& name = item.first;
      expect_same(name, name, each([&](const Json& its) { return its[1].value(name, Json()); }));
    }
    if (std::ranges::all_of(all, [&](const Json& its) { return its == all.front(); })) return;
    find_difference(gather(tensors));
  }

 private:
  /// A rank that makes another call now is at another step.
  std::vector<Json> gather(const Json& object) const {
    try {
      return group_.all_gather_object(object);
    } catch (const MismatchError& error) {
      const std::string text = error.what();
      throw MismatchError(place() + "rank " + std::to_string(group_.rank()) +
                              " compares what ranks must have alike, and another rank is not at "
                              "the same step: " +
                              text.substr(0, text.find('\n')),
                          kStepHint, error.failure());
    }
  }

  /// Of the rank's number in the default group.
  std::string named(size_t rank) const {
    return "rank " + std::to_string(group_.global_ranks()[rank]);
  }

  std::string place() const {
    return mine_.what +
           (mine_.steps < 0 ? ": " : ", after step " + std::to_string(mine_.steps) + ": ");
  }

  [[noreturn]] void refuse(const Odd& odd, const std::string& name, const std::string& text,
                           const char* hint = kDriftHint) const {
    Failure failure{.kind = Failure::Kind::mismatch, .detail = name};
    for (const size_t rank : odd.ranks)
      failure.ranks.push_back({group_.global_ranks()[rank], Failure::Kind::mismatch});
    throw MismatchError(place() + "the ranks have drifted apart: " + text, hint,
                        std::move(failure));
  }

  /// A rank that is elsewhere in its step compares something else.
  void expect_same_comparison(const std::vector<Json>& whats,
                              const std::vector<Json>& steps) const {
    const Odd odd = odd_of(whats);
    if (odd.ranks.empty()) return;
    const auto at = [&](size_t rank) {
      return named(rank) + " (" + whats[rank].get<std::string>() + ", after step " +
             steps[rank].dump() + ")";
    };
    refuse(odd, "steps", at(odd.ranks.front()) + " is not at the same step as " + at(odd.other),
           kStepHint);
  }

  void expect_same(const std::string& name, const std::string& words,
                   const std::vector<Json>& ones) const {
    const Odd odd = odd_of(ones);
    if (odd.ranks.empty()) return;
    const size_t rank = odd.ranks.front();
    refuse(odd, name,
           "the " + words + " of " + named(rank) + " is " + ones[rank].dump() + ", that of " +
               named(odd.other) + " " + ones[odd.other].dump());
  }

  /// What ranks have of each tensor. Hashes alone differ after rounding, too.
  void find_difference(const std::vector<Json>& all) const {
    double largest = 0;
    size_t count = 0;
    for (const Json& its : all) count = std::max(count, its.size());
    for (size_t i = 0; i < count; ++i) {
      std::vector<Json> ones;
      for (const Json& its : all) ones.push_back(i < its.size() ? its[i] : Json());
      const Odd odd = odd_of(ones);
      if (odd.ranks.empty()) continue;
      expect_same_kind(odd, ones);
      const at::Tensor& tensor = mine_.tensors[i].second;
      const double distance = largest_distance(tensor);
      largest = std::max(largest, distance);
      if (distance <= rounding(tensor)) continue;
      const std::string& name = mine_.tensors[i].first;
      refuse(odd, name,
             "'" + name + "' of " + named(odd.ranks.front()) + " is not that of " +
                 named(odd.other) + " (by " + shortest(distance) + " of its norm)");
    }
    if (group_.rank() != 0) return;
    log_warning(place() + "the ranks' weights differ by rounding, at most by " + shortest(largest) +
                " of a tensor's norm: some ranks have another processor or another number of "
                "threads");
  }

  /// A tensor of the same name, dtype and shape, or throws.
  void expect_same_kind(const Odd& odd, const std::vector<Json>& ones) const {
    const auto kind = [](const Json& one) {
      if (one.is_null()) return std::string("nothing");
      return "'" + one[0].get<std::string>() + "' " + one[1].get<std::string>();
    };
    const auto is_other = [&](const Json& one) { return kind(one) != kind(ones[odd.other]); };
    const auto its = std::ranges::find_if(ones, is_other);
    if (its == ones.end()) return;
    const Json& known = its->is_null() ? ones[odd.other] : *its;
    refuse(odd, known[0].get<std::string>(),
           named(static_cast<size_t>(its - ones.begin())) + " has " + kind(*its) + ", " +
               named(odd.other) + " has " + kind(ones[odd.other]));
  }

  static double rounding(const at::Tensor& tensor) {
    constexpr double kOfFloat = 1e-5;
    switch (tensor.scalar_type()) {
      case at::kHalf:
        return std::numeric_limits<c10::Half>::epsilon();
      case at::kBFloat16:
        return std::numeric_limits<c10::BFloat16>::epsilon();
      default:
        return tensor.is_floating_point() ? kOfFloat : 0;
    }
  }

  static std::string shortest(double value) { return Json(std::round(value * 1e9) / 1e9).dump(); }

  /// Over all ranks, from rank 0's values.
  double largest_distance(const at::Tensor& tensor) const {
    const at::Tensor values = tensor.detach().reshape({-1});
    const at::Tensor first = values.clone();
    at::Tensor bytes = first.view(at::kByte);
    group_.broadcast(bytes, 0);
    double distance = at::equal(values, first) ? 0 : 1;
    if (distance > 0 && values.is_floating_point()) {
      const double norm = first.to(at::kDouble).norm().item<double>();
      const double by = (values.to(at::kDouble) - first.to(at::kDouble)).norm().item<double>();
      if (std::isfinite(by)) distance = norm > 0 ? by / norm : 1;
    }
    for (const Json& its : group_.all_gather_object(distance))
      distance = std::max(distance, its.get<double>());
    return distance;
  }

  const Compared& mine_;
  const ProcessGroup& group_;
};

}  // namespace

bool is_compared_after(int64_t steps) {
  if (steps < 10) return steps == 2;
  while (steps % 10 == 0) steps /= 10;
  return steps == 1;
}

void check_equal(const Compared& mine, const ProcessGroup& group) {
  if (group.size() > 1) Comparison(mine, group).run();
}

}  // namespace lockstep::detail

namespace lockstep {

void World::check_equal(const torch::nn::Module& module) const {
  detail::Compared mine{.what = "World::check_equal"};
  for (const auto& list : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : list) {
      if (item.value().defined()) mine.tensors.emplace_back(item.key(), item.value().detach());
    }
  }
  detail::check_equal(mine, group());
}

}  // namespace lockstep
