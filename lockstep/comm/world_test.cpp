#include "lockstep/comm/world.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/heap.h"
#include "lockstep/base/socket.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/rendezvous/rendezvous.h"
#include "tests/support/message_of.h"
#include "tests/support/page_faults.h"
#include "tests/support/run_ranks.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace world_test {

using std::chrono::milliseconds;
using test::expect_ok;
using test::message_of;
using test::rethrow_first;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Sets a variable for one test.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedVariable() { unsetenv(name_); }

 private:
  const char* name_;
};

InitOptions options_of(const std::string& method, int rank, int size) {
  InitOptions options;
  options.init_method = method;
  options.rank = rank;
  options.world_size = size;
  options.timeout = milliseconds(20'000);
  return options;
}

/// One World per thread, as processes would have.
void run_worlds(const std::string& method, int size, const std::function<void(World&)>& body) {
  rethrow_first(run_ranks(size, [&](int rank) {
    World world = init(options_of(method, rank, size));
    body(world);
  }));
}

/// The same by a free port. Another process may take the port between; then the ranks do not meet,
/// and another port is tried.
void run_worlds_by_tcp(int size, const std::function<void(World&)>& body) {
  for (int attempt = 0;; ++attempt) {
    const uint16_t port = bound_port(listen_on("127.0.0.1", 0).get());
    std::atomic<bool> met{false};
    try {
      run_worlds("tcp://127.0.0.1:" + std::to_string(port), size, [&](World& world) {
        met = true;
        body(world);
      });
      return;
    } catch (const CommError&) {
      if (met || attempt == 5) throw;
    }
  }
}

TEST(Init, FreedMemoryIsKeptUnlessTheProgramMustGiveItBack) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's malloc takes no such settings";
#endif
  if (const auto chosen = heap_chosen()) GTEST_SKIP() << *chosen << " is set";
  for (const bool keep : {true, false}) {
    // The blocks of each step have 23,000 pages.
    const int ended = test::in_another_process([keep] {
      const World world = init({.rank = 0, .world_size = 1, .keep_freed_memory = keep});
      return (test::page_faults_of_steps() < 10'000) == keep ? 0 : 1;
    });
    EXPECT_EQ(ended, 0) << keep;
  }
}

TEST(World, WithoutLauncherIsAGroupOfOne) {
  World world = init();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.local_rank(), 0);
  EXPECT_EQ(world.local_size(), 1);
  EXPECT_EQ(world.launcher(), "none");
  EXPECT_TRUE(world.device().is_cpu());
  at::Tensor tensor = at::ones({2});
  world.group().all_reduce(tensor);
  EXPECT_TRUE(at::equal(tensor, at::ones({2})));
  Store(world.store()).set("key", "value");
}

TEST(World, TellsWhereItsStoreIs) {
  run_worlds_by_tcp(2, [](World& world) {
    EXPECT_EQ(world.address(), "127.0.0.1");
    EXPECT_THAT(world.store_address(), ::testing::MatchesRegex("127.0.0.1:[0-9]+/0"));
    const std::string key = "of rank " + std::to_string(world.rank());
    Store(world.store()).set(key, "here");
    EXPECT_EQ(store_of_job(world.store_address(), milliseconds(20'000)).get(key), "here");
    world.group().barrier();
  });
}

TEST(World, ComparesTheRanksParametersAndBuffers) {
  run_worlds_by_tcp(3, [](World& world) {
    torch::nn::BatchNorm1d module(3);
    const auto differs = [&]() -> std::string {
      try {
        world.check_equal(*module);
      } catch (const MismatchError& error) {
        EXPECT_EQ(error.ranks(), std::vector<int>{1});
        return error.failure().detail;
      }
      return "nothing";
    };
    EXPECT_EQ(differs(), "nothing");
    if (world.rank() == 1) module->running_mean.fill_(world.rank());
    EXPECT_EQ(differs(), "running_mean");
    if (world.rank() == 1) module->weight.data().add_(1);
    EXPECT_EQ(differs(), "weight");
  });
}

TEST(World, AStoreOfAFileOrOfThisProcessHasNoAddress) {
  EXPECT_EQ(init().store_address(), "");
  TemporaryDirectory folder;
  run_worlds("file://" + (folder.path() / "meet").string(), 2,
             [](World& world) { EXPECT_EQ(world.store_address(), ""); });
}

TEST(World, WhatIsNoAddressOfAStoreIsRefused) {
  for (const char* text : {"", "host", "host:1", "host:1/", "host:1/x", "host:1/-1", "host:0/0",
                           "host:65536/0", ":1/0", "host/0"}) {
    EXPECT_THROW(store_of_job(text, milliseconds(1'000)), UsageError) << text;
  }
}

// As two starts of a job by an agent, whose store outlives the ranks.
TEST(World, EachStartOfAJobHasKeysOfItsOwn) {
  const Store server = tcp_store({.is_listener = true});
  const std::string place = "127.0.0.1:" + std::to_string(tcp_store_port(server)) + "/";
  const auto store_of = [&](int restarts) {
    return store_of_job(place + std::to_string(restarts), milliseconds(20'000));
  };
  store_of(0).set("key", "first");
  EXPECT_FALSE(store_of(1).check({"key"}));
  EXPECT_TRUE(store_of(0).check({"key"}));
}

InitOptions options_over(const Store& store, int64_t generation, int rank, int size) {
  InitOptions options = options_of("env://", rank, size);
  options.store = store;
  options.generation = generation;
  return options;
}

TEST(World, AMeetingThatIsCancelledEndsAtOnce) {
  for (const std::string backend : {"shm", "gloo", "hierarchical"}) {
    const Store store = tcp_store({.is_listener = true});
    InitOptions options = options_over(store, 1, 0, 2);
    options.backend = backend;
    options.timeout = milliseconds(600'000);
    options.cancelled = [] { return true; };
    EXPECT_THROW(init(options), PeerLostError) << backend;
  }
}

TEST(World, GenerationsOverOneStoreHaveKeysOfTheirOwn) {
  const Store store = tcp_store({.is_listener = true});
  int64_t keys = 0;
  for (int64_t generation = 0; generation < 4; ++generation) {
    const int size = generation % 2 == 0 ? 2 : 3;
    rethrow_first(run_ranks(size, [&](int rank) {
      World world = init(options_over(store, generation, rank, size));
      EXPECT_EQ(world.generation(), generation);
      EXPECT_FALSE(Store(world.store()).check({"word"})) << "of the generation before";
      Store own = world.store();
      world.group().barrier();
      own.set("word", "said");
      at::Tensor sum = at::ones({2});
      world.group().all_reduce(sum);
      EXPECT_EQ(sum[0].item<float>(), static_cast<float>(size));
    }));
    if (generation == 1) keys = Store(store).num_keys();
  }
  EXPECT_LE(Store(store).num_keys(), keys) << "keys of earlier generations are left";
}

TEST(InitErrors, AGenerationOverAStoreNeedsARankAndASize) {
  const Store store = hash_store();
  EXPECT_THROW(init(options_over(store, 0, -1, 2)), UsageError);
  EXPECT_THROW(init(options_over(store, 0, 0, -1)), UsageError);
}

TEST(World, MeetsByAFile) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "meet";
  run_worlds("file://" + path.string(), 3, [](World& world) {
    EXPECT_EQ(world.launcher(), "explicit");
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.local_size(), 3);
    EXPECT_EQ(world.node_rank(), 0);
    at::Tensor tensor = at::full({1}, world.rank() + 1.0);
    world.group().all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 6);
    Store(world.store()).set("seen/" + std::to_string(world.rank()), "1");
    Store(world.store()).wait({"seen/0", "seen/1", "seen/2"});
  });
}

TEST(World, MeetsByTcp) {
  run_worlds_by_tcp(2, [](World& world) {
    at::Tensor tensor = at::full({1}, world.rank() + 1.0);
    world.group().all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 3);
    EXPECT_EQ(world.local_size(), 2);
  });
}

TEST(World, NewGroupsAndTheirErrors) {
  TemporaryDirectory folder;
  run_worlds("file://" + (folder.path() / "meet").string(), 3, [](World& world) {
    const ProcessGroup pair = world.new_group({2, 0});
    EXPECT_EQ(static_cast<bool>(pair), world.rank() != 1);
    if (pair) {
      EXPECT_EQ(pair.global_ranks(), (std::vector<int>{0, 2}));
      at::Tensor tensor = at::full({1}, world.rank() + 1.0);
      pair.all_reduce(tensor);
      EXPECT_EQ(tensor.item<float>(), 4);
    }
    EXPECT_THROW(world.new_group({}), UsageError);
    EXPECT_THROW(world.new_group({0, 0}), UsageError);
    EXPECT_THROW(world.new_group({0, 3}), UsageError);
    EXPECT_THROW(world.new_group({0}, "glo"), UsageError);
    const ProcessGroup all = world.new_group({0, 1, 2});
    all.barrier();
  });
}

TEST(World, ANewGroupOfOtherRanksOrBackendsIsRefusedOnAllRanks) {
  TemporaryDirectory folder;
  run_worlds("file://" + (folder.path() / "meet").string(), 4, [](World& world) {
    const auto expect_refused = [&](const std::vector<int>& mine, const std::vector<int>& others,
                                    const std::string& backend) {
      try {
        world.new_group(mine, backend);
        ADD_FAILURE() << "rank " << world.rank() << " formed a group";
      } catch (const MismatchError& error) {
        const auto& differ = error.failure().ranks;
        ASSERT_EQ(differ.size(), 2U);
        EXPECT_EQ(differ[0].number, world.rank());
        EXPECT_EQ(differ[0].asked_group, mine);
        EXPECT_NE(differ[1].number, world.rank());
        EXPECT_EQ(differ[1].asked_group, others);
      }
    };
    const std::vector<int> even{0, 2}, odd{1, 3};
    const bool is_even = world.rank() % 2 == 0;
    expect_refused(is_even ? even : odd, is_even ? odd : even, "gloo");
    expect_refused({0, 1, 2, 3}, {0, 1, 2, 3}, is_even ? "gloo" : "shm");
    const ProcessGroup all = world.new_group({0, 1, 2, 3});
    EXPECT_EQ(all.size(), 4) << "the ranks count their groups alike";
    all.barrier();
  });
}

TEST(World, OnlyMembersCallANewGroupWithLocalSynchronization) {
  TemporaryDirectory folder;
  run_worlds("file://" + (folder.path() / "meet").string(), 4, [](World& world) {
    const int rank = world.rank();
    const std::vector<int> pair = rank % 2 == 0 ? std::vector<int>{2, 0} : std::vector<int>{1, 3};
    const int rounds = rank % 2 == 0 ? 2 : 1;
    for (int round = 0; round < rounds; ++round) {
      const ProcessGroup group = world.new_group(pair, {}, /*use_local_synchronization=*/true);
      at::Tensor sum = at::full({1}, rank);
      group.all_reduce(sum);
      EXPECT_EQ(sum.item<float>(), rank % 2 == 0 ? 2 : 4);
    }
    EXPECT_FALSE(world.new_group({rank == 0 ? 1 : 0}, {}, /*use_local_synchronization=*/true));
    EXPECT_EQ(world.new_group({0, 1, 2, 3}).size(), 4);
  });
}

TEST(World, ARankThatDoesNotCallNewGroupIsNamed) {
  TemporaryDirectory folder;
  run_worlds("file://" + (folder.path() / "meet").string(), 3, [](World& world) {
    world.group().barrier();
    if (world.rank() == 1) return;
    if (world.rank() == 2) return static_cast<void>(world.new_group({0}));
    impl_of(world.group()).context->timeout = milliseconds(300);
    try {
      world.new_group({0});
      ADD_FAILURE() << "a rank did not call";
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.ranks(), (std::vector<int>{1}));
    }
  });
}

TEST(World, ClosesOnceAndSaysSo) {
  World world = init();
  const ProcessGroup group = world.group();
  world.close();
  world.close();
  EXPECT_THROW(group.barrier(), CommError);
  EXPECT_THROW(world.new_group({0}), CommError);
  World moved = std::move(world);
  moved = init();
  moved.group().barrier();
}

TEST(World, ARankThatFailsDoesNotWaitForTheOthers) {
  TemporaryDirectory folder;
  const std::string method = "file://" + (folder.path() / "meet").string();
  std::exception_ptr seen;
  std::chrono::steady_clock::duration closing{};
  run_worlds(method, 2, [&](World& world) {
    at::Tensor tensor = at::ones({1});
    world.group().all_reduce(tensor);
    if (world.rank() == 0) {
      // Told by the rank that left, or noticed by the connection that closes.
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THROW(world.group().all_reduce(tensor), PeerLostError);
      EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10'000));
      return;
    }
    World inner = std::move(world);
    const auto start = std::chrono::steady_clock::now();
    try {
      World failing = std::move(inner);
      throw DataError("a damaged file");
    } catch (const DataError&) {
      closing = std::chrono::steady_clock::now() - start;
    }
  });
  EXPECT_LT(closing, milliseconds(5'000));
}

TEST(World, TheRankThatHoldsTheStoreOutlivesTheOthersUseOfIt) {
  std::atomic<bool> first_closing{false};
  run_worlds_by_tcp(2, [&](World& world) {
    Store store = world.store();
    world.group().barrier();
    if (world.rank() == 0) {
      first_closing = true;
      world.close();
      return;
    }
    test_wait::wait_until([&] { return first_closing.load(); }, "rank 0 to close");
    for (int i = 0; i < 200; ++i) store.add("late", 1);
    EXPECT_EQ(store.get("late"), "200");
  });
}

TEST(InitErrors, NameTheThing) {
  const std::pair<InitOptions, std::string> wrong[] = {
      {options_of("tpc://a:1", 0, 1), "tpc://a:1"},
      {options_of("tcp://host", 0, 2), "HOST:PORT"},
      {options_of("tcp://host:99999", 0, 2), "99999"},
      {options_of("tcp://127.0.0.1:1", 2, 2), "0 to 1"},
      {options_of("tcp://127.0.0.1:1", -1, -1), "rank and world_size"},
      {options_of("file://", 0, 2), "path"},
      {{.backend = "glo"}, "gloo"},
      {{.backend = "gloo", .interface = "no-such-if0"}, "no-such-if0"},
      {{.backend = "gloo", .timeout = milliseconds(0)}, "time-out"},
      {{.backend = "gloo", .timeout = milliseconds::max()}, "from 0.001 to 1000000 seconds"}};
  for (const auto& [options, thing] : wrong)
    EXPECT_THAT(message_of<UsageError>([&] { init(options); }), HasSubstr(thing));
}

TEST(InitErrors, VariablesAreNamed) {
  for (const auto& [name, value] :
       {std::pair("LOCKSTEP_TIMEOUT", "soon"), {"LOCKSTEP_DEBUG", "detial"}}) {
    const ScopedVariable variable(name, value);
    EXPECT_THAT(message_of<UsageError>([] { init(); }), HasSubstr(name));
  }
}

TEST(InitErrors, ARankGivenTwiceIsNamed) {
  TemporaryDirectory folder;
  const std::string method = "file://" + (folder.path() / "meet").string();
  std::vector<std::string> messages(3);
  std::atomic<bool> refused = false;
  expect_ok(run_ranks(3, [&](int process) {
    InitOptions options = options_of(method, std::min(process, 1), 2);
    options.timeout = milliseconds(10'000);
    messages[static_cast<size_t>(process)] = message_of<UsageError>([&] {
      std::optional<World> world;
      try {
        world.emplace(init(options));
      } catch (const UsageError&) {
        refused = true;
        throw;
      }
      // The two that met stay until the third has come, however late: their leaving ends the job.
      test_wait::wait_until([&] { return refused.load(); }, "the third to be refused");
      world->group().barrier();
    });
  }));
  EXPECT_THAT(messages,
              ::testing::UnorderedElementsAre(
                  "no error", "no error", ::testing::MatchesRegex(".*rank 1.*two processes.*")));
}

/// What init says on each of two ranks that ask for these backends, or which one they then have.
std::vector<std::string> join_with(const std::vector<std::string>& backends) {
  TemporaryDirectory folder;
  const std::string method = "file://" + (folder.path() / "meet").string();
  std::vector<std::string> said(backends.size());
  const int size = static_cast<int>(backends.size());
  expect_ok(run_ranks(size, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    InitOptions options = options_of(method, rank, size);
    options.timeout = milliseconds(10'000);
    options.backend = backends[at];
    try {
      World world = init(options);
      at::Tensor one = at::ones({1});
      world.group().all_reduce(one);
      said[at] = world.group().backend();
    } catch (const MismatchError& error) {
      said[at] = error.what();
    }
  }));
  return said;
}

TEST(InitErrors, DifferentBackendsAreNamedOnAllRanks) {
  for (const auto& text : join_with({"shm", "hierarchical"}))
    EXPECT_THAT(text, HasSubstr("backends differ: rank 0 has 'shm', rank 1 has 'hierarchical'"));
}

TEST(World, AutomaticRanksFollowTheOneThatAsks) {
  EXPECT_EQ(join_with({"auto", "shm"}), (std::vector<std::string>{"shm", "shm"}));
  EXPECT_EQ(join_with({"gloo", "auto"}), (std::vector<std::string>{"gloo", "gloo"}));
}

TEST(InitErrors, MissingRanksAreNamed) {
  TemporaryDirectory folder;
  InitOptions options = options_of("file://" + (folder.path() / "meet").string(), 0, 3);
  options.timeout = milliseconds(400);
  EXPECT_EQ(test::ranks_of<TimeoutError>([&] { init(options); }), (std::vector<int>{1, 2}));
}

TEST(Backends, SayWhyTheyAreAbsent) {
  EXPECT_TRUE(backend_info("gloo").available);
  const auto nccl = backend_info("nccl");
  if (nccl.available) GTEST_SKIP() << "NCCL is available here";
  EXPECT_FALSE(nccl.reason.empty());
  EXPECT_FALSE(nccl.remedy.empty());
  InitOptions options;
  options.backend = "nccl";
  EXPECT_THAT(message_of<UsageError>([&] { init(options); }),
              AllOf(HasSubstr("nccl"), HasSubstr(nccl.reason), HasSubstr(nccl.remedy)));
  EXPECT_THROW(backend_info("mip"), UsageError);
}

TEST(Rendezvous, ReadsRankAndSizeFromTheUrl) {
  const auto nothing = [](const std::string&) { return std::optional<std::string>(); };
  const Rendezvous plan = plan_rendezvous("tcp://[::1]:4000?rank=1&world_size=3", -1, -1, nothing);
  EXPECT_EQ(plan.job.rank, 1);
  EXPECT_EQ(plan.job.world_size, 3);
  EXPECT_EQ(plan.job.master_addr, "::1");
  EXPECT_EQ(plan.job.master_port, 4000);
  EXPECT_TRUE(plan.job.single_host);
  EXPECT_FALSE(holds_store(plan));
}

TEST(Rendezvous, TheProgramsRankMustNotContradictTheEnvironment) {
  const auto lookup = [](const std::string& name) -> std::optional<std::string> {
    if (name == "RANK") return "0";
    return std::nullopt;
  };
  EXPECT_THROW(plan_rendezvous("env://", 1, 2, lookup), UsageError);
}

TEST(Rendezvous, TcpTakesTheRankFromTheLauncher) {
  const auto lookup = [](const std::string& name) -> std::optional<std::string> {
    if (name == "SLURM_PROCID") return "1";
    if (name == "SLURM_NTASKS") return "2";
    if (name == "SLURM_STEP_ID") return "0";
    return std::nullopt;
  };
  const Rendezvous plan = plan_rendezvous("tcp://10.0.0.9:4000", -1, -1, lookup);
  EXPECT_EQ(plan.job.rank, 1);
  EXPECT_EQ(plan.job.world_size, 2);
  EXPECT_EQ(plan.job.master_addr, "10.0.0.9");
  EXPECT_FALSE(plan.job.single_host);
}

}  // namespace world_test
}  // namespace lockstep
