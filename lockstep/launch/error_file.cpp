#include "lockstep/launch/error_file.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/variables.h"

namespace lockstep::launch {
namespace {

using nlohmann::json;

int64_t timestamp_of(const json& info) {
  const auto found = info.find("timestamp");
  if (found == info.end()) return 0;
  if (found->is_number()) return found->get<int64_t>();
  return found->is_string() ? parse_int(found->get<std::string>()).value_or(0) : 0;
}

json to_json(const Failure& failure) {
  json ranks = json::array();
  for (const auto& rank : failure.ranks)
    ranks.push_back(
        {{"rank", rank.number}, {"kind", name_of(rank.kind)}, {"process", rank.process}});
  json object = {{"kind", name_of(failure.kind)}, {"ranks", ranks}};
  if (failure.cause) object["cause"] = to_json(*failure.cause);
  return object;
}

/// Throws what nlohmann's json throws for an object of another form.
Failure from_json(const json& object) {
  const auto kind_of = [](const json& one) {
    const auto kind = failure_kind_named(one.at("kind").get<std::string>());
    return kind.value_or(Failure::Kind::unknown);
  };
  Failure failure{.kind = kind_of(object)};
  for (const auto& rank : object.at("ranks"))
    failure.ranks.push_back({.number = rank.at("rank").get<int>(),
                             .kind = kind_of(rank),
                             .process = rank.at("process").get<int>()});
  if (object.contains("cause"))
    failure.cause = std::make_shared<const Failure>(from_json(object["cause"]));
  return failure;
}

}  // namespace

bool ErrorReport::consequence() const {
  if (!failure || failure->timed_out()) return false;
  return failure->kind != Failure::Kind::unknown && failure->kind != Failure::Kind::mismatch;
}

void write_error_file(const std::exception& error) noexcept {
  const auto* between_ranks = dynamic_cast<const CommError*>(&error);
  write_error_file(error.what(), exit_code_of(error),
                   between_ranks ? &between_ranks->failure() : nullptr);
}

void write_error_file(const std::string& message, int exit_code, const Failure* failure) noexcept {
  try {
    const auto path = env_string(kErrorFileVariable);
    if (!path || std::filesystem::exists(*path)) return;
    json report = {{"message",
                    {{"message", message},
                     {"errorCode", exit_code},
                     {"extraInfo", {{"timestamp", std::to_string(std::time(nullptr))}}}}}};
    if (failure) report["message"]["failure"] = to_json(*failure);
    // Invalid UTF-8 in a message (a file's name, say) is replaced rather than thrown about.
    write_file_atomically(*path, report.dump(-1, ' ', false, json::error_handler_t::replace));
  } catch (...) {
    // The folder may be gone with the launcher; the worker's own exit code still tells.
  }
}

std::optional<ErrorReport> read_error_file(const std::filesystem::path& path) {
  try {
    const json root = json::parse(read_file(path));
    const json& message = root.at("message");
    ErrorReport report;
    if (message.is_string()) {
      report.message = message.get<std::string>();
      report.timestamp = timestamp_of(root);
    } else {
      report.message = message.at("message").get<std::string>();
      if (message.contains("failure")) report.failure = from_json(message["failure"]);
      report.timestamp = timestamp_of(message.value("extraInfo", json()));
    }
    if (report.message.empty()) return std::nullopt;
    return report;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool parent_reports_errors() {
  return env_string(kSpawnVariable).has_value();
}

std::string told_by(int rank, const std::string& message) {
  const std::string who = "rank " + std::to_string(rank);
  const bool says_so = message.starts_with(who + ":") || message.starts_with(who + " ");
  return says_so ? message : who + ": " + message;
}

}  // namespace lockstep::launch
