#include "tools/lockstep/train/make_train_task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/comm/world.h"

namespace lockstep {
namespace make_train_task_test {

/// An operation whose result LibTorch does not promise: indices may come twice.
void put_twice() {
  at::zeros({3}).put_(at::zeros({2}, at::kLong), at::ones({2}));
}

TEST(MakeTrainTask, DeterministicRefusesOperationsThatAreNot) {
  const World world = init();
  RunConfig config;
  make_train_task(config, world);
  EXPECT_NO_THROW(put_twice());
  config.deterministic = true;
  make_train_task(config, world);
  EXPECT_THROW(put_twice(), c10::Error);
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
}

}  // namespace make_train_task_test
}  // namespace lockstep
