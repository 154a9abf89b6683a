#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/recovery/elastic_job.h"

namespace lockstep::detail {

struct NamedPart {
  std::string name;
  ElasticJob::Part part;
};

/// How far this rank's state is.
struct StateProgress {
  bool complete = false;  ///< Not that of a process that has just begun.
  int64_t commits = 0;
  bool begins = false;  ///< No rank had a state.
};

/// Gives all ranks the state of one that is furthest, where they differ. A rank's state changes
/// only once it has received all of it. Returns the progress, the same on all ranks. Collective.
/// Where no rank's state is complete all begin; unless they `may_begin` it throws Error. Throws
/// MismatchError where the parts have other names.
StateProgress share_state(const std::vector<NamedPart>& parts, const StateProgress& own,
                          const ProcessGroup& group, bool may_begin = false);

}  // namespace lockstep::detail
