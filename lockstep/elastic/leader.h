#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/elastic/agent_events.h"
#include "lockstep/elastic/job_record.h"

namespace lockstep::elastic {

/// What the leading agent knows of the others, and what it proposes. As Agent it is a function of
/// its events and their times. Several may hold themselves for the leader at a time: a proposal is
/// right by what the proposer has seen of the agents, and the compare-and-set lets one through.
class Leader {
 public:
  explicit Leader(const AgentOptions& options) : options_(options) {}

  /// Something under agents/ has changed.
  void take(const Changed& changed, Time now);
  /// The next state of the record; none: it is right as it is, or it is too early. `current` is
  /// what lies there, if anything does. `fresh`: that is of an earlier job; begin a new one. Until
  /// `patient_until` nobody counts as gone.
  std::optional<GenerationRecord> propose(std::shared_ptr<const GenerationRecord> current,
                                          bool fresh, std::optional<Time> patient_until, Time now);
  /// When `propose` may say something else without an event.
  std::optional<Time> deadline() const { return deadline_; }
  /// To be written to this agent's own record. When it comes back as a change, the view is newer
  /// than the wish.
  int64_t probe() const { return probe_; }
  /// Who has not come yet, for the user.
  std::string missing() const;
  /// Whether only agent `id` is left, and such as serve a registry of their own.
  bool is_alone(const std::string& id) const;

 private:
  struct Seen {
    AgentRecord record;
    int64_t revision = 0;
  };
  enum class Fate {
    there,
    needs_next,  ///< There, but without workers of this generation for another reason than failure.
    done,
    failed,
    leaving,
    gone,
  };

  std::optional<GenerationRecord> propose_first(Time now);
  std::optional<GenerationRecord> propose_next(std::optional<Time> patient_until, Time now);
  const std::vector<Member>& members() const;
  const Seen* find(const std::string& agent) const;
  Fate fate_of(const Member& member) const;
  void note_ends();
  const Report* failure(Time now);
  bool is_interrupted() const;
  std::vector<std::string> candidates() const;
  std::optional<GenerationRecord> end(JobEnd::Kind kind, const Report* cause = nullptr) const;
  std::optional<GenerationRecord> fail(const std::string& text, int exit_code = kExitFailure) const;
  std::optional<GenerationRecord> end_by_loss();
  std::optional<GenerationRecord> refuse_twins(Time now);
  std::optional<GenerationRecord> regroup(std::optional<Time> patient_until, Time now);
  std::optional<GenerationRecord> wait(const std::string& why, Time now);
  GenerationRecord successor(const std::vector<std::string>& agents) const;
  std::vector<EarlierGeneration> perhaps_running() const;
  bool is_safe(const GenerationRecord& next, Time now);
  void wake(Time at, Time now);

  AgentOptions options_;
  bool has_view_ = false;
  std::map<std::string, Seen> agents_;
  const std::shared_ptr<const GenerationRecord> none_ = std::make_shared<GenerationRecord>();
  std::shared_ptr<const GenerationRecord> current_ = none_;
  bool fresh_ = true;
  std::set<std::string> done_;     ///< Of the current generation, also those that have gone since.
  std::set<std::string> awaited_;  ///< Members of generations that may run beside the next.
  std::set<int64_t> idle_;         ///< Generations that are known not to run.
  std::optional<Time> deadline_;
  Time counted_at_{};  ///< When agents came or went last.
  std::optional<Time> consequence_since_;
  std::optional<Time> waiting_since_;
  std::string waiting_for_;
  std::optional<Time> alone_since_;
  int64_t probe_ = 0;
  bool probing_ = false;
};

}  // namespace lockstep::elastic
