#include "entry.h"

#include <memory>

#include "lockstep/comm/store.h"

void* lockstep_cli_host_store(int listen_fd) {
  return new std::shared_ptr<void>(
      lockstep::tcp_store({.is_listener = true, .listen_fd = listen_fd}).native());
}

void lockstep_cli_release_store(void* store) {
  delete static_cast<std::shared_ptr<void>*>(store);
}
