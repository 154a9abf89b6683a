#pragma once

// Calls a step on this rank, and compares what comes of it with the oracle.

#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "tests/fuzz/program.h"

namespace lockstep::fuzz {

/// The fuzz has found something: wrong values, or no error where one was promised.
class Finding : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Group {
  std::vector<int> members;  ///< Ranks of the default group.
  Carrier carrier = Carrier::shm;
  ProcessGroup handle;  ///< Null on a rank that is not a member.

  int size() const { return static_cast<int>(members.size()); }
  /// The rank of the group that is this rank of the default group; -1: none.
  int rank_of(int global) const;
};
/// Calls what makes the plan's groups, all ranks together.
std::vector<Group> form(const Job& job, const World& world, const GroupPlan& plan);

/// A step in one of the groups. `deviant`: the rank of the group whose call differs from `step` as
/// `others` says; -1: none does.
struct Call {
  const World& world;
  const Job& job;
  const Group& group;
  Step step;
  Step others;
  int deviant = -1;

  int rank() const { return group.handle.rank(); }
  const Step& mine() const { return rank() == deviant ? others : step; }
};

/// A call under way. `wait` throws what the call failed of. `check`, after a `wait` that returned,
/// throws a Finding where results are not the oracle's, or what was not to be touched has changed.
class Running {
 public:
  virtual ~Running() = default;
  virtual void wait() = 0;
  virtual void check() = 0;
};
std::unique_ptr<Running> start(const Call& call);

/// Whether a text of the library, such as "ranks 0, 2 and 3 called ...", names the rank.
bool names_rank(const std::string& text, int rank);

}  // namespace lockstep::fuzz
