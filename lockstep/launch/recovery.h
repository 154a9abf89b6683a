#pragma once

#include <filesystem>
#include <set>
#include <vector>

#include "lockstep/launch/generation_folder.h"

namespace lockstep::launch {

/// Who goes on after a failure: the launcher's side of a GenerationFolder. Workers are given by
/// their RANKs. One thread.
class Recovery {
 public:
  /// All workers are members.
  Recovery(const std::filesystem::path& folder, std::set<int> workers)
      : folder_(folder), members_(std::move(workers)) {}

  /// A worker has failed. True: the others go on, and a generation without it was published. False:
  /// none is left, or one has not announced that it can go on.
  bool go_on_without(int worker);
  /// A new process was started in the worker's place. It becomes a member once it has announced
  /// itself.
  void expect(int worker);
  /// Publishes a generation with those who have come.
  void admit();
  /// A worker has ended well. The rest does not wait for it.
  void ended(int worker);
  /// New processes that have not come yet.
  const std::set<int>& expected() const { return expected_; }
  bool has_members() const { return !members_.empty(); }

 private:
  void publish();

  GenerationFolder folder_;
  int64_t number_ = 0;
  std::set<int> members_;
  std::set<int> expected_;
};

}  // namespace lockstep::launch
