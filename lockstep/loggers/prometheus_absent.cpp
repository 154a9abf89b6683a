#include "lockstep/base/error.h"
#include "lockstep/loggers/logger.h"

namespace lockstep {

std::shared_ptr<Logger> prometheus_logger(PrometheusOptions options) {
  throw UsageError("this build has no logger prometheus: prometheus-cpp was not found",
                   "install prometheus-cpp-dev and build again");
}

}  // namespace lockstep
