// What liblockstep_cli.so offers: subcommands, and a store for `run`.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "entry.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/store.h"
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

void* lockstep_cli_host_store(int listen_fd) {
  return new std::shared_ptr<void>(
      lockstep::tcp_store({.is_listener = true, .listen_fd = listen_fd}).native());
}

void lockstep_cli_release_store(void* store) {
  delete static_cast<std::shared_ptr<void>*>(store);
}

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
