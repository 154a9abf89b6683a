#include "lockstep/train/threads.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "lockstep/launch/omp_waiting.h"
#include "lockstep/launch/variables.h"
#include "lockstep/models/models.h"

namespace lockstep {
namespace threads_test {

TEST(ThreadsOfAModel, LittleWorkIsNotHandedOut) {
  const auto mlp = make_model("mlp"), wide = make_model("wide"), convnet = make_model("convnet");
  EXPECT_EQ(threads_worth_using(8, *mlp, 32), 1);
  EXPECT_EQ(threads_worth_using(8, *mlp, 128), 2);
  EXPECT_EQ(threads_worth_using(1, *mlp, 128), 1);
  EXPECT_EQ(threads_worth_using(8, *wide, 32), 8);
  EXPECT_EQ(threads_worth_using(8, *convnet, 1), 8);
  EXPECT_EQ(threads_worth_using(8, *make_model("linear"), 32), 1);
}

/// In a thread of its own, whose number of threads is not the others'.
template <typename Body>
void elsewhere(const Body& body) {
  std::thread([&] { body(); }).join();
}

TEST(ThreadsOfAModel, AreSetUnlessTheUserHasChosen) {
  const auto mlp = make_model("mlp");
  ::unsetenv("OMP_NUM_THREADS");
  elsewhere([&] {
    at::set_num_threads(2);
    EXPECT_EQ(set_num_threads_for(*mlp, 32), 1);
    EXPECT_EQ(at::get_num_threads(), 1);
  });
  ::setenv("OMP_NUM_THREADS", "2", 1);
  elsewhere([&] {
    at::set_num_threads(2);
    EXPECT_EQ(set_num_threads_for(*mlp, 32), 2);
    ::setenv(launch::kThreadsByLauncherVariable, "1", 1);
    EXPECT_EQ(set_num_threads_for(*mlp, 32), 1);
  });
  ::unsetenv(launch::kThreadsByLauncherVariable);
  ::unsetenv("OMP_NUM_THREADS");
}

/// Where a few threads of others run, a program of two threads spends its time on waiting for one
/// that does not run: OpenMP's own way takes many times as long as a single thread does.
TEST(ThreadsOfAModel, SleepSoonerOnABusyMachine) {
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) ::unsetenv(name);
  std::atomic<bool> over{false};
  std::vector<std::thread> others;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i)
    others.emplace_back([&] {
      while (!over) {
      }
    });
  bool shortened = false;  // The others take a moment to be seen.
  for (auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
       !shortened && std::chrono::steady_clock::now() < end;)
    shortened = launch::shorten_omp_waiting();
  over = true;
  for (auto& other : others) other.join();
  EXPECT_TRUE(shortened);
  EXPECT_TRUE(launch::shorten_omp_waiting());  // Once.
}

}  // namespace threads_test
}  // namespace lockstep
