// What liblockstep_cli.so offers: subcommands, and a store for `run`.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "entry.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/store.h"
#include "lockstep/tool/cli.h"
#include "train/make_train_task.h"

namespace lockstep::tool {
namespace {

constexpr std::pair<const char*, Command> kCommands[] = {
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

void lockstep_cli_host_store(int listen_fd, std::shared_ptr<void>& store) {
  store = lockstep::tcp_store({.is_listener = true, .listen_fd = listen_fd}).native();
}

int lockstep_cli_main(const std::vector<std::string>& words,
                      const lockstep::tool::UnpackedFiles& unpacked) {
  using namespace lockstep::tool;
  lockstep::unpacked_files() = unpacked;
  const std::string& name = words.front();
  return run_guarded("lockstep " + name, [&] {
    for (const auto& [known, command] : kCommands) {
      if (name == known) return command({words.begin() + 1, words.end()});
    }
    throw lockstep::UsageError("unknown command '" + name + "'");
  });
}
