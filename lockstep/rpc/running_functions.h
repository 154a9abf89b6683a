#pragma once

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace lockstep::rpc::detail {

/// The functions that run on this worker, for messages. Any thread.
class RunningFunctions {
 public:
  /// A function runs as long as this lives. Its name must live longer.
  class Scope {
   public:
    Scope(RunningFunctions& all, const std::string& name) : all_(all) {
      const std::lock_guard lock(all_.mutex_);
      place_ = all_.names_.insert(&name);
    }
    ~Scope() {
      const std::lock_guard lock(all_.mutex_);
      all_.names_.erase(place_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    RunningFunctions& all_;
    std::multiset<const std::string*>::iterator place_;
  };

  /// Sorted, each once.
  std::vector<std::string> names() const {
    std::set<std::string> sorted;
    const std::lock_guard lock(mutex_);
    for (const auto* name : names_) sorted.insert(*name);
    return {sorted.begin(), sorted.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::multiset<const std::string*> names_;
};

}  // namespace lockstep::rpc::detail
