#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/rpc/rpc.h"

namespace lockstep::rpc::test {

/// For tests: runs `body` in `count` processes of this program, the workers "w0", "w1" and so on. A
/// failed expectation in one fails the test. Nothing of the test may follow.
inline void run_workers(int count, const std::function<void(Agent& agent, int rank)>& body,
                        const Options& options = {}) {
  spawn(
      [&](int rank) {
        const World world = init(InitOptions{});
        Agent agent = rpc::init(world, "w" + std::to_string(rank), options);
        body(agent, rank);
        agent.shutdown();
        if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed");
      },
      count);
}

}  // namespace lockstep::rpc::test
