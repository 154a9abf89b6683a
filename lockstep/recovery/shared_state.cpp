#include "lockstep/recovery/shared_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_objects.h"

namespace lockstep::detail {
namespace {

using nlohmann::json;

void expect_same_parts(const std::vector<json>& ranks) {
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    if (ranks[rank].at("parts") == ranks[0].at("parts")) continue;
    throw MismatchError("ElasticJob: rank 0 has the parts " + ranks[0].at("parts").dump() +
                            ", but rank " + std::to_string(rank) + " has " +
                            ranks[rank].at("parts").dump(),
                        "add the same parts on all ranks, in the same order");
  }
}

}  // namespace

StateProgress share_state(const std::vector<NamedPart>& parts, const StateProgress& own,
                          const ProcessGroup& group, bool may_begin) {
  json names = json::array();
  for (const auto& named : parts) names.push_back(named.name);
  const auto ranks = group.all_gather_object(
      {{"complete", own.complete}, {"commits", own.commits}, {"parts", names}});
  expect_same_parts(ranks);
  int source = -1;
  int64_t most = -1;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto commits = ranks[rank].at("commits").get<int64_t>();
    if (!ranks[rank].at("complete").get<bool>() || commits <= most) continue;
    most = commits;
    source = static_cast<int>(rank);
  }
  if (source < 0 && may_begin) return {.complete = true, .commits = 0, .begins = true};
  if (source < 0)
    throw Error("ElasticJob: no rank has the state: those that had it have ended",
                "with max_restarts all ranks start again; save snapshots to go on from");
  const StateProgress furthest{.complete = true, .commits = most};
  const bool all_alike = std::all_of(ranks.begin(), ranks.end(), [&](const json& rank) {
    return rank.at("complete").get<bool>() && rank.at("commits").get<int64_t>() == most;
  });
  if (all_alike) return furthest;
  std::vector<StateDict> received;
  for (const auto& named : parts) {
    const StateDict own_part = group.rank() == source ? named.part.get() : StateDict();
    received.push_back(broadcast_state(group, own_part, source));
  }
  const bool needs_it = !own.complete || own.commits != most;
  for (size_t i = 0; needs_it && i < parts.size(); ++i) parts[i].part.set(received[i]);
  return furthest;
}

}  // namespace lockstep::detail
