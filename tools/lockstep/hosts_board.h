#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/launch/launcher.h"

namespace lockstep::tool {

/// The hosts of one job, and where its store is.
struct HostsMeeting {
  std::string address;
  uint16_t port = 0;
  int host = 0;  ///< This one; the first holds the store.
  int hosts = 1;
};

/// What the launchers of a job's hosts tell each other, by keys of the job's store: that one has
/// started, that it has ended, and the first failure. A thread of its own makes the requests, so a
/// store that does not answer holds up nobody. It waits for a store that is not there yet, and
/// comes again to one that has gone, as long as it is of the same job.
std::unique_ptr<launch::OtherHosts> make_hosts_board(const HostsMeeting& meeting);

}  // namespace lockstep::tool
