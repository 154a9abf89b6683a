#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::elastic {

// Keys of a job, without the prefix "lockstep/RUN_ID/" that the shell puts before all of them.
inline constexpr const char* kAgentsPrefix = "agents/";  ///< And the agent's id.
inline constexpr const char* kLeaderKey = "leader";
inline constexpr const char* kGenerationKey = "generation";

/// What an agent tells of its own workers of one generation.
struct Report {
  enum class State {
    none,
    running,  ///< Told only by an agent that lost its lease while its workers ran on.
    done,     ///< All have succeeded.
    failed,   ///< One has failed. None is left.
    stopped,  ///< None is left, or none was ever started; nothing failed. It needs a new
              ///< generation.
  };
  int64_t generation = 0;
  State state = State::none;
  // Of a failure:
  int exit_code = 0;
  std::string text = {};  ///< "rank 3 (pid 4711) was killed by SIGKILL (signal 9)", and more lines.
  bool can_retry = true;  ///< False: a restart cannot help (the program cannot be executed).
  bool consequence = false;  ///< It tells of a lost peer: another one is the cause.
  bool operator==(const Report&) const = default;
};

/// The value of agents/ID. Bound to the agent's lease.
struct AgentRecord {
  int nproc = 1;  ///< Workers.
  std::optional<int> node_rank = {};
  bool hosts_registry = false;  ///< It serves the embedded registry.
  /// Counts the leases that the agent has lost. A generation that was proposed for an earlier life
  /// is not started by a later one.
  int life = 0;
  int64_t joined = 0;    ///< The registry's revision that it saw when this life began.
  bool leaving = false;  ///< The user has interrupted it.
  int64_t probe = 0;     ///< Written by a leader that wants to see how new its view is.
  Report report = {};
  bool operator==(const AgentRecord&) const = default;
};

struct Member {
  std::string agent;   ///< Its id.
  int nproc = 1;       ///< Workers.
  int life = 0;        ///< See AgentRecord.
  int first_rank = 0;  ///< Of its workers. Not in JSON: it follows from those before.
  bool operator==(const Member&) const = default;
};

/// A generation that was started and of which nothing proves yet that it does not run any more.
struct EarlierGeneration {
  int64_t number = 0;
  std::vector<std::string> agents;
  bool has(const std::string& agent) const {
    return std::find(agents.begin(), agents.end(), agent) != agents.end();
  }
  bool operator==(const EarlierGeneration&) const = default;
};

struct JobEnd {
  enum class Kind { none, success, failure, interrupted };
  Kind kind = Kind::none;
  int exit_code = 0;      ///< Of a failure.
  std::string text = {};  ///< Of a failure: its cause.
  bool operator==(const JobEnd&) const = default;
};

/// The value of `generation`, the one record that all agents follow. It changes by compare-and-set
/// only. A generation without members stands for a job that waits for agents.
struct GenerationRecord {
  std::string job = {};  ///< One of several jobs that used the same run id, one after another.
  int64_t number = 0;    ///< From 1. It also goes on where a run id is used again.
  std::vector<Member> members = {};  ///< In the order of their ranks.
  std::string store_address = {};    ///< Empty until the first member has opened the store.
  uint16_t store_port = 0;
  int restarts = 0;                        ///< Used so far.
  std::vector<std::string> failures = {};  ///< A line for each one that a restart followed.
  /// After the end of a job also its last one. What is left there binds the next job, too.
  std::vector<EarlierGeneration> earlier = {};
  JobEnd end = {};

  bool ended() const { return end.kind != JobEnd::Kind::none; }
  /// No worker of a generation starts before its store is there.
  bool has_store() const { return store_port != 0; }
  int world_size() const;
  /// The place of an agent in `members`.
  std::optional<size_t> index_of(const std::string& agent) const;
  bool operator==(const GenerationRecord&) const = default;
};

/// JSON.
std::string encode(const AgentRecord& record);
std::string encode(const GenerationRecord& record);
/// Throw DataError for what is no such record.
AgentRecord decode_agent(const std::string& json);
GenerationRecord decode_generation(const std::string& json);

}  // namespace lockstep::elastic
