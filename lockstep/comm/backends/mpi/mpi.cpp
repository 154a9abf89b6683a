#include "lockstep/comm/backends/mpi/mpi.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/mpi/mpi_engine.h"

namespace lockstep::mpi {
namespace {

/// All ranks of mpirun have started when MPI has.
constexpr std::chrono::seconds kBroadcastTimeout{120};

void check_program_runs_mpi() {
  int running = 0, ended = 0;
  check(MPI_Initialized(&running), "MPI_Initialized");
  check(MPI_Finalized(&ended), "MPI_Finalized");
  if (running && !ended) return;
  throw UsageError(std::string("init: mpi_communicator is given, but MPI ") +
                       (ended ? "has ended" : "has not started") + " in this process",
                   "call MPI_Init_thread before init, and MPI_Finalize after the World has closed");
}

/// The calls that follow wait for all ranks without a time-out.
void wait_for_ranks(MPI_Comm communicator, int size, std::chrono::milliseconds timeout) {
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(communicator, &request), "MPI_Ibarrier");
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (PollPause pause;; pause.sleep()) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) return;
    if (std::chrono::steady_clock::now() < deadline) continue;
    throw TimeoutError("init: not all " + std::to_string(size) +
                           " ranks of mpi_communicator have come within " + seconds_text(timeout),
                       "all its ranks call init");
  }
}

void broadcast(MPI_Comm communicator, std::string& text) {
  int length = static_cast<int>(text.size());
  check(MPI_Bcast(&length, 1, MPI_INT, 0, communicator), "MPI_Bcast");
  text.resize(static_cast<size_t>(length));
  check(MPI_Bcast(text.data(), length, MPI_CHAR, 0, communicator), "MPI_Bcast");
}

/// Freeing waits for other ranks in some MPI. Where the program has ended its MPI it is an error.
void forget_given(bool frees) {
  MPI_Comm given = Engine::give(MPI_COMM_NULL);
  int ended = 0;
  if (frees && given != MPI_COMM_NULL && MPI_Finalized(&ended) == MPI_SUCCESS && !ended)
    MPI_Comm_free(&given);
}

}  // namespace

BackendInfo info() {
  return {"mpi", true, {}, {}, kTraits};
}

Place use(const MpiCommunicator& communicator, std::chrono::milliseconds timeout,
          bool for_backend) {
  check_program_runs_mpi();
  // Now, on all ranks alike: once they have met, who holds the store leaves before others know why.
  if (for_backend) expect_thread_multiple();
  const auto theirs = communicator.get<MPI_Comm>();
  Place place;
  check(MPI_Comm_size(theirs, &place.size), "MPI_Comm_size");
  wait_for_ranks(theirs, place.size, timeout);
  MPI_Comm own = MPI_COMM_NULL, host = MPI_COMM_NULL;
  check(MPI_Comm_dup(theirs, &own), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  forget_given(/*frees=*/true);
  Engine::give(own);
  check(MPI_Comm_rank(own, &place.rank), "MPI_Comm_rank");
  check(MPI_Comm_split_type(own, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host),
        "MPI_Comm_split_type");
  check(MPI_Comm_rank(host, &place.local_rank), "MPI_Comm_rank");
  check(MPI_Comm_size(host, &place.local_size), "MPI_Comm_size");
  check(MPI_Comm_free(&host), "MPI_Comm_free");
  return place;
}

std::string broadcast_from_first(const std::string& text, int rank, int size) {
  auto told = std::make_shared<std::string>(text);
  if (const MPI_Comm given = Engine::given(); given != MPI_COMM_NULL) {
    broadcast(given, *told);
    return *told;
  }
  const auto engine = Engine::get(rank, size);
  engine->run([told] { broadcast(MPI_COMM_WORLD, *told); }, kBroadcastTimeout,
              "the ranks' first meeting over MPI");
  return *told;
}

void end(bool failing) noexcept {
  try {
    if (const auto engine = Engine::running()) engine->end(failing);
    forget_given(/*frees=*/!failing);
  } catch (const std::exception& error) {
    log_warning(std::string("ending MPI: ") + error.what());
  }
}

}  // namespace lockstep::mpi
