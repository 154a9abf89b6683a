#include "lockstep/launch/recovery.h"

#include <algorithm>

namespace lockstep::launch {

bool Recovery::go_on_without(int worker) {
  if (expected_.erase(worker) > 0) return has_members();
  auto left = members_;
  left.erase(worker);
  const bool can = !left.empty() && std::all_of(left.begin(), left.end(), [&](int other) {
    return folder_.has_announced(other);
  });
  if (!can) return false;
  members_ = std::move(left);
  publish();
  return true;
}

void Recovery::expect(int worker) {
  expected_.insert(worker);
}

void Recovery::admit() {
  std::set<int> came;
  for (const int worker : expected_) {
    if (folder_.has_announced(worker)) came.insert(worker);
  }
  if (came.empty()) return;
  for (const int worker : came) expected_.erase(worker);
  members_.merge(came);
  publish();
}

void Recovery::ended(int worker) {
  expected_.erase(worker);
  // Who has announced nothing looks for no generation.
  const bool waits = folder_.has_announced(worker);
  if (members_.erase(worker) > 0 && has_members() && waits) publish();
}

void Recovery::publish() {
  folder_.publish({.number = ++number_, .members = {members_.begin(), members_.end()}});
}

}  // namespace lockstep::launch
