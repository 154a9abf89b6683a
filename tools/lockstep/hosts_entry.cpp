#include <cstdio>
#include <exception>

#include "entry.h"
#include "job_host.h"
#include "lockstep/base/error.h"

void* lockstep_hosts_join(const void* options, int* exit_code, char* error, size_t error_size) {
  try {
    return lockstep::tool::join_job_of_hosts(
               *static_cast<const lockstep::tool::RunOptions*>(options))
        .release();
  } catch (const std::exception& failure) {
    *exit_code = lockstep::exit_code_of(failure);
    std::snprintf(error, error_size, "%s", failure.what());
    return nullptr;
  }
}

void lockstep_hosts_leave(void* agent) {
  delete static_cast<lockstep::launch::HostAgent*>(agent);
}
