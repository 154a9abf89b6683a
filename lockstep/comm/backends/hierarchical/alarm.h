#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace lockstep::hierarchical {

/// Why a group is of no more use.
struct Cause {
  bool timed_out = false;  ///< Else a rank was lost.
  std::string text;        ///< "rank 3 (process 4711) has ended"
};

/// The first failure of a group, told to all its hosts through the store. Over TCP it has a
/// connection of its own, so that it is told and heard while another thread waits for a key. Any
/// thread may call; nothing throws, as a store that is lost as well changes nothing.
class Alarm {
 public:
  /// `store`: of this group and purpose alone.
  explicit Alarm(const c10::intrusive_ptr<c10d::Store>& store);
  ~Alarm();

  /// Tells it unless another cause was told before; returns the one that holds. Once it has, the
  /// store is asked no more.
  Cause raise(const Cause& cause) noexcept;
  /// What was told, if anything; asks the store.
  std::optional<Cause> heard() noexcept;

 private:
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::optional<Cause> known_;
};

}  // namespace lockstep::hierarchical
