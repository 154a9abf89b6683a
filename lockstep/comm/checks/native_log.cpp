#include "lockstep/comm/checks/native_log.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

namespace lockstep {
namespace {

// The level is LibTorch's global; these guard it.
std::mutex mutex;
int holders = 0;
int level_before = 0;

bool user_wants_log() {
  return std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr;
}

}  // namespace

QuietNativeLog::QuietNativeLog() {
  const std::lock_guard lock(mutex);
  if (holders++ > 0 || user_wants_log()) return;
  level_before = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = std::max<int>(level_before, c10::GLOG_FATAL);
}

QuietNativeLog::~QuietNativeLog() {
  const std::lock_guard lock(mutex);
  if (--holders == 0 && !user_wants_log()) FLAGS_caffe2_log_level = level_before;
}

}  // namespace lockstep
