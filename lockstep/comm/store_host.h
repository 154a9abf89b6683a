#pragma once

#include <memory>

namespace lockstep {

/// Serves a TCP store on a bound and listening socket, as torchrun's agent does for its workers. It
/// runs in a thread of its own until the result is released. Takes the descriptor, also on failure.
/// Throws CommError.
std::shared_ptr<void> host_store(int listen_fd);

}  // namespace lockstep
