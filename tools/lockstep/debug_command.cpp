// Compares the calls that ranks have noted in their flight recorders, or in PyTorch's.
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/tool/cli.h"
#include "tools/lockstep/commands.h"

namespace lockstep::tool {
namespace {

using Dict = c10::Dict<c10::IValue, c10::IValue>;

struct NotedCall {
  std::string text;
  std::string compared;  ///< Equal on ranks whose calls fit.
  bool ended = false;
};

/// What one rank called in one group.
struct Part {
  std::map<int64_t, NotedCall> collectives;  ///< By their numbers, the last ones.
  std::vector<std::string> messages;         ///< Those that have not ended.
};

struct TracedGroup {
  std::string name;
  RankNames ranks;
  std::map<int, Part> parts;  ///< By rank.
};
using TracedGroups = std::map<std::string, TracedGroup>;  ///< By name and ranks.

int64_t number_in(const Dict& entry, const char* key) {
  const auto found = entry.find(key);
  return found != entry.end() && found->value().isInt() ? found->value().toInt() : -1;
}

/// "Float [3, 4]"
std::string tensors_of(const Dict& entry, const std::string& side) {
  std::vector<std::string> parts;
  const auto dtypes = entry.at(side + "_dtypes").toListRef();
  const auto sizes = entry.at(side + "_sizes").toListRef();
  for (size_t i = 0; i < std::min(dtypes.size(), sizes.size()); ++i) {
    std::vector<std::string> dims;
    for (const auto& dim : sizes[i].toListRef()) dims.push_back(std::to_string(dim.toInt()));
    parts.push_back(dtypes[i].toStringRef() + " [" + join(dims, ", ") + "]");
  }
  return join(parts, ", ");
}

NotedCall noted_call(const Dict& entry) {
  const std::string titled = entry.at("profiling_name").toStringRef();  // "gloo:all_reduce"
  const std::string name = titled.substr(titled.find(':') + 1);
  const bool is_message = entry.at("is_p2p").toBool();
  std::vector<std::string> arguments;
  if (const int64_t reduction = number_in(entry, "reduction"); reduction >= 0)
    arguments.push_back(reduction_name(static_cast<int>(reduction)));
  if (const int64_t root = number_in(entry, "root"); root >= 0 && !is_message)
    arguments.push_back("root " + std::to_string(root));
  std::string text = name;
  if (!arguments.empty()) text += "(" + join(arguments, ", ") + ")";
  const std::string inputs = tensors_of(entry, "input"), outputs = tensors_of(entry, "output");
  // Of these each rank gives or gets something else.
  const bool same_inputs = name != "scatter" && name != "all_to_all";
  const bool same_outputs = name != "gather" && name != "all_to_all";
  NotedCall call;
  call.compared = text + (same_inputs ? inputs : "") + ">" + (same_outputs ? outputs : "");
  call.text = text + (inputs.empty() ? "" : " of " + inputs);
  if (outputs != inputs) call.text += " into " + outputs;
  call.ended = entry.at("state").toStringRef() == "completed";
  return call;
}

int rank_of(const std::string& path) {
  const size_t end = path.find_last_not_of("0123456789");
  const auto rank = parse_int(path.substr(end == std::string::npos ? 0 : end + 1));
  if (rank) return static_cast<int>(*rank);
  throw UsageError("'" + path + "' does not end in the number of a rank",
                   "give the files as they were written, such as comm_lib_trace_rank_0");
}

void add_file(TracedGroups& groups, const std::string& path) {
  const int rank = rank_of(path);
  const std::string bytes = read_file(path);
  try {
    const auto trace = torch::jit::unpickle(bytes.data(), bytes.size()).toGenericDict();
    std::map<std::string, TracedGroup*> by_name;
    for (const auto& row : trace.at("pg_config").toGenericDict()) {
      const std::string name = row.key().toStringRef();
      const std::string list = row.value().toGenericDict().at("ranks").toStringRef();
      TracedGroup& group = groups[name + list];
      group.name = name;
      group.ranks.clear();
      for (const auto& number : split(list.substr(1, list.size() - 2), ','))
        group.ranks.push_back(
            static_cast<int>(parse_int(number[0] == ' ' ? number.substr(1) : number).value()));
      group.parts[rank];
      by_name[name] = &group;
    }
    for (const auto& value : trace.at("entries").toListRef()) {
      const Dict entry = value.toGenericDict();
      const auto found =
          by_name.find(entry.at("process_group").toTupleRef().elements()[0].toStringRef());
      if (found == by_name.end()) continue;
      Part& part = found->second->parts[rank];
      NotedCall call = noted_call(entry);
      if (!entry.at("is_p2p").toBool()) {
        part.collectives[entry.at("collective_seq_id").toInt()] = std::move(call);
      } else if (!call.ended) {
        part.messages.push_back(call.text);
      }
    }
  } catch (const std::exception&) {
    throw DataError(path +
                    " is no file of a flight recorder: " + failure_text(std::current_exception()));
  }
}

const NotedCall* call_at(const Part& part, int64_t number) {
  const auto found = part.collectives.find(number);
  return found == part.collectives.end() ? nullptr : &found->second;
}

/// The first collective to which a rank did not come, or for which ranks called different things.
std::optional<std::string> first_difference(const TracedGroup& group, int64_t first, int64_t last) {
  for (int64_t number = first; number <= last; ++number) {
    std::map<std::string, std::vector<int>> callers;  // By what they called.
    std::string absent, calls;
    for (const auto& [rank, part] : group.parts) {
      if (const NotedCall* call = call_at(part, number)) {
        callers[call->compared].push_back(rank);
      } else if (part.collectives.empty()) {
        absent += "\n  rank " + std::to_string(rank) + " did not come: it has called none";
      } else if (const auto& its = *part.collectives.rbegin(); its.first < number) {
        absent += "\n  rank " + std::to_string(rank) + " did not come: its last was " +
                  std::to_string(its.first) + ", " + its.second.text +
                  (its.second.ended ? ", completed" : ", not completed");
      }
    }
    if (callers.size() < 2 && absent.empty()) continue;
    for (const auto& [compared, ranks] : callers)
      calls +=
          "\n  " + ranks_text(ranks) + " called " + call_at(group.parts.at(ranks[0]), number)->text;
    return "collective " + std::to_string(number) + ":" + calls + absent;
  }
  return std::nullopt;
}

std::string report_on(const TracedGroup& group) {
  std::string text = "group '" + group.name + "' of " + ranks_text(group.ranks) + ": ";
  std::vector<int> without_file, waiting;
  for (const int rank : group.ranks)
    if (!group.parts.contains(rank)) without_file.push_back(rank);
  int64_t first = 1, last = 0;
  for (const auto& [rank, part] : group.parts) {
    if (part.collectives.empty()) continue;
    first = std::max(first, part.collectives.begin()->first);
    last = std::max(last, part.collectives.rbegin()->first);
  }
  for (const auto& [rank, part] : group.parts)
    if (const NotedCall* call = call_at(part, last); call && !call->ended) waiting.push_back(rank);
  if (const auto difference = first_difference(group, first, last)) {
    text += *difference;
  } else {
    text += last == 0 ? "no collectives" : "the same collectives, " + std::to_string(last);
    if (!waiting.empty()) text += "\n  the last has not ended on " + ranks_text(waiting);
  }
  if (!without_file.empty()) text += "\n  no file of " + ranks_text(without_file);
  for (const auto& [rank, part] : group.parts)
    for (const auto& message : part.messages)
      text += "\n  rank " + std::to_string(rank) + " waits in " + message;
  return text + "\n";
}

}  // namespace

int debug_command(const std::vector<std::string>& args) {
  std::vector<std::string> files;
  Cli cli(
      "lockstep debug",
      "Tells from the files of flight recorders which rank was missing in which call, and where "
      "ranks called different things. Each rank writes its last calls when a job fails (a "
      "time-out, a lost or differing rank) or at the signal USR2, to "
      "~/.cache/torch/comm_lib_trace_rank_N or where TORCH_FR_DUMP_TEMP_FILE says. PyTorch's "
      "own files of this format can be read, too.");
  cli.example("lockstep debug ~/.cache/torch/comm_lib_trace_rank_*");
  cli.positional("FILES", files, "One file per rank, of one job");
  if (!cli.parse(args)) return 0;
  TracedGroups groups;
  for (const auto& file : files) add_file(groups, file);
  std::string text;
  for (const auto& [key, group] : groups) text += report_on(group);
  print(text);
  return 0;
}

}  // namespace lockstep::tool
