#include "entry.h"

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "hosts_board.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/store_host.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

struct Row {
  const char* name;
  Command command;
};

constexpr Row kCommands[] = {
    {"train", train_command}, {"eval", eval_command},
    {"bench", bench_command}, {"estimate-memory", estimate_memory_command},
    {"env", env_command},
};

}  // namespace
}  // namespace lockstep::tool

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

void* lockstep_cli_host_store(int listen_fd, char* error, size_t error_size) {
  try {
    return new std::shared_ptr<void>(lockstep::host_store(listen_fd));
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return nullptr;
  }
}

void lockstep_cli_release_store(void* store) {
  delete static_cast<std::shared_ptr<void>*>(store);
}

void* lockstep_cli_join_hosts(const char* address, uint16_t port, int host, int hosts, char* error,
                              size_t error_size) {
  try {
    return lockstep::tool::make_hosts_board({address, port, host, hosts}).release();
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return nullptr;
  }
}

void lockstep_cli_leave_hosts(void* hosts) {
  delete static_cast<lockstep::launch::OtherHosts*>(hosts);
}
