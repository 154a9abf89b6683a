#include "run.h"

#include "lockstep/base/error.h"

namespace lockstep::tool {

int run_command(const std::vector<std::string>&) {
  throw UsageError("not yet");
}

}  // namespace lockstep::tool
