#include "lockstep/parallel/gradient_reducer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::detail {

void GradientReducer::set_units(std::vector<size_t> unit_of, std::vector<size_t> order) {
  unit_of_ = std::move(unit_of);
  order_ = std::move(order);
  counts_.clear();
  for (const size_t unit : unit_of_) {
    if (unit >= counts_.size()) counts_.resize(unit + 1);
    ++counts_[unit];
  }
}

void GradientReducer::begin() {
  while (!under_way_.empty()) {
    try {
      wait_for_oldest();
    } catch (const Error& error) {  // The group's next call says so again.
      log_debug(std::string("a reduction that a backward left behind: ") + error.what());
    }
  }
  begin_round();
  awaited_ = counts_;
  arrivals_.clear();
  next_ = 0;
}

bool GradientReducer::arrived(size_t index) {
  if (learns_order_) arrivals_.push_back(index);
  stage(index);
  return --awaited_[unit_of_[index]] == 0;
}

void GradientReducer::reduce_in_turn() {
  const CallOrigin origin("gradients", caller_);
  for (; next_ + 1 < order_.size() && awaited_[order_[next_]] == 0; ++next_)
    reduce(order_[next_], /*wait=*/false);
}

void GradientReducer::finish() {
  const CallOrigin origin("gradients", caller_);
  for (; next_ < order_.size(); ++next_) reduce(order_[next_], /*wait=*/next_ + 1 == order_.size());
  deliver();
}

void GradientReducer::reduce_all() {
  begin();
  for (size_t i = 0; i < unit_of_.size(); ++i) arrived(i);
  finish();
}

void GradientReducer::wait_for_oldest() {
  const Work work = std::move(under_way_.front());
  under_way_.pop_front();
  if (work) work.wait();
}

std::vector<size_t> GradientReducer::agreed_arrivals(const ProcessGroup& before) const {
  std::vector<bool> came(unit_of_.size());
  for (const size_t index : arrivals_) came[index] = true;
  std::vector<size_t> order;
  for (size_t i = 0; i < came.size(); ++i) {
    if (!came[i]) order.push_back(i);
  }
  order.insert(order.end(), arrivals_.begin(), arrivals_.end());
  for (const ProcessGroup& group : {before, group_}) {
    if (group) order = group.broadcast_object(order, 0).get<std::vector<size_t>>();
  }
  return order;
}

}  // namespace lockstep::detail
