#include "lockstep/elastic/job_record.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep::elastic {
namespace {

using Json = nlohmann::json;

constexpr const char* kStates[] = {"none", "running", "done", "failed", "stopped"};
constexpr const char* kEnds[] = {"none", "success", "failure", "interrupted"};

/// A small record, but for what is at its default.
template <class T>
void put_unusual(Json& json, const char* name, const T& value, const T& usual = {}) {
  if (value != usual) json[name] = value;
}

template <class T>
T get_or(const Json& json, const char* name, T usual = {}) {
  const auto found = json.find(name);
  return found == json.end() ? usual : found->get<T>();
}

template <class Enum, size_t N>
Enum get_enum(const Json& json, const char* name, const char* const (&names)[N]) {
  const auto text = get_or<std::string>(json, name, names[0]);
  const auto found = std::find(std::begin(names), std::end(names), text);
  if (found == std::end(names)) throw DataError("unknown " + std::string(name) + " '" + text + "'");
  return static_cast<Enum>(found - std::begin(names));
}

Json json_of(const Report& report) {
  Json json = {{"generation", report.generation},
               {"state", kStates[static_cast<int>(report.state)]}};
  put_unusual(json, "exit_code", report.exit_code);
  put_unusual(json, "text", report.text);
  put_unusual(json, "can_retry", report.can_retry, true);
  put_unusual(json, "consequence", report.consequence);
  return json;
}

Report report_of(const Json& json) {
  Report report;
  report.generation = json.at("generation").get<int64_t>();
  report.state = get_enum<Report::State>(json, "state", kStates);
  report.exit_code = get_or<int>(json, "exit_code");
  report.text = get_or<std::string>(json, "text");
  report.can_retry = get_or<bool>(json, "can_retry", true);
  report.consequence = get_or<bool>(json, "consequence");
  return report;
}

Json json_of(const JobEnd& end) {
  Json json = {{"kind", kEnds[static_cast<int>(end.kind)]}};
  put_unusual(json, "exit_code", end.exit_code);
  put_unusual(json, "text", end.text);
  return json;
}

/// "ID NPROC LIFE". With many hosts this is the largest part, so it is short.
Json json_of(const std::vector<Member>& members) {
  Json json = Json::array();
  for (const auto& member : members)
    json.push_back(member.agent + " " + std::to_string(member.nproc) + " " +
                   std::to_string(member.life));
  return json;
}

std::vector<Member> members_of(const Json& json) {
  std::vector<Member> members;
  int rank = 0;
  for (const auto& entry : json) {
    const auto& text = entry.get_ref<const std::string&>();
    const auto parts = split(text, ' ');
    const auto number = [&](size_t part) {
      return part < parts.size() ? parse_int(parts[part]) : std::nullopt;
    };
    const auto nproc = number(1), life = number(2);
    if (!nproc || !life || *nproc < 1) throw DataError("no member: '" + text + "'");
    members.push_back({parts[0], static_cast<int>(*nproc), static_cast<int>(*life), rank});
    rank += members.back().nproc;
  }
  return members;
}

/// Text that a program printed may be no UTF-8.
std::string dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <class Read>
auto decoded(const char* what, const std::string& text, Read read) {
  try {
    return read(Json::parse(text));
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
  Json json = {{"host", record.host}, {"address", record.address}, {"nproc", record.nproc}};
  if (record.node_rank) json["node_rank"] = *record.node_rank;
  put_unusual(json, "hosts_registry", record.hosts_registry);
  put_unusual(json, "life", record.life);
  put_unusual(json, "joined", record.joined);
  put_unusual(json, "leaving", record.leaving);
  put_unusual(json, "probe", record.probe);
  if (record.report != Report{}) json["report"] = json_of(record.report);
  return dumped(json);
}

AgentRecord decode_agent(const std::string& text) {
  return decoded("an agent", text, [](const Json& json) {
    AgentRecord record;
    record.host = json.at("host").get<std::string>();
    record.address = json.at("address").get<std::string>();
    record.nproc = json.at("nproc").get<int>();
    if (json.contains("node_rank")) record.node_rank = json["node_rank"].get<int>();
    record.hosts_registry = get_or<bool>(json, "hosts_registry");
    record.life = get_or<int>(json, "life");
    record.joined = get_or<int64_t>(json, "joined");
    record.leaving = get_or<bool>(json, "leaving");
    record.probe = get_or<int64_t>(json, "probe");
    if (json.contains("report")) record.report = report_of(json["report"]);
    return record;
  });
}

std::string encode(const GenerationRecord& record) {
  Json json = {
      {"job", record.job}, {"number", record.number}, {"members", json_of(record.members)}};
  put_unusual(json, "store_address", record.store_address);
  put_unusual(json, "store_port", record.store_port);
  put_unusual(json, "restarts", record.restarts);
  put_unusual(json, "failures", record.failures);
  for (const auto& earlier : record.earlier)
    json["earlier"].push_back({{"number", earlier.number}, {"agents", earlier.agents}});
  if (record.ended()) json["end"] = json_of(record.end);
  return dumped(json);
}

GenerationRecord decode_generation(const std::string& text) {
  return decoded("the generation", text, [](const Json& json) {
    GenerationRecord record;
    record.job = json.at("job").get<std::string>();
    record.number = json.at("number").get<int64_t>();
    record.members = members_of(json.at("members"));
    record.store_address = get_or<std::string>(json, "store_address");
    record.store_port = get_or<uint16_t>(json, "store_port");
    record.restarts = get_or<int>(json, "restarts");
    record.failures = get_or<std::vector<std::string>>(json, "failures");
    for (const auto& entry : get_or<Json>(json, "earlier", Json::array()))
      record.earlier.push_back(
          {entry.at("number").get<int64_t>(), entry.at("agents").get<std::vector<std::string>>()});
    if (!json.contains("end")) return record;
    const auto& end = json["end"];
    record.end = {get_enum<JobEnd::Kind>(end, "kind", kEnds), get_or<int>(end, "exit_code"),
                  get_or<std::string>(end, "text")};
    return record;
  });
}

}  // namespace lockstep::elastic
