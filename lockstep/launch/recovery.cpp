#include "lockstep/launch/recovery.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lockstep::launch {
namespace {

using Time = std::chrono::steady_clock::time_point;

/// Members that still stand in a generation that others have left `settle` ago. `left_since`: when
/// that was seen first.
std::set<int> left_behind(const GenerationFolder& folder, const std::set<int>& members,
                          int64_t number, std::chrono::seconds settle,
                          std::optional<Time>& left_since, Time now) {
  std::set<int> left, stay;
  for (const int member : members) (folder.has_left(member, number) ? left : stay).insert(member);
  if (left.empty() || stay.empty()) {
    left_since.reset();
    return {};
  }
  if (!left_since) left_since = now;
  if (now - *left_since < settle) return {};
  left_since = now;  // Not to be named again at once.
  return stay;
}

}  // namespace

bool Recovery::go_on_without(int worker, bool is_replaced) {
  const bool was_expected = expected_.erase(worker) > 0;
  auto left = members_;
  left.erase(worker);
  const bool can = !left.empty() && std::all_of(left.begin(), left.end(), [&](int other) {
    return folder_.has_announced(other);
  });
  if (!can) return false;
  members_.swap(left);
  bool enough = false;
  const size_t most = members_.size() + expected_.size() + (is_replaced ? 1 : 0);
  for (size_t size = members_.size(); size <= most; ++size) enough = enough || fits(size);
  if (!enough) {
    members_.swap(left);
    return false;
  }
  if (was_expected && !waits_) return true;
  if (fits(members_.size())) {
    publish();
  } else {
    waits_ = true;
    folder_.promise(number_ + 1);
  }
  return true;
}

/// Whether all members go on as so many.
bool Recovery::fits(size_t size) const {
  return std::all_of(members_.begin(), members_.end(),
                     [&](int member) { return folder_.accepts(member, size); });
}

void Recovery::expect(int worker) {
  expected_.insert(worker);
}

void Recovery::admit() {
  std::set<int> came;
  for (const int worker : expected_) {
    if (folder_.has_announced(worker)) came.insert(worker);
  }
  if (came.empty() || !fits(members_.size() + came.size())) return;
  for (const int worker : came) expected_.erase(worker);
  members_.merge(came);
  publish();
}

std::set<int> Recovery::hanging(std::chrono::steady_clock::time_point now) {
  if (!waits_) return left_behind(folder_, members_, number_, kSettle, left_since_, now);
  left_since_.reset();
  return {};
}

void Recovery::ended(int worker) {
  expected_.erase(worker);
  // Who has announced nothing looks for no generation.
  const bool waits = folder_.has_announced(worker);
  if (members_.erase(worker) > 0 && has_members() && waits) publish();
}

void Recovery::publish() {
  waits_ = false;
  left_since_.reset();
  folder_.publish({.number = ++number_, .members = {members_.begin(), members_.end()}});
}

HostRecovery::HostRecovery(const std::filesystem::path& folder, std::set<int> workers,
                           const HostGeneration& first)
    : folder_(folder), workers_(std::move(workers)) {
  publish(first);
}

void HostRecovery::publish(const HostGeneration& generation) {
  folder_.publish({number_, {workers_.begin(), workers_.end()}, generation});
}

bool HostRecovery::all_that_live(const std::function<bool(int)>& are) const {
  return std::all_of(workers_.begin(), workers_.end(), [&](int worker) {
    const bool starts = replaced_.count(worker) > 0 && !folder_.has_announced(worker);
    return missing_.count(worker) > 0 || starts || are(worker);
  });
}

bool HostRecovery::go_on_without(int worker) {
  missing_.insert(worker);
  const bool can = missing_.size() < workers_.size() &&
                   all_that_live([&](int other) { return folder_.has_announced(other); });
  can ? folder_.promise(number_ + 1) : void(missing_.erase(worker));
  return can;
}

std::optional<std::set<int>> HostRecovery::follow(const HostGeneration& next, Time now) {
  const auto size = static_cast<size_t>(next.world_size);
  const bool can = all_that_live(
      [&](int worker) { return folder_.has_announced(worker) && folder_.accepts(worker, size); });
  if (!can) return std::nullopt;
  for (const int worker : missing_) folder_.forget(worker);
  replaced_.insert(missing_.begin(), missing_.end());
  published_at_ = now;
  ++number_;
  publish(next);
  return std::exchange(missing_, {});
}

std::set<int> HostRecovery::hanging(Time now) {
  std::set<int> there;
  std::set_difference(workers_.begin(), workers_.end(), missing_.begin(), missing_.end(),
                      std::inserter(there, there.end()));
  auto behind = left_behind(folder_, there, number_, kSettle, left_since_, now);
  if (!behind.empty() || number_ == 0 || now < published_at_ + kJoin) return behind;
  published_at_ = now;  // Not to be named again at once.
  std::erase_if(there, [&](int worker) { return folder_.has_joined(worker, number_); });
  return there;
}

}  // namespace lockstep::launch
