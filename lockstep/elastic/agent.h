#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/elastic/agent_events.h"
#include "lockstep/elastic/job_record.h"
#include "lockstep/elastic/leader.h"

namespace lockstep::elastic {

/// A host's part in an elastic job: it joins, follows the generations, and leads when it is its
/// turn. A function of its events and their times alone: it makes no system call, reads no clock
/// and draws no random number. Not for several threads at once.
///
/// How it stays right when messages are lost, late or repeated: it writes by compare-and-set only,
/// always from what it knows, with one write of a key under way at a time. So an old copy of a
/// write never wins.
class Agent {
 public:
  explicit Agent(AgentOptions options) : options_(std::move(options)) {}

  /// What to do first.
  std::vector<Action> start(Time now);
  /// What to do after an event, in this order.
  std::vector<Action> take(const Event& event, Time now);
  /// When `Tick` is wanted; none: not at all. Changes with each call of the others.
  std::optional<Time> deadline() const { return deadline_; }
  bool finished() const { return finished_; }
  bool leads() const;

 private:
  /// What is known of a key that this agent writes.
  struct Slot {
    std::string key;
    bool present = false;
    std::string value = {};                ///< Not kept of a generation.
    int64_t revision = 0;                  ///< Of the registry, at which this was so.
    std::optional<uint64_t> request = {};  ///< The write under way,
    Time sent{};                           ///< when it was sent,
    int life = 0;                          ///< and in which life.
  };

  void on(const Changed& changed);
  void on(const Answered& answered);
  void on(const LeaseGranted&);
  void on(const LeaseLost&);
  void on(const LeaseKept& kept);
  void on(const WorkersEnded& ended);
  void on(const StoreOpened& opened);
  void on(const Leave&) { leaving_ = true; }
  void on(const Tick&) {}

  void learn(Slot& slot, bool present, const std::string& value, int64_t revision);
  void take_answer(Slot& slot, const Answered& answered);
  void take_generation(const std::string& value);
  void take_own();
  void lose_lease();
  void tell_change(const GenerationRecord& before);
  void take_end(const JobEnd& end);
  void lose_job(const std::string& why);

  void report_end(const launch::HostEnd& end);

  void reconcile();
  void check_contact();
  void lose_contact();
  void follow();
  void report_unstarted();
  void begin(size_t index);
  void lead();
  void write_own();
  void say_good_bye();
  bool holds_on();
  void conclude();
  void tell_wait();
  bool clear_own(GenerationRecord& record) const;

  AgentRecord own_record() const;
  std::string token() const;
  bool in_contact() const;
  void write(Slot& slot, std::string value, bool with_lease);
  void stop(bool interrupted);
  void wake(Time at);
  void say(const std::string& text) { actions_.push_back(Say{text}); }

  AgentOptions options_;
  Time now_{};
  std::optional<Time> deadline_;
  std::vector<Action> actions_;
  uint64_t requests_ = 0;

  // The registry.
  bool leased_ = false, granting_ = false;
  int life_ = 0;
  int64_t joined_ = 0;
  Time started_{};
  std::optional<Time> contact_;  ///< At this time or later our record lay there.
  std::optional<Time> patient_until_;
  Slot own_{kAgentsPrefix + options_.id}, leader_{kLeaderKey}, generation_{kGenerationKey};
  AgentRecord written_;
  std::optional<AgentRecord> confirmed_;  ///< Our record as it lies there under this lease.
  bool knows_leader_ = false, knows_generation_ = false;
  int64_t watched_revision_ = 0;
  std::optional<Leader> view_;  ///< While agents/ is watched.

  // The job.
  std::string job_, foreign_job_;
  std::shared_ptr<const GenerationRecord> there_;   ///< Whosever it is.
  std::shared_ptr<const GenerationRecord> record_;  ///< Of our job.
  std::optional<Finish> outcome_;
  bool finished_ = false;

  // This host.
  int64_t running_ = 0;  ///< The generation whose workers live; 0: none.
  bool stopping_ = false, gently_ = false;
  bool leaving_ = false;
  bool told_lost_contact_ = false, told_wait_ = false;
  std::optional<Time> left_at_, concluded_at_;
  int64_t store_for_ = 0;
  std::optional<StoreOpened> store_;
  Report report_;
};

}  // namespace lockstep::elastic
