#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/tensor_work.h"
#include "lockstep/comm/shared_memory/plans.h"

namespace lockstep::shm {

/// One collective of this rank, and how it is done.
class ShmWork final : public backends::TensorWork {
 public:
  using TensorWork::TensorWork;

  uint64_t hash() const override;

  /// Several are done one after the other.
  void add(std::unique_ptr<Plan> plan);
  /// Once, when all have been added.
  void close();
  Plan& plan() { return *plan_; }
  /// Of the data, where all ranks must use the same part of the same memory.
  void set_region(RegionOffset region) { region_ = std::move(region); }
  bool begun = false;  ///< The others have been told.

 private:
  std::unique_ptr<Plan> plan_;
  std::vector<std::unique_ptr<Plan>> further_;
  RegionOffset region_;
};

}  // namespace lockstep::shm
