#include "lockstep/elastic/job_record.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"

template <>
struct nlohmann::adl_serializer<std::optional<int>> {
  static void to_json(json& to, const std::optional<int>& from) {
    to = from ? json(*from) : json();
  }
  static void from_json(const json& from, std::optional<int>& to) {
    if (!from.is_null()) to = from.get<int>();
  }
};

namespace lockstep::elastic {

using Json = nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Report, generation, state, exit_code, text, can_retry,
                                   consequence)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AgentRecord, nproc, node_rank, hosts_registry, life, joined,
                                   leaving, probe, report)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EarlierGeneration, number, agents)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JobEnd, kind, exit_code, text)

/// [ID, NPROC, LIFE]. With many hosts this is the largest part, so it is short.
inline void to_json(Json& json, const Member& member) {
  json = {member.agent, member.nproc, member.life};
}

inline void from_json(const Json& json, Member& member) {
  member = {json.at(0), json.at(1), json.at(2)};
  if (member.nproc < 1) throw DataError("no member: " + json.dump());
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GenerationRecord, job, number, members, store_address,
                                   store_port, restarts, failures, earlier, end)

namespace {

/// Text that a program printed may be no UTF-8.
std::string dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <class Record>
Record decoded(const char* what, const std::string& text) {
  try {
    return Json::parse(text).get<Record>();
  } catch (const std::exception& error) {
    throw DataError("the registry holds something else in the place of " + std::string(what) +
                    ": " + error.what());
  }
}

}  // namespace

int GenerationRecord::world_size() const {
  return members.empty() ? 0 : members.back().first_rank + members.back().nproc;
}

std::optional<size_t> GenerationRecord::index_of(const std::string& agent) const {
  const auto found = std::find_if(members.begin(), members.end(),
                                  [&](const auto& member) { return member.agent == agent; });
  if (found == members.end()) return std::nullopt;
  return static_cast<size_t>(found - members.begin());
}

std::string encode(const AgentRecord& record) {
  return dumped(record);
}

AgentRecord decode_agent(const std::string& text) {
  return decoded<AgentRecord>("an agent", text);
}

std::string encode(const GenerationRecord& record) {
  return dumped(record);
}

GenerationRecord decode_generation(const std::string& text) {
  auto record = decoded<GenerationRecord>("the generation", text);
  int rank = 0;
  for (auto& member : record.members) {
    member.first_rank = rank;
    rank += member.nproc;
  }
  return record;
}

}  // namespace lockstep::elastic
