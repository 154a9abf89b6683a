// communicator_rank LEVEL BACKEND...: Worlds of communicators that this program makes itself: the
// even and the odd ranks of mpirun, in descending order. LEVEL: funneled or multiple. Prints "ok"
// where all is as it should be.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <mpi.h>

#include <cstdio>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"

namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("wrong: %s\n", what.c_str());
}

template <class Call>
void expect_refused(const std::string& what, Call call) {
  try {
    call();
    expect(false, what + " is not refused");
  } catch (const lockstep::UsageError&) {
  }
}

/// Two Worlds, one after the other, each of the communicator's ranks.
void check_worlds(MPI_Comm comm, int number, const std::string& backend) {
  int rank = 0, size = 0, sum = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Allreduce(&number, &sum, 1, MPI_INT, MPI_SUM, comm);
  for (int turn = 0; turn < 2; ++turn) {
    auto world = lockstep::init({.backend = backend, .mpi_communicator = comm});
    expect(world.rank() == rank && world.size() == size, backend + ": rank or size");
    expect(world.local_rank() == rank && world.local_size() == size, backend + ": on the host");
    expect(world.launcher() == "mpi", "launcher " + world.launcher());
    auto tensor = at::full({3}, static_cast<double>(number));
    world.group().all_reduce(tensor);
    expect(tensor[2].item<int>() == sum, backend + ": sum");
  }
}

}  // namespace

int main(int argc, char** argv) {
  expect_refused("a communicator before MPI has started",
                 [] { lockstep::init({.mpi_communicator = MPI_COMM_WORLD}); });
  const bool multiple = argc > 1 && std::string(argv[1]) == "multiple";
  int level = 0, number = 0, finalized = 0;
  MPI_Init_thread(&argc, &argv, multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &number);
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, number % 2, -number, &comm);
  for (int i = 2; i < argc; ++i) check_worlds(comm, number, argv[i]);
  if (!multiple)
    expect_refused("backend mpi without MPI_THREAD_MULTIPLE",
                   [&] { lockstep::init({.backend = "mpi", .mpi_communicator = comm}); });
  expect_refused("a rank beside a communicator",
                 [&] { lockstep::init({.rank = 0, .mpi_communicator = comm}); });
  MPI_Finalized(&finalized);
  expect(!finalized, "MPI has ended with the World");
  MPI_Comm_free(&comm);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  std::puts(failures ? "failed" : "ok");
  return failures ? 1 : 0;
}
