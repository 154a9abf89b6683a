#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <vector>

#include "lockstep/launch/generation_folder.h"

namespace lockstep::launch {

/// Who goes on after a failure: the launcher's side of a GenerationFolder. Workers are given by
/// their RANKs. One thread.
class Recovery {
 public:
  /// Less than workers wait for a next generation.
  static constexpr std::chrono::seconds kSettle{3};

  /// All workers are members.
  Recovery(const std::filesystem::path& folder, std::set<int> workers)
      : folder_(folder), members_(std::move(workers)) {}

  /// A worker has failed. True: the others go on. A generation without it was published, or is when
  /// new processes have come, where the others do not go on as so few. With `is_replaced` one comes
  /// in its place. False: none is left, one has not announced that it can go on, or they are too
  /// few for good.
  bool go_on_without(int worker, bool is_replaced);
  /// A new process was started in the worker's place. It becomes a member once it has announced
  /// itself.
  void expect(int worker);
  /// Publishes a generation with those who have come, if they are enough.
  void admit();
  /// Members that still stand in a generation that others have left `kSettle` ago although nobody
  /// had failed: they hang.
  std::set<int> hanging(std::chrono::steady_clock::time_point now);
  /// A worker has ended well. The rest does not wait for it.
  void ended(int worker);
  /// Whether those that are left wait for new processes.
  bool waits() const { return waits_; }
  /// New processes that have not come yet.
  const std::set<int>& expected() const { return expected_; }
  bool has_members() const { return !members_.empty(); }
  /// Rank 0 of the generation; -1: none.
  int first_member() const { return members_.empty() ? -1 : *members_.begin(); }

 private:
  bool fits(size_t size) const;
  void publish();

  GenerationFolder folder_;
  int64_t number_ = 0;
  std::set<int> members_;
  std::set<int> expected_;
  bool waits_ = false;
  std::optional<std::chrono::steady_clock::time_point> left_since_;
};

/// The same for a host of a job of several. The hosts agree on generations, and this tells the
/// workers of their host. All of these are in each. One thread.
class HostRecovery {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// Who is not in a generation so long after it began hangs.
  static constexpr std::chrono::seconds kJoin{60};
  /// So does who is still in one that others of this host have left so long ago, with no next one:
  /// longer than hosts need to agree on it.
  static constexpr std::chrono::seconds kSettle{10};

  /// The workers begin in `first`.
  HostRecovery(const std::filesystem::path& folder, std::set<int> workers,
               const HostGeneration& first);

  /// A worker has failed. True: the others wait for the next generation. False: none is left, or
  /// one has not announced that it can go on.
  bool go_on_without(int worker);
  /// Publishes the next generation. Returns the workers in whose place new processes are to start.
  /// None: not all that live go on in it, and nothing was published.
  std::optional<std::set<int>> follow(const HostGeneration& next, Time now);
  /// Workers that hang.
  std::set<int> hanging(Time now);

 private:
  void publish(const HostGeneration& generation);
  bool all_that_live(const std::function<bool(int)>& are) const;

  GenerationFolder folder_;
  const std::set<int> workers_;
  int64_t number_ = 0;
  std::set<int> missing_;
  std::set<int> replaced_;  ///< They join the newest generation when they have started.
  Time published_at_{};
  std::optional<Time> left_since_;
};

}  // namespace lockstep::launch
