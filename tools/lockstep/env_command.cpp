#include <string>

#include "commands.h"
#include "env_report.h"
#include "lockstep/base/text.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

/// A value that has no names within it.
std::string text_of(const std::string& name, const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_integer() && name.ends_with("bytes")) return human_bytes(value);
  if (value.is_array()) {
    std::string all;
    for (const Json& one : value) all += (all.empty() ? "" : ", ") + text_of("", one);
    return all.empty() ? "none" : all;
  }
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  return text.empty() || value.is_null() ? "none" : text;
}

/// A line for each value, and below a line what is in it.
std::string lines_of(const Json& report, const std::string& indent) {
  std::string text;
  for (const auto& [name, value] : report.items()) {
    const std::string begin = indent + (report.is_array() ? "-" : name);
    const bool is_list = value.is_array() && !value.empty() && value[0].is_object();
    if (value.is_object() || is_list) {
      text += begin + "\n" + lines_of(value, indent + "  ");
    } else {
      text += begin + std::string(begin.size() < 24 ? 24 - begin.size() : 1, ' ') +
              text_of(name, value) + "\n";
    }
  }
  return text;
}

}  // namespace

int env_command(const std::vector<std::string>& args) {
  bool json = false;
  Cli cli("lockstep env",
          "Shows what this machine and this build offer: versions, backends, devices, network "
          "interfaces, the launcher's variables, and what is missing and how to get it.");
  cli.flag("--json", json, "One JSON object on standard output");
  cli.example("lockstep env", "Read it, or put it into a bug report");
  cli.example("lockstep env --json | jq .backends", "For a script");
  if (!cli.parse(args)) return 0;

  const Json report = environment_report();
  print(json ? report.dump(2) + "\n" : lines_of(report, ""));
  return 0;
}

}  // namespace lockstep::tool
