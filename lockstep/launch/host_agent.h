#pragma once

#include <cstdint>
#include <string>

namespace lockstep::launch {

/// What the ranks of a host are in one generation of a job that several hosts share.
struct HostGeneration {
  int64_t number = 0;
  int restarts = 0;  ///< Of the job so far.
  int first_rank = 0;
  int world_size = 1;
  int node_rank = 0;
  int nodes = 1;
  std::string master_addr = {};
  uint16_t master_port = 0;
};

/// How the workers of a host came to their end, or how one did.
struct HostEnd {
  bool succeeded = false;
  int exit_code = 0;
  std::string text = {};  ///< "rank 3 (pid 4711) was killed by SIGKILL (signal 9)", and more lines.
  bool can_retry = true;  ///< False: a restart cannot help, see `launch`.
  bool consequence = false;  ///< They lost a peer: another failure is the cause.
  bool others_live = false;  ///< One has failed. The others wait for the next generation.
};

/// What a host's launcher is to do, as the hosts of its job have agreed.
struct HostOrder {
  enum class Kind {
    wait,         ///< No workers.
    run,          ///< The workers of `generation`, once. Those of an earlier one join it, or end.
    success,      ///< The job has ended, and so for the others below. No workers.
    failure,      ///< With `exit_code` and `text`: the root cause.
    interrupted,  ///< By the user, here or on another host.
    lost,         ///< It is not known how: `text` says why.
  };
  Kind kind = Kind::wait;
  HostGeneration generation = {};  ///< With `wait`: its number is that of the last one to run.
  int exit_code = 0;
  std::string text = {};
  /// With `wait`: workers that still run get the time to save a checkpoint.
  bool interrupted = false;
};

/// This host's part in a job of several hosts. No call blocks. One thread asks for the order; any
/// may call the rest.
class HostAgent {
 public:
  virtual ~HostAgent() = default;
  /// Readable when the order may have changed since `order` was asked.
  virtual int event_fd() const = 0;
  virtual HostOrder order() = 0;
  /// The workers of a generation have ended, and none is left; but see HostEnd::others_live.
  virtual void ended(int64_t generation, const HostEnd& end) = 0;
  /// The user wants this host to end its part.
  virtual void leave() = 0;
};

}  // namespace lockstep::launch
