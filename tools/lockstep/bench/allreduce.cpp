#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

/// The all-reduces and the copies of a size take turns so often: a machine whose processors are
/// moved about, as a virtual one's are, changes its speed several times a second.
constexpr int64_t kTurns = 30;
constexpr int64_t kLeastOfTurn = 5;  ///< For a median.

/// From what stays in the first cache to what hardly stays in the second.
constexpr std::array<int64_t, 4> kPieces = {16 << 10, 64 << 10, 256 << 10, kBoundBytes};

/// Memory that all ranks see, with a slot a rank.
class Slots {
 public:
  Slots(const std::string& path, const ProcessGroup& group)
      : rank_(group.rank()), ranks_(group.size()), bytes_(kBoundBytes * group.size()) {
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd) throw SystemError("cannot open the benchmark's memory, " + path, errno);
    void* memory = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED,
                          fd.get(), 0);
    if (memory == MAP_FAILED) throw SystemError("cannot map the benchmark's memory", errno);
    memory_ = static_cast<char*>(memory);
  }
  ~Slots() { ::munmap(memory_, static_cast<size_t>(bytes_)); }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  void copy(const at::Tensor& tensor, int64_t piece) const {
    auto* data = static_cast<char*>(tensor.data_ptr());
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t from = 0; from < bytes; from += piece) {
      const auto size = static_cast<size_t>(std::min(piece, bytes - from));
      std::memcpy(slot(rank_), data + from, size);
      std::memcpy(data + from, slot((rank_ + 1) % ranks_), size);
    }
  }

 private:
  char* slot(int rank) const { return memory_ + kBoundBytes * rank; }

  int rank_;
  int ranks_;
  int64_t bytes_;
  char* memory_ = nullptr;
};

struct SizeFigures {
  double p50_us = 0;
  PlainJson bound_us;
  PlainJson of_bound;
};

SizeFigures measure_barrier(const ProcessGroup& group, int64_t warmup, int64_t steps) {
  std::vector<double> times;
  for (int64_t i = 0; i < warmup; ++i) group.barrier();
  time_calls([&] { group.barrier(); }, steps, times);
  return {median(std::move(times)), {}, {}};
}

double middle(const std::vector<std::vector<double>>& turns) {
  std::vector<double> all;
  for (const auto& turn : turns) all.insert(all.end(), turn.begin(), turn.end());
  return median(std::move(all));
}

/// By turns, as the machine is then the same for both.
double share(const std::vector<std::vector<double>>& bound,
             const std::vector<std::vector<double>>& reduced) {
  std::vector<double> shares;
  for (size_t turn = 0; turn < reduced.size(); ++turn)
    shares.push_back(median(bound[turn]) / median(reduced[turn]));
  return median(std::move(shares));
}

SizeFigures measure(const ProcessGroup& group, const Slots* slots, at::Tensor tensor,
                    int64_t warmup, int64_t steps) {
  const int64_t count = std::clamp<int64_t>(steps / kLeastOfTurn, 1, kTurns);
  const int64_t steps_of_turn = (steps + count - 1) / count;
  const auto turns = static_cast<size_t>(count);
  std::vector<std::vector<double>> reduced(turns);
  std::array<std::vector<std::vector<double>>, kPieces.size()> copied;
  for (auto& times : copied) times.resize(turns);
  for (int64_t i = 0; i < warmup; ++i) group.all_reduce(tensor);
  for (size_t turn = 0; turn < turns; ++turn) {
    if (slots) group.all_reduce(tensor);  // The caches are full of copies.
    time_calls([&] { group.all_reduce(tensor); }, steps_of_turn, reduced[turn]);
    for (size_t i = 0; slots && i < kPieces.size(); ++i) {
      group.barrier();
      time_calls([&] { slots->copy(tensor, kPieces[i]); }, steps_of_turn, copied[i][turn]);
    }
    if (slots) group.barrier();
  }
  SizeFigures figures;
  figures.p50_us = middle(reduced);
  if (!slots) return figures;
  const auto& best = *std::min_element(
      copied.begin(), copied.end(),
      [](const auto& one, const auto& other) { return middle(one) < middle(other); });
  figures.bound_us = middle(best);
  figures.of_bound = share(best, reduced);
  return figures;
}

}  // namespace

PlainJson bench_allreduce_worker(const PlainJson& config) {
  const World world = join_group(config);
  std::optional<Slots> slots;
  if (world.size() > 1 && world.device().is_cpu()) {
    slots.emplace(config.at("memory").get<std::string>(), world.group());
  }
  PlainJson p50 = PlainJson::array(), bound = PlainJson::array(), of_bound = PlainJson::array();
  for (const auto& row : config.at("sizes")) {
    const int64_t bytes = row.at("bytes"), warmup = config.at("warmup"), steps = row.at("steps");
    const auto figures = bytes == 0
                             ? measure_barrier(world.group(), warmup, steps)
                             : measure(world.group(), slots ? &*slots : nullptr,
                                       at::zeros({bytes / 4}, world.device()), warmup, steps);
    p50.push_back(figures.p50_us);
    bound.push_back(figures.bound_us);
    of_bound.push_back(figures.of_bound);
  }
  return {{"p50_us", p50}, {"bound_us", bound}, {"of_bound", of_bound}};
}

}  // namespace lockstep::tool
