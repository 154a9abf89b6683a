#include "entry.h"

#include <cstdio>
#include <exception>
#include <memory>

#include "hosts_board.h"
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
