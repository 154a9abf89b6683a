#pragma once

// For the tests that mpirun starts: this process is one rank, and all ranks run the same tests in
// the same order.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/mpi/mpi_engine.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/comm/world.h"
#include "tests/support/run_backends.h"
#include "tests/support/whole_numbers.h"

namespace lockstep::mpi::test {

using lockstep::test::expect_same;
using lockstep::test::whole_numbers;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// Larger operations are cut into pieces of so many elements.
inline constexpr int64_t kPiece = int64_t{1} << 20;

/// The job, from the start of main to its end.
const World& world();
/// The same on all ranks; LOCKSTEP_TEST_SEED repeats a run.
uint64_t seed();

/// A part of the job's store that no other caller of the same name uses.
inline c10::intrusive_ptr<c10d::Store> store_for(const std::string& name) {
  return native_store(prefix_store(name, world().store()));
}

/// What `make` gets for a group of these ranks of the job, of which this one is one.
inline BackendOptions options_of(const std::string& name, std::vector<int> ranks,
                                 std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  BackendOptions options;
  options.store = store_for(name);
  options.group_name = name;
  options.size = static_cast<int>(ranks.size());
  options.rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), world().rank()) - ranks.begin());
  options.timeout = timeout;
  options.global_ranks = std::move(ranks);
  return options;
}

inline std::vector<int> everyone() {
  std::vector<int> ranks(static_cast<size_t>(world().size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

inline BackendPtr make_group(const std::string& name, std::vector<int> ranks) {
  return make(options_of(name, std::move(ranks))).backend;
}

/// A group of all ranks, without our checks.
class Ranks : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    mpi = make_group(test->name(), everyone());
    SCOPED_TRACE("LOCKSTEP_TEST_SEED=" + std::to_string(seed()));
  }
  void TearDown() override {
    mpi->barrier({})->wait();
    mpi->shutdown();
  }
  static int rank() { return world().rank(); }
  static int size() { return world().size(); }

  BackendPtr mpi;
};

inline void all_reduce(c10d::Backend& backend, const at::Tensor& tensor,
                       c10d::ReduceOp op = Op::SUM) {
  Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  backend.allreduce(tensors, options)->wait();
}

}  // namespace lockstep::mpi::test
