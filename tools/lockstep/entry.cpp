#include "entry.h"

#include <cstdio>
#include <exception>
#include <memory>

#include "lockstep/comm/store.h"

void* lockstep_cli_host_store(int listen_fd, char* error, size_t error_size) {
  try {
    return new std::shared_ptr<void>(
        lockstep::tcp_store({.is_listener = true, .listen_fd = listen_fd}).native());
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
    return nullptr;
  }
}

void lockstep_cli_release_store(void* store) {
  delete static_cast<std::shared_ptr<void>*>(store);
}
