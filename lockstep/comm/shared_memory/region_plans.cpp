#include "lockstep/comm/shared_memory/region_plans.h"

#include <utility>
#include <vector>

namespace lockstep::shm {
namespace {

/// In the first step all have written their parts, and each rank reduces. The second tells that all
/// have.
class ReduceScatterInPlace : public Plan {
 public:
  ReduceScatterInPlace(std::vector<const void*> sources, std::byte* output, size_t count,
                       ReduceKernel kernel)
      : sources_(std::move(sources)), output_(output), count_(count), kernel_(kernel) {}

  int64_t steps() const override { return 2; }
  void fill(int64_t, SharedGroup&) override {}
  void drain(int64_t step, SharedGroup& group) override {
    if (step == 0) kernel_(output_, sources_.data(), group.size(), count_);
  }

 private:
  std::vector<const void*> sources_;
  std::byte* output_;
  size_t count_;
  ReduceKernel kernel_;
};

}  // namespace

std::unique_ptr<Plan> reduce_scatter_plan(const SharedGroup& group, const Region& region,
                                          size_t offset, std::byte* output, size_t count,
                                          DataType type, ReduceKernel kernel) {
  const size_t mine = offset + static_cast<size_t>(group.rank()) * count * size_of(type);
  std::vector<const void*> sources;
  for (int rank = 0; rank < group.size(); ++rank) sources.push_back(region.part(rank) + mine);
  return std::make_unique<ReduceScatterInPlace>(std::move(sources), output, count, kernel);
}

}  // namespace lockstep::shm
