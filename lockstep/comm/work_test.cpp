// Waits of single operations.
#include "lockstep/comm/work.h"

#include <gtest/gtest.h>

#include <atomic>

#include "lockstep/base/error.h"
#include "tests/support/over_backends.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace work_test {

using std::chrono::milliseconds;
using test_wait::wait_until;

class Waits : public test::OverBackends {};

// Over Gloo a wait with a time-out of its own would break the connection.
TEST_P(Waits, AShortOneEndsNothingElse) {
  std::atomic<bool> waited{false};
  run_group(2, [&](ProcessGroup group) {
    at::Tensor tensor = at::zeros({4});
    if (group.rank() == 1) {
      wait_until([&] { return waited.load(); }, "rank 0 to have waited");
      return group.send(at::ones({4}), 0, 7);
    }
    const auto waits_in_vain = [](const Work& work) {
      try {
        work.wait(milliseconds(50));
        ADD_FAILURE() << "nobody has sent";
      } catch (const TimeoutError& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    Work work = group.irecv(tensor, 1, 7);
    const std::string text = waits_in_vain(work);
    if (GetParam() == "shm") {
      work = group.irecv(tensor, 1, 7);
    } else {
      EXPECT_NE(text, "");
      EXPECT_FALSE(work.is_completed());
      EXPECT_NE(waits_in_vain(work), "");
    }
    waited = true;
    work.wait();
    EXPECT_EQ(tensor[3].item<float>(), 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Waits, test::over_backends(), test::backend_name);

}  // namespace work_test
}  // namespace lockstep
