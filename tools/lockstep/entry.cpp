#include "entry.h"

#include <cstdio>
#include <exception>
#include <memory>

#include "job_host.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/store_host.h"

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

void* lockstep_cli_join_job(const void* options, int* exit_code, char* error, size_t error_size) {
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

void lockstep_cli_leave_job(void* agent) {
  delete static_cast<lockstep::launch::HostAgent*>(agent);
}
