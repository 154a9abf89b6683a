#include "lockstep/comm/backends/mpi/mpi.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/log.h"
#include "lockstep/comm/backends/mpi/mpi_backend.h"

namespace lockstep::mpi {
namespace {

/// All ranks of mpirun have started when MPI has.
constexpr std::chrono::seconds kBroadcastTimeout{120};

}  // namespace

BackendInfo info() {
  return {"mpi", true, {}, {}, kTraits};
}

MadeBackend make(const BackendOptions& options) {
  return {c10::make_intrusive<MpiBackend>(options), kTraits};
}

std::string version() {
  return Engine::version();
}

std::string broadcast_from_first(const std::string& text, int rank, int size) {
  const auto engine = Engine::get(rank, size);
  auto told = std::make_shared<std::string>(text);
  const auto task = [told] {
    int length = static_cast<int>(told->size());
    check(MPI_Bcast(&length, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
    told->resize(static_cast<size_t>(length));
    check(MPI_Bcast(told->data(), length, MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast");
  };
  engine->run(task, kBroadcastTimeout, "the ranks' first meeting over MPI");
  return *told;
}

void end(bool failing) noexcept {
  try {
    if (const auto engine = Engine::running()) engine->end(failing);
  } catch (const std::exception& error) {
    log_warning(std::string("ending MPI: ") + error.what());
  }
}

}  // namespace lockstep::mpi
