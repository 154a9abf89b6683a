#include "lockstep/comm/backends/shm/shm_work.h"

namespace lockstep::shm {

uint64_t ShmWork::hash() const {
  uint64_t hash = TensorWork::hash();
  if (!region_.region) return hash;
  for (const uint64_t part :
       {static_cast<uint64_t>(region_.number), static_cast<uint64_t>(region_.offset)})
    hash = (hash ^ part) * 0x9E3779B97F4A7C15U;
  return hash ^ hash >> 32;
}

void ShmWork::add(std::unique_ptr<Plan> plan) {
  if (plan_) {
    further_.push_back(std::move(plan));
  } else {
    plan_ = std::move(plan);
  }
}

void ShmWork::close() {
  if (plan_ && further_.empty()) return;
  if (plan_) further_.insert(further_.begin(), std::move(plan_));
  plan_ = sequence_plan(std::move(further_));
}

}  // namespace lockstep::shm
