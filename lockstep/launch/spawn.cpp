#include "lockstep/launch/spawn.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/launch/spawn_ranks.h"

namespace lockstep {
namespace {

using launch::SpawnRole;

[[noreturn]] void run_worker(const std::function<void(int)>& worker) {
  int code = kExitSuccess;
  try {
    worker(static_cast<int>(
        env_int("LOCAL_RANK", 0).value_or(std::max(0, read_job_environment().local_rank))));
  } catch (const std::exception& error) {
    code = exit_code_of(error);
    launch::write_error_file(error);
    if (!launch::parent_reports_errors()) std::fprintf(stderr, "error: %s\n", error.what());
  }
  std::exit(code);
}

}  // namespace

bool spawn(int nprocs, const SpawnOptions& options) {
  return launch::spawn_ranks(nprocs, options, {}) != SpawnRole::worker;
}

void spawn(const std::function<void(int local_rank)>& worker, int nprocs,
           const SpawnOptions& options) {
  if (launch::spawn_ranks(nprocs, options, {}) == SpawnRole::worker) run_worker(worker);
}

}  // namespace lockstep
