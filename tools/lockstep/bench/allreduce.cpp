// `lockstep bench allreduce`: all-reduces, beside what copying alone takes.
#include <ATen/ATen.h>

#include <torch/cuda.h>
#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/words.h"
#include "lockstep/comm/shared_memory/region.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

constexpr int64_t kBoundBytes = 1 << 20;  ///< A rank's slot for the bound.

/// The all-reduces and the copies of a size take turns so often: a machine whose processors are
/// moved about, as a virtual one's are, changes its speed several times a second.
constexpr int64_t kTurns = 30;
constexpr int64_t kLeastOfTurn = 5;  ///< For a median.

/// From what stays in the first cache to what hardly stays in the second.
constexpr std::array<int64_t, 4> kPieces = {16 << 10, 64 << 10, 256 << 10, kBoundBytes};

/// How often a tensor of that size is reduced: large ones fewer times, the same on all sides.
int64_t allreduce_steps(int64_t bytes, int64_t steps) {
  constexpr int64_t kBytesInAll = 2'000'000'000;
  return std::min(steps, std::max<int64_t>(10, kBytesInAll / std::max<int64_t>(bytes, 1)));
}

/// Memory that all ranks see, with a slot a rank.
class Slots {
 public:
  /// A collective.
  explicit Slots(const ProcessGroup& group)
      : rank_(group.rank()),
        ranks_(group.size()),
        memory_({rank_, ranks_}, kBoundBytes,
                {[&](const std::string& told) { group.broadcast_object(told, 0); },
                 [&] { return group.broadcast_object(std::string(), 0); }}) {}

  void copy(const at::Tensor& tensor, int64_t piece) const {
    auto* data = static_cast<std::byte*>(tensor.data_ptr());
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t from = 0; from < bytes; from += piece) {
      const auto size = static_cast<size_t>(std::min(piece, bytes - from));
      std::memcpy(slot(rank_), data + from, size);
      std::memcpy(data + from, slot((rank_ + 1) % ranks_), size);
    }
  }

 private:
  std::byte* slot(int rank) const { return memory_.part(rank); }

  int rank_;
  int ranks_;
  shm::Region memory_;
};

/// Of a turn the median counts, on both sides.
PlainJson measure(const ProcessGroup& group, const Slots* slots, at::Tensor tensor, int64_t warmup,
                  int64_t steps) {
  const int64_t turns = std::clamp<int64_t>(steps / kLeastOfTurn, 1, kTurns);
  const int64_t steps_of_turn = (steps + turns - 1) / turns;
  const auto reduce = [&] {
    group.all_reduce(tensor);
    if (tensor.is_cuda()) torch::cuda::synchronize(tensor.device().index());
  };
  Figures reduced;
  std::array<Figures, kPieces.size()> copied;
  for (int64_t i = 0; i < warmup; ++i) reduce();
  for (int64_t turn = 0; turn < turns; ++turn) {
    if (slots) reduce();  // The caches are full of copies.
    reduced.push_back(median(timed(reduce, 0, steps_of_turn)));
    for (size_t i = 0; slots && i < kPieces.size(); ++i) {
      group.barrier();
      const auto copy = [&] { slots->copy(tensor, kPieces[i]); };
      copied[i].push_back(median(timed(copy, 0, steps_of_turn)));
    }
    if (slots) group.barrier();
  }
  PlainJson row = {{"p50_us", median(reduced)}, {"bound_us", nullptr}, {"of_bound", nullptr}};
  if (!slots) return row;
  const auto& best = *std::min_element(
      copied.begin(), copied.end(),
      [](const auto& one, const auto& other) { return median(one) < median(other); });
  row["bound_us"] = median(best);
  row["of_bound"] = median_ratio(best, reduced);
  return row;
}

}  // namespace

PlainJson allreduce_worker(const PlainJson& config) {
  const World world = join_group(config);
  std::optional<Slots> slots;
  if (world.size() > 1 && world.device().is_cpu()) slots.emplace(world.group());
  PlainJson rows = PlainJson::array();
  for (const auto& row : config.at("sizes")) {
    const int64_t bytes = row.at("bytes"), warmup = config.at("warmup"), steps = row.at("steps");
    if (bytes == 0) {
      const auto times = timed([&] { world.group().barrier(); }, warmup, steps);
      rows.push_back({{"p50_us", median(times)}, {"bound_us", nullptr}, {"of_bound", nullptr}});
    } else {
      rows.push_back(measure(world.group(), slots ? &*slots : nullptr,
                             at::zeros({bytes / 4}, world.device()), warmup, steps));
    }
  }
  return {{"rows", rows}};
}

BenchRows bench_allreduce(BenchRunner& runner) {
  const auto& options = runner.options;
  BenchRow config = {{"kind", "allreduce"}, {"warmup", kWarmup / 3}};
  for (const int64_t bytes : options.sizes) {
    config["sizes"].push_back({{"bytes", bytes}, {"steps", allreduce_steps(bytes, options.steps)}});
  }
  BenchRows rows;
  for (const int64_t ranks : options.devices) {
    config["ranks"] = ranks;
    const Sides sides = runner.in_turns("allreduce, " + counted(ranks, "rank"), config);
    for (size_t i = 0; i < options.sizes.size(); ++i) {
      for (const auto& backend : options.backends) {
        const std::string place = "/rows/" + std::to_string(i) + "/";
        rows.push_back({{"bytes", options.sizes[i]}, {"ranks", ranks}, {"backend", backend}});
        add_comparison(rows.back(), "p50_us", sides, backend, place + "p50_us");
        for (const std::string key : {"bound_us", "of_bound"})
          rows.back()[key] = median_at(sides.at(backend), place + key);
      }
    }
  }
  return rows;
}

}  // namespace lockstep::tool
