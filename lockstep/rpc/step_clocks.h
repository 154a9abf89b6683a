#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/rpc/future.h"

namespace lockstep::rpc::detail {

/// The clocks of all StalenessBounds whose server this worker is. Any thread; nothing blocks.
class StepClocks : public std::enable_shared_from_this<StepClocks> {
 public:
  using Clock = std::chrono::steady_clock;

  /// What all workers of a bound must agree on.
  struct Terms {
    std::vector<std::string> workers;
    std::optional<int64_t> max_staleness;
    std::optional<int64_t> timeout_ms;
    friend auto rpc_fields(Terms& t) { return std::tie(t.workers, t.max_staleness, t.timeout_ms); }
    bool operator==(const Terms&) const = default;
  };
  /// A worker's part in a bound.
  struct Part {
    int64_t number = 0;  ///< Never used twice.
    int64_t clock = 0;   ///< Where it begins.
    int64_t timeout_ms = 0;
    friend auto rpc_fields(Part& p) { return std::tie(p.number, p.clock, p.timeout_ms); }
  };
  enum class End : int8_t {
    reached,
    not_yet,  ///< The time-out is over, but there were steps: ask again.
    stalled,  ///< There were none.
  };
  struct Answer {
    End end = End::reached;
    int64_t slowest = 0;
    std::vector<std::pair<std::string, int64_t>> behind;  ///< Those waited for, and their clocks.
    friend auto rpc_fields(Answer& a) { return std::tie(a.end, a.slowest, a.behind); }
  };

  /// A worker, by its name and number, takes part. The first one makes the bound. One that has a
  /// part already gets another in its place. So does one that has the name of a dead one.
  /// `is_here`: whether a worker of that name is there; throws UsageError for a name that none has
  /// had. Throws UsageError for other terms than those of the bound.
  Part enter(const std::string& bound, const Terms& terms, const std::string& worker, int id,
             const std::function<bool(const std::string&)>& is_here);
  /// Moves a part's clock. Done when the slowest clock is near enough. Throws UsageError for a part
  /// that counts no more.
  Future<Answer> reach(const std::string& bound, int64_t number, int64_t clock);
  /// Ends a part, if it has not ended. Done when the bound has no other.
  Future<Answer> finish(const std::string& bound, int64_t number);
  /// The same without an answer.
  void leave(const std::string& bound, int64_t number);
  /// A worker has died or left: its parts end. Where no other one has its name, nobody waits for
  /// one of the name to come.
  void gone(int id, const std::string& worker, bool name_is_free);

 private:
  struct Member {
    int id = -1;         ///< The worker's; -1: it has not come yet.
    int64_t number = 0;  ///< Its part's; 0: it has not come yet.
    int64_t clock = 0;
  };
  struct Waiter {
    int64_t slowest_needed = 0;
    Clock::time_point since;
    Promise<Answer> promise;
  };
  struct Bound {
    Terms terms;
    std::chrono::milliseconds timeout{};
    int64_t number = 0;                     ///< Tells it from later ones of the same name.
    std::map<std::string, Member> members;  ///< Those that count.
    std::vector<Waiter> waiters;
    Clock::time_point moved;  ///< When a clock did, or a part ended.
    bool watched = false;

    int64_t slowest() const;
    Answer answer(End end, int64_t slowest_needed) const;
  };
  using Answers = std::vector<std::pair<Promise<Answer>, Answer>>;

  static void check_terms(const std::string& name, const Terms& terms);
  Bound make_bound(const Terms& terms, const std::function<bool(const std::string&)>& is_here);
  Future<Answer> wait_for(const std::string& name, Bound& bound, int64_t slowest_needed);
  void end_part(const std::string& name, int64_t number, Answers& answers);
  /// Takes those out whose wait is over. Forgets a bound in which nobody counts.
  void moved(const std::string& name, Answers& answers);
  void watch(const std::string& name, Bound& bound, std::chrono::milliseconds delay);
  void look_at_waits(const std::string& name, int64_t bound_number);
  /// Without the lock.
  static void give(const Answers& answers);

  std::mutex mutex_;
  std::map<std::string, Bound> bounds_;
  int64_t last_number_ = 0;
};

}  // namespace lockstep::rpc::detail
