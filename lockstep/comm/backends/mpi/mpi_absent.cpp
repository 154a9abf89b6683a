#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/mpi/mpi.h"

namespace lockstep::mpi {
namespace {

constexpr const char* kReason = "no MPI was found when Lockstep was configured";
constexpr const char* kRemedy =
    "install libopenmpi-dev and openmpi-bin and configure anew, or use --backend gloo";

[[noreturn]] void throw_absent() {
  throw UsageError(std::string("backend 'mpi' cannot be used: ") + kReason, kRemedy);
}

}  // namespace

BackendInfo info() {
  return {"mpi", false, kReason, kRemedy, kTraits};
}

MadeBackend make(const BackendOptions&) {
  throw_absent();
}

std::string version() {
  return {};
}

Place use(const MpiCommunicator&, std::chrono::milliseconds, bool) {
  throw_absent();
}

std::string broadcast_from_first(const std::string&, int, int) {
  throw_absent();
}

void end(bool) noexcept {}

}  // namespace lockstep::mpi
