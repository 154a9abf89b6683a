// Tensors that are not contiguous: shared memory takes them, Gloo refuses them before it sends.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/test_ranks.h"

namespace lockstep {
namespace {

using testing::run_ranks;

at::Tensor strided(int rank) {
  return (at::arange(12, at::kFloat).view({3, 4}) + 100 * rank).t();
}

TEST(Strided, SharedMemoryTakesThem) {
  run_ranks(3,
            [](ProcessGroup group) {
              at::Tensor tensor = strided(group.rank());
              group.all_reduce(tensor);
              EXPECT_TRUE(at::equal(tensor, strided(0) + strided(1) + strided(2)));
              EXPECT_FALSE(tensor.is_contiguous());
              tensor = strided(group.rank());
              Work work = group.broadcast_async(tensor, 2);
              work.wait();
              EXPECT_TRUE(at::equal(tensor, strided(2)));
              std::vector<at::Tensor> all(3);
              for (at::Tensor& one : all) one = at::empty({3, 4}).t();
              group.all_gather(all, strided(group.rank()));
              for (int rank = 0; rank < 3; ++rank)
                EXPECT_TRUE(at::equal(all[static_cast<size_t>(rank)], strided(rank)));
              tensor.zero_();
              if (group.rank() == 0) {
                group.send(strided(7), 1, 5);
                group.send(strided(8), 2);
              } else if (group.rank() == 1) {
                group.recv(tensor, 0, 5);
                EXPECT_TRUE(at::equal(tensor, strided(7)));
              } else {
                EXPECT_EQ(group.recv_any(tensor), 0);
                EXPECT_TRUE(at::equal(tensor, strided(8)));
              }
            },
            {.backend = "shm"});
}

TEST(Strided, GlooRefusesThem) {
  run_ranks(2, [](ProcessGroup group) {
    at::Tensor tensor = strided(group.rank());
    EXPECT_THROW(group.all_reduce(tensor), UsageError);
    EXPECT_THROW(group.send(tensor, 1 - group.rank()), UsageError);
    group.barrier();
  });
}

}  // namespace
}  // namespace lockstep
