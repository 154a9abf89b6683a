#pragma once

#include <cstdint>

namespace lockstep {

/// While one lives, children that are forked do not keep this process's TCP sockets that are bound
/// or connected to `port`. For sockets that others own, as c10d's store does: such a child would
/// hide from the other ranks that this process has ended. In the child their numbers lead to
/// /dev/null, so that who owns them closes nothing else. Any thread may make one.
class UnforkedPort {
 public:
  explicit UnforkedPort(uint16_t port);
  ~UnforkedPort();
  UnforkedPort(const UnforkedPort&) = delete;
  UnforkedPort& operator=(const UnforkedPort&) = delete;

 private:
  const uint16_t port_;
};

}  // namespace lockstep
