// main of the tests that mpirun starts: joins the job, runs the tests, ends MPI. Rank 0 reports all
// tests, the others what fails.
#include <optional>
#include <random>

#include "lockstep/base/env.h"
#include "tests/support/mpi_test_ranks.h"

namespace lockstep::mpi::test {
namespace {

std::optional<World> job;
uint64_t seed_of_job = 0;

uint64_t agreed_seed() {
  Store store = job->store();
  const auto given = env_string("LOCKSTEP_TEST_SEED");
  if (job->rank() == 0) store.set("seed", given.value_or(std::to_string(std::random_device()())));
  return std::stoull(store.get("seed"));
}

/// Says only what fails, and where.
class Failures : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::printf("rank %d: %s:%d: %s\n", job->rank(), result.file_name() ? result.file_name() : "",
                result.line_number(), result.message());
  }
};

}  // namespace

const World& world() {
  return *job;
}
uint64_t seed() {
  return seed_of_job;
}

int run(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  InitOptions options;
  options.backend = "mpi";
  options.timeout = std::chrono::seconds(60);
  job = init(options);
  seed_of_job = agreed_seed();
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (job->rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  } else {
    std::printf("%d ranks, LOCKSTEP_TEST_SEED=%llu\n", job->size(),
                static_cast<unsigned long long>(seed_of_job));
  }
  const int failed = RUN_ALL_TESTS();
  job.reset();
  return failed;
}

}  // namespace lockstep::mpi::test

int main(int argc, char** argv) {
  return lockstep::mpi::test::run(argc, argv);
}
