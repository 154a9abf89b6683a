// A rank that is lost in the middle: an error in time, no hang.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace ddp_fault_test {

using ddp_test::fill;
using ddp_test::Net;
using ddp_test::values;

class DdpFault : public test::OverBackends {
 protected:
  static void train_until_rank_1_leaves(const DdpOptions& options);
};
INSTANTIATE_TEST_SUITE_P(All, DdpFault, test::over_backends(), test::backend_name);

void DdpFault::train_until_rank_1_leaves(const DdpOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  run_group(2, [&](ProcessGroup group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < 3; ++step) {
      zero_grad(net->parameters());
      ddp(values({4, 6}, 0)).sum().backward();
    }
    if (group.rank() == 1) return;
    group.set_timeout(std::chrono::milliseconds(500));
    zero_grad(net->parameters());
    EXPECT_THROW(ddp(values({4, 6}, 0)).sum().backward(), CommError);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_P(DdpFault, ALostRankEndsBackwardWithACommError) {
  train_until_rank_1_leaves({});
}

TEST_P(DdpFault, AlsoWithAHook) {
  DdpOptions options;
  options.comm_hook = CommHook::bf16_compress;
  train_until_rank_1_leaves(options);
  options.comm_hook = CommHook::fp16_compress;
  train_until_rank_1_leaves(options);
}

}  // namespace ddp_fault_test
}  // namespace lockstep
