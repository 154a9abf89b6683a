#include "tests/fuzz/program.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "lockstep/base/error.h"

namespace lockstep::fuzz {
namespace {

constexpr std::array<const char*, 19> kNames = {"all_reduce",     "all_reduce_coalesced",
                                                "reduce",         "broadcast",
                                                "all_gather",     "all_gather_into_tensor",
                                                "gather",         "scatter",
                                                "reduce_scatter", "reduce_scatter_tensor",
                                                "all_to_all",     "all_to_all_single",
                                                "barrier",        "all_reduce of symmetric memory",
                                                "messages",       "recv_any",
                                                "objects",        "monitored_barrier",
                                                "a new group"};
static_assert(kNames.size() == static_cast<size_t>(Kind::form_group) + 1);

constexpr std::array<const char*, 8> kReductionNames = {"sum", "avg",  "product", "min",
                                                        "max", "band", "bor",     "bxor"};

/// How often each kind is drawn. What makes groups and segments is dear.
int weight(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return 12;
    case Kind::exchange:
      return 10;
    case Kind::objects:
    case Kind::monitored_barrier:
    case Kind::symmetric:
      return 2;
    case Kind::form_group:
      return 1;
    default:
      return 5;
  }
}

Kind random_kind(KeyedRandom& random) {
  int sum = 0;
  for (size_t i = 0; i < kNames.size(); ++i) sum += weight(static_cast<Kind>(i));
  auto left = static_cast<int>(random.below(static_cast<uint64_t>(sum)));
  for (size_t i = 0;; ++i) {
    left -= weight(static_cast<Kind>(i));
    if (left < 0) return static_cast<Kind>(i);
  }
}

/// Edges, small ones, and those around the slots, chunks and eager sizes of the backends.
int64_t random_count(KeyedRandom& random, int64_t most) {
  const auto up_to = [&](int64_t n) {
    return static_cast<int64_t>(random.below(static_cast<uint64_t>(std::min(n, most)) + 1));
  };
  switch (random.below(20)) {
    case 0:
      return 0;
    case 1:
      return 1;
    case 2:
    case 3: {
      const int64_t bytes = any_of<int64_t>({1008, 4096, 32'768, 262'144, 1'048'576}, random);
      const auto element = static_cast<int64_t>(1 + random.below(8));
      return std::min(most, bytes / element + static_cast<int64_t>(random.below(3)) - 1);
    }
    case 4:
      return up_to(most);
    case 5:
    case 6:
    case 7:
      return up_to(30'000);
    case 8:
    case 9:
    case 10:
      return up_to(3000);
    default:
      return up_to(300);
  }
}

std::vector<int64_t> random_shape(KeyedRandom& random, int64_t count) {
  if (count == 1 && random.below(2) == 0) return {};
  const auto side = [&] { return static_cast<int64_t>(1 + random.below(5)); };
  switch (random.below(4)) {
    case 0: {
      const int64_t rows = side();
      return {rows, count / rows};
    }
    case 1: {
      const int64_t images = side(), channels = side(), height = side();
      return {images, channels, height, count / (images * channels * height)};
    }
    default:
      return {count};
  }
}

/// The ranks' tensors together stay below some times `large`.
int64_t most_elements(const Job& job, Kind kind, int size) {
  switch (kind) {
    case Kind::all_reduce_coalesced:
      return job.large / 4;
    case Kind::all_gather:
    case Kind::all_gather_into_tensor:
    case Kind::gather:
    case Kind::scatter:
    case Kind::reduce_scatter:
    case Kind::reduce_scatter_tensor:
      return job.large / size;
    case Kind::all_to_all:
    case Kind::all_to_all_single:
    case Kind::exchange:
    case Kind::collect_any:
      return job.large / size / 2;
    default:
      return job.large;
  }
}

}  // namespace

Job parse_job(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  Job job;
  job.seed = json.at("seed").get<uint64_t>();
  job.backend = json.at("backend").get<std::string>();
  job.placement = json.at("placement").get<std::string>();
  job.seconds = json.value("seconds", job.seconds);
  job.blocks = json.value("blocks", job.blocks);
  job.timeout = json.value("timeout", job.timeout);
  job.mismatches = json.value("mismatches", job.mismatches);
  job.detail = json.value("detail", job.detail);
  job.large = json.value("large", job.large);
  job.ending = json.value("ending", job.ending);
  return job;
}

Carrier carrier_of(const Job& job, const std::vector<int>& members) {
  if (job.backend == "mpi") return Carrier::mpi;
  if (job.backend == "gloo") return Carrier::gloo;
  std::set<char> hosts;
  for (const int rank : members) hosts.insert(job.placement[static_cast<size_t>(rank)]);
  if (hosts.size() == 1) return Carrier::shm;
  return hosts.size() == members.size() ? Carrier::gloo : Carrier::hierarchical;
}

std::string name_of(Kind kind) {
  return kNames[static_cast<size_t>(kind)];
}

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::all_reduce_coalesced || kind == Kind::reduce ||
         kind == Kind::reduce_scatter || kind == Kind::reduce_scatter_tensor ||
         kind == Kind::symmetric;
}
bool has_root(Kind kind) {
  return kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::gather ||
         kind == Kind::scatter;
}
bool is_collective(Kind kind) {
  return kind <= Kind::barrier;
}
bool is_message(Kind kind) {
  return kind == Kind::exchange || kind == Kind::collect_any;
}

std::string describe(const Step& step) {
  std::string text = name_of(step.kind) + ", key " + std::to_string(step.key) + ", " +
                     c10::toString(step.dtype) + " " + c10::str(at::IntArrayRef(step.shape));
  if (reduces(step.kind)) text += std::string(", ") + kReductionNames[size_t(step.reduction)];
  if (has_root(step.kind) || step.kind == Kind::collect_any)
    text += ", root " + std::to_string(step.root);
  if (step.tensors > 1) text += ", " + std::to_string(step.tensors) + " tensors";
  if (step.splits) text += ", splits";
  if (step.extra) text += ", extra " + std::to_string(step.extra);
  if (step.tag) text += ", tag " + std::to_string(step.tag);
  return text;
}

const std::vector<ReduceOp>& reductions() {
  static const std::vector<ReduceOp> all{ReduceOp::sum, ReduceOp::avg, ReduceOp::product,
                                         ReduceOp::min, ReduceOp::max, ReduceOp::band,
                                         ReduceOp::bor, ReduceOp::bxor};
  return all;
}

bool has_reduction(Carrier carrier, at::ScalarType dtype, ReduceOp reduction) {
  const bool bitwise = reduction >= ReduceOp::band;
  const bool ordered = reduction == ReduceOp::min || reduction == ReduceOp::max;
  const bool boolean = dtype == at::kBool;
  if (bitwise && !at::isIntegralType(dtype, /*includeBool=*/true)) return false;
  if (boolean && reduction == ReduceOp::avg) return false;
  if (ordered && at::isComplexType(dtype)) return false;
  return carrier != Carrier::gloo || (!boolean && reduction != ReduceOp::avg);
}

const std::vector<at::ScalarType>& dtypes_of(Carrier carrier, Kind kind) {
  static const std::vector<at::ScalarType> all{
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,         at::kChar,
      at::kShort, at::kInt,    at::kLong, at::kBool,     at::kComplexFloat, at::kComplexDouble};
  static const std::vector<at::ScalarType> of_gloo{at::kFloat, at::kDouble, at::kHalf, at::kByte,
                                                   at::kChar,  at::kInt,    at::kLong};
  return carrier == Carrier::gloo && !is_message(kind) ? of_gloo : all;
}

Step make_step(const Job& job, Carrier carrier, int size, uint64_t key, int unique) {
  KeyedRandom random(key);
  Step step;
  step.key = key;
  step.kind = random_kind(random);
  // These tell by a time-out alone that a rank is gone, so they do not belong to a program where
  // one goes: recv_any over gloo and between hosts, too.
  if (step.kind == Kind::monitored_barrier && !job.ending.empty()) step.kind = Kind::barrier;
  const bool over_gloo = job.backend == "gloo" || job.backend == "hierarchical";
  if (step.kind == Kind::collect_any && over_gloo && !job.ending.empty())
    step.kind = Kind::exchange;
  step.dtype = any_of(dtypes_of(carrier, step.kind), random);
  step.reduction = any_of(reductions(), random);
  while (reduces(step.kind) && !has_reduction(carrier, step.dtype, step.reduction))
    step.reduction = any_of(reductions(), random);
  step.root = static_cast<int>(random.below(static_cast<uint64_t>(size)));
  step.shape = random_shape(random, random_count(random, most_elements(job, step.kind, size)));
  // What is cut or joined along dimension 0 has one. Over Gloo more is.
  if (step.shape.empty() && (step.kind == Kind::all_to_all_single || carrier == Carrier::gloo))
    step.shape = {1};
  if (step.kind == Kind::all_reduce_coalesced) step.tensors = 1 + static_cast<int>(random.below(4));
  // The inputs of these two are joined of several.
  const bool joined =
      step.kind == Kind::all_to_all_single || step.kind == Kind::reduce_scatter_tensor;
  step.repeated = random.below(8) == 0 && !step.shape.empty() && !joined;
  step.splits = random.below(2) == 0;
  // Messages of several steps may share a tag: they are matched in their order. What is received
  // from any rank must not be taken for another step's.
  step.tag = step.kind == Kind::collect_any ? 1000 + unique : any_of<int>({0, 0, 1, 7}, random);
  return step;
}

Block make_block(const Job& job, const std::vector<std::vector<int>>& groups, int64_t number) {
  KeyedRandom random(job.seed, static_cast<uint64_t>(number), 1);
  Block block;
  const size_t count = 1 + random.below(6);
  for (size_t i = 0; i < count; ++i)
    block.steps.push_back(
        {static_cast<int>(random.below(2 * groups.size()) % groups.size()), random.next()});
  block.barrier = random.below(4) == 0;
  if (job.mismatches && random.below(4) == 0) {
    block.mismatch = static_cast<int>(random.below(count));
    const auto& members =
        groups[static_cast<size_t>(block.steps[static_cast<size_t>(block.mismatch)].group)];
    block.deviant = any_of(members, random);
    if (members.size() < 2) block.mismatch = -1;
  }
  return block;
}

std::vector<std::vector<int>> GroupPlan::groups() const {
  if (!by_split) return {ranks};
  std::map<int, std::vector<int>> by_color;
  for (int rank = 0; rank < static_cast<int>(colors.size()); ++rank)
    if (colors[static_cast<size_t>(rank)] >= 0)
      by_color[colors[static_cast<size_t>(rank)]].push_back(rank);
  std::vector<std::vector<int>> all;
  for (auto& [color, members] : by_color) {
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
      return keys[static_cast<size_t>(a)] < keys[static_cast<size_t>(b)];
    });
    all.push_back(members);
  }
  return all;
}

GroupPlan make_group_plan(KeyedRandom& random, int size) {
  GroupPlan plan;
  plan.by_split = random.below(2) == 0;
  if (plan.by_split) {
    for (int rank = 0; rank < size; ++rank) {
      plan.colors.push_back(static_cast<int>(random.below(3)) - (random.below(6) == 0 ? 3 : 0));
      plan.keys.push_back(static_cast<int>(random.below(3)));
    }
    return plan;
  }
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  shuffle(all, random);
  all.resize(1 + random.below(static_cast<uint64_t>(size)));
  std::sort(all.begin(), all.end());
  plan.ranks = all;
  return plan;
}

}  // namespace lockstep::fuzz
