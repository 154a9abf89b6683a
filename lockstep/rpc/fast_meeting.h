#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/store.h"
#include "lockstep/rpc/fast_link.h"

namespace lockstep::rpc::detail {

/// Tells `value` under `key`. Gives what all ranks have told there, by rank. Blocks until they
/// have.
std::vector<std::string> exchange(Store& store, const std::string& key, int rank, int size,
                                  const std::string& value);

struct FastMeeting {
  int rank = 0;
  int size = 1;
  bool wanted = true;         ///< This rank wants a link at all.
  bool shared_memory = true;  ///< It would have one over shared memory.
  /// Over TCP: this host's address, on which it listens and at which the others reach it.
  std::string host = "127.0.0.1";
  bool has_processor = false;  ///< See SocketLink.
  std::string secret = {};     ///< Empty: none. With one, shared memory is not used.
  std::string job = {};        ///< Of this job alone, and known to its ranks.
};

/// The link between the ranks of a job. All ranks call it, and all get one or none: over shared
/// memory where all are of one host and want that, else over TCP. None when a rank does not want
/// it. Blocks until all have come. Throws CommError on all where one cannot have its part, and what
/// the store throws.
std::shared_ptr<FastLink> meet(Store store, const FastMeeting& meeting);

}  // namespace lockstep::rpc::detail
