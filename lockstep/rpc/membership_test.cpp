// Workers that die, and workers that come later.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/joined_worker.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc {
namespace membership_test {

using namespace std::chrono_literals;
using test::run_workers;
using test_wait::wait_until;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Held {
  Held() { ++living; }
  ~Held() { --living; }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  int get() const { return 7; }
  static inline std::atomic<int> living = 0;
};
const auto make_held = function("member.make_held", [] { return std::make_shared<Held>(); });
const auto get_held = method("member.get_held", &Held::get);
const auto living = function("member.living", [] { return Held::living.load(); });
const auto end_here = function("member.end_here", [] { ::_exit(0); });
const auto twice = function("member.twice", [](int number) { return 2 * number; });

std::atomic<int> arrived = 0;
std::atomic<bool> over = false;
// They call the worker that came, by its name.
const auto came = function("member.came", [](const std::string& name) {
  if (call(name, twice, 21) == 42) ++arrived;
});
const auto end_wait = function("member.end_wait", [] { over = true; });

std::vector<RRef<Held>> kept;
const auto keep = function("member.keep", [](const RRef<Held>& held) {
  kept.push_back(held);
  return held.rpc_sync(get_held);
});
// Makes one on the worker and keeps the reference.
const auto make_there = function("member.make_there", [](const std::string& worker) {
  kept.push_back(remote(worker, make_held));
  return kept.back().rpc_sync(get_held);
});
const auto forward_to =
    function("member.forward_to",
             [](const std::string& to, const RRef<Held>& held) { return call(to, keep, held); });

const auto forward_once =
    function("member.forward_once", [](const std::string& to) { return call(to, twice, 4); });

/// LOCKSTEP_FUZZ_SEED repeats a run. All processes of a test have the seed of the first.
uint64_t fuzz_seed() {
  if (!env_string("LOCKSTEP_FUZZ_SEED")) {
    ::setenv("LOCKSTEP_FUZZ_SEED", std::to_string(std::random_device{}()).c_str(), 1);
  }
  const std::string seed = env_string("LOCKSTEP_FUZZ_SEED").value();
  std::printf("LOCKSTEP_FUZZ_SEED=%s\n", seed.c_str());
  std::fflush(stdout);
  return std::stoull(seed);
}

TEST(RpcMembership, WhatADeadWorkerHeldIsFreed) {
  run_workers(3,
              [](Agent& agent, int rank) {
                if (rank == 0) {
                  // Of w2: one that it made here, one that it was given, one by way of w1.
                  EXPECT_EQ(call("w2", make_there, "w0"), 7);
                  EXPECT_EQ(call("w2", keep, RRef<Held>::own(std::make_shared<Held>())), 7);
                  EXPECT_EQ(call("w1", forward_to, "w2", RRef<Held>::own(std::make_shared<Held>())),
                            7);
                  const auto ours = RRef<Held>::own(std::make_shared<Held>());
                  EXPECT_EQ(call("w1", keep, ours), 7);
                  EXPECT_EQ(Held::living, 4);
                  EXPECT_THROW(call("w2", end_here), PeerLostError);
                  wait_until([] { return Held::living == 1; }, "what w2 held to be freed");
                  EXPECT_EQ(ours.local_value().get(), 7);
                }
                if (rank < 2) {
                  wait_until([&] { return !agent.lost_workers().empty(); }, "the loss to be seen");
                }
              },
              {.timeout = 600s});
}

TEST(RpcMembership, DISABLED_AWorkerThatComesLater) {
  if (test::joining_name() == "w0") {
    EXPECT_THROW(test::join_group(), UsageError);
    return;
  }
  Agent agent = test::join_group();
  EXPECT_EQ(call("w0", twice, 4), 8);
  call("w0", came, agent.name());
  agent.shutdown();
}

TEST(RpcMembership, WorkersComeAndGoAndTakeADeadOnesName) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank == 0) {
      EXPECT_THROW(call("w2", end_here), PeerLostError);
      wait_until([&] { return !agent.lost_workers().empty(); }, "the loss to be seen");
      // In the dead one's place, then a further one, then one whose name a living worker has.
      for (const char* name : {"w2", "extra", "w0"}) {
        test::expect_success(test::start_joining(agent.address(), name,
                                                 "RpcMembership.DISABLED_AWorkerThatComesLater"));
      }
      EXPECT_EQ(arrived.load(), 2);
      EXPECT_THROW(call("extra", twice, 1), PeerLostError);
      call("w1", end_wait);
    } else if (rank == 1) {
      wait_until([] { return over.load(); }, "the other worker");
    }
  });
}

const auto scaled = function("member.scaled", [](const at::Tensor& x) { return 2 * x; });
int64_t contexts_here() {
  const auto& all = torch::distributed::autograd::DistAutogradContainer::getInstance();
  return static_cast<int64_t>(all.numAutogradContexts());
}
const auto count_contexts = function("member.count_contexts", contexts_here);
/// Objects, references and autograd contexts that are still there.
const auto count_left = function("member.count_left", [] {
  using torch::distributed::rpc::RRefContext;
  const auto info = RRefContext::getInstance().getDebugInfo();
  return std::vector<int64_t>{Held::living, std::stoll(info.at("num_owner_rrefs")),
                              std::stoll(info.at("num_pending_users")),
                              std::stoll(info.at("num_forks")), contexts_here()};
});

const auto scaled_by = function("member.scaled_by", [](const std::string& to, const at::Tensor& x) {
  return call(to, scaled, x);
});
// Ends with its context open, which it has used here and, by way of this worker, on another one.
const auto die_in_context =
    function("member.die_in_context", [](const std::string& worker, const std::string& next) {
      const AutogradContext context;
      const at::Tensor x = at::ones({4}).requires_grad_();
      const at::Tensor sum = call(worker, scaled_by, next, x) + call(next, scaled, x);
      EXPECT_EQ(call(worker, count_contexts), 1);
      EXPECT_EQ(call(next, count_contexts), 1);
      ::_exit(sum.requires_grad() ? 0 : 1);
    });

TEST(RpcMembership, TheContextsOfADeadWorkerAreFreed) {
  run_workers(3,
              [](Agent& agent, int rank) {
                if (rank == 2) return;  // It ends in a call.
                if (rank == 0) {
                  EXPECT_THROW(call("w2", die_in_context, "w0", "w1"), PeerLostError);
                }
                wait_until([&] { return !agent.lost_workers().empty(); }, "the loss to be seen");
                wait_until([] { return contexts_here() == 0; }, "its context to be freed");
                // Others' contexts stay.
                AutogradContext context;
                const at::Tensor x = at::ones({4}).requires_grad_();
                context.backward({call(rank == 0 ? "w1" : "w0", scaled, x).sum()});
                EXPECT_EQ(context.gradients().size(), 1);
              },
              {.timeout = 600s});
}

TEST(RpcLeaks, NothingIsLeftOfManyCalls) {
  run_workers(2, [](Agent&, int rank) {
    if (rank != 0) return;
    const at::Tensor x = at::ones({4}).requires_grad_();
    for (int i = 0; i < 300; ++i) {
      const auto held = remote("w1", make_held);
      EXPECT_EQ(held.rpc_sync(get_held), 7);
      AutogradContext context;
      context.backward({call("w1", scaled, x).sum()});
    }
    for (const auto* worker : {"w0", "w1"}) {
      wait_until([&] { return call(worker, count_left) == std::vector<int64_t>(5, 0); },
                 "all to be freed");
    }
  });
}

/// What a worker does until another one dies: calls, references and backward passes.
void use_others(int rank, std::mt19937_64& random, const std::function<bool()>& ends) {
  while (!ends()) {
    const std::string other = "w" + std::to_string((rank + 1 + random() % 2) % 3);
    try {
      switch (random() % 4) {
        case 0:
          EXPECT_EQ(call(other, twice, 4), 8);
          break;
        case 1:
          EXPECT_EQ(remote(other, make_held).rpc_sync(get_held), 7);
          break;
        case 2:
          EXPECT_EQ(call(other, forward_once, "w" + std::to_string(random() % 3)), 8);
          break;
        default: {
          const at::Tensor x = at::ones({3}).requires_grad_();
          AutogradContext context;
          context.backward({call(other, scaled, x).sum()});
        }
      }
    } catch (const PeerLostError&) {
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.type(), "lockstep::PeerLostError") << error.what();
    } catch (const CommError& error) {  // A backward pass, whose other workers heard of it first.
      EXPECT_THAT(error.what(), HasSubstr("distributed backward"));
    }
  }
}

void die_at_some_phase(int victim) {
  const uint64_t seed = fuzz_seed();
  SCOPED_TRACE(seed);
  run_workers(3,
              [victim, seed](Agent& agent, int rank) {
                std::mt19937_64 random(seed + static_cast<uint64_t>(rank));
                if (rank == victim) {
                  uint64_t left = random() % 200;
                  use_others(rank, random, [&] { return left-- == 0; });
                  ::_exit(0);
                }
                const std::vector<std::string> gone{"w" + std::to_string(victim)};
                const auto deadline = std::chrono::steady_clock::now() + 60s;
                use_others(rank, random, [&] {
                  return agent.lost_workers() == gone ||
                         std::chrono::steady_clock::now() > deadline;
                });
                EXPECT_EQ(agent.lost_workers(), gone);
              },
              {.timeout = 600s});
}

TEST(RpcDeath, OfTheFirstWorkerAtAnyPhase) {
  die_at_some_phase(0);
}
TEST(RpcDeath, OfAnotherWorkerAtAnyPhase) {
  die_at_some_phase(2);
}

}  // namespace membership_test
}  // namespace lockstep::rpc
