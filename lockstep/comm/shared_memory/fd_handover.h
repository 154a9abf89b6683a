#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep::shm {

/// Gives `fd` to the other ranks of a group of `size`, from rank 0. It listens on a Unix socket in
/// the abstract name space (no file, gone with the process), tells its name, and serves each rank
/// once. `served` is told which process (process_identity) a rank is before it has the descriptor.
/// Processes of other users are refused. Nobody is held up by one that connects and says nothing.
/// Blocks until all have it. `look` is called some fifty times a second with the ranks that are
/// still to come, and may throw. Throws TimeoutError naming those, SystemError.
void hand_out(int fd, int size, std::chrono::milliseconds timeout, const std::string& group,
              const std::function<void(const std::string& name)>& tell,
              const std::function<void(int rank, const std::string& identity)>& served,
              const std::function<void(const std::vector<int>& missing)>& look = {});

/// The other side. It also sends the identity of this process. Throws UsageError when rank 0 runs
/// as another user, PeerLostError when it has ended or cannot be reached (another host or network
/// namespace), CommError when it refuses this rank, SystemError, TimeoutError.
UniqueFd receive(const std::string& name, int rank, std::chrono::milliseconds timeout,
                 const std::string& group);

}  // namespace lockstep::shm
