#pragma once

namespace lockstep {

/// While one lives, LibTorch's own log is silent. Its store and Gloo log each time-out and lost
/// connection, with C++ stacks. The exception that follows says the same, and ours says it better.
/// For calls whose exceptions are caught. TORCH_CPP_LOG_LEVEL in the environment keeps the log. Any
/// thread. Other threads' messages are lost meanwhile.
class QuietNativeLog {
 public:
  QuietNativeLog();
  ~QuietNativeLog();
  QuietNativeLog(const QuietNativeLog&) = delete;
  QuietNativeLog& operator=(const QuietNativeLog&) = delete;
};

}  // namespace lockstep
