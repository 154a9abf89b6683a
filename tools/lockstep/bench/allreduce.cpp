// `lockstep bench allreduce`: all-reduces, beside what copying alone takes.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torch/cuda.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

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
  /// A collective. The memory has no name: rank 0 makes it, and the others find it by its process.
  explicit Slots(const ProcessGroup& group)
      : rank_(group.rank()), ranks_(group.size()), bytes_(kBoundBytes * group.size()) {
    UniqueFd fd;
    if (rank_ == 0) {
      fd = UniqueFd(::memfd_create("lockstep-bench", MFD_CLOEXEC));
      if (!fd || ::ftruncate(fd.get(), bytes_) != 0)
        throw SystemError("cannot make the benchmark's memory", errno);
    }
    const std::string own = "/proc/" + std::to_string(::getpid()) + "/fd/";
    const std::string path = group.broadcast_object(own + std::to_string(fd.get()), 0);
    if (rank_ != 0) fd = UniqueFd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd) throw SystemError("cannot open the benchmark's memory, " + path, errno);
    void* memory = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED,
                          fd.get(), 0);
    if (memory == MAP_FAILED) throw SystemError("cannot map the benchmark's memory", errno);
    memory_ = static_cast<char*>(memory);
    group.barrier();  // Until all have opened it.
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

PlainJson measure(const ProcessGroup& group, const Slots* slots, at::Tensor tensor, int64_t warmup,
                  int64_t steps) {
  const int64_t count = std::clamp<int64_t>(steps / kLeastOfTurn, 1, kTurns);
  const int64_t steps_of_turn = (steps + count - 1) / count;
  const auto turns = static_cast<size_t>(count);
  std::vector<std::vector<double>> reduced(turns);
  std::array<std::vector<std::vector<double>>, kPieces.size()> copied;
  for (auto& times : copied) times.resize(turns);
  for (int64_t i = 0; i < warmup; ++i) group.all_reduce(tensor);
  for (size_t turn = 0; turn < turns; ++turn) {
    if (slots) group.all_reduce(tensor);  // The caches are full of copies.
    const auto reduce = [&] {
      group.all_reduce(tensor);
      if (tensor.is_cuda()) torch::cuda::synchronize(tensor.device().index());
    };
    reduced[turn] = timed(reduce, 0, steps_of_turn);
    for (size_t i = 0; slots && i < kPieces.size(); ++i) {
      group.barrier();
      copied[i][turn] = timed([&] { slots->copy(tensor, kPieces[i]); }, 0, steps_of_turn);
    }
    if (slots) group.barrier();
  }
  if (!slots) return {{"p50_us", middle(reduced)}, {"bound_us", nullptr}, {"of_bound", nullptr}};
  const auto& best = *std::min_element(
      copied.begin(), copied.end(),
      [](const auto& one, const auto& other) { return middle(one) < middle(other); });
  return {
      {"p50_us", middle(reduced)}, {"bound_us", middle(best)}, {"of_bound", share(best, reduced)}};
}

}  // namespace

PlainJson allreduce_worker(const PlainJson& config) {
  const World world = join_group(config);
  std::optional<Slots> slots;
  if (world.size() > 1 && world.device().is_cpu()) {
    slots.emplace(world.group());
  }
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
