// The subcommands that liblockstep_cli.so holds.
#include <algorithm>
#include <string>
#include <vector>

#include "commands.h"
#include "entry.h"
#include "lockstep/base/error.h"
#include "lockstep/tool/cli.h"
#include "train/model_and_data.h"

namespace lockstep::tool {
namespace {

struct Row {
  const char* name;
  Command command;
};

constexpr Row kCommands[] = {
    {"train", train_command},
    {"eval", eval_command},
    {"estimate-memory", estimate_memory_command},
    {"checkpoint", checkpoint_command},
    {"debug", debug_command},
    {"report", report_command},
    {"env", env_command},
};

}  // namespace
}  // namespace lockstep::tool

void lockstep_cli_offer_unpacked(const char* path, const void* content, size_t size) {
  lockstep::unpacked_files()[path] = {static_cast<const std::byte*>(content), size};
}

int lockstep_cli_main(int argc, char** argv) {
  using namespace lockstep::tool;
  const std::string name = argc > 1 ? argv[1] : "";
  const std::vector<std::string> args(argv + std::min(argc, 2), argv + argc);
  return run_guarded("lockstep " + name, [&] {
    for (const auto& row : kCommands) {
      if (name == row.name) return row.command(args);
    }
    throw lockstep::UsageError("unknown command '" + name + "'");
  });
}
