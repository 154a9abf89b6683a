#include "lockstep/rpc/rpc.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/launch/spawn.h"
#include "tests/support/run_workers.h"

namespace lockstep::rpc {
namespace rpc_test {

using test::run_workers;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Batch {
  at::Tensor images;
  std::vector<int64_t> labels;
};
auto rpc_fields(Batch& batch) {
  return std::tie(batch.images, batch.labels);
}

std::atomic<int> told = 0;
const auto add = function("add", [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
const auto tell = function("tell", [](int number) { told += number; });
const auto get_told = function("get_told", [] { return told.load(); });
const auto describe = function("describe", [](const Batch& batch, std::optional<std::string> name) {
  return std::map<std::string, double>{{name.value_or("none"), batch.images.sum().item<double>()},
                                       {"labels", static_cast<double>(batch.labels.size())}};
});
const auto fail =
    function("fail", [](const std::string& text) -> int { throw std::out_of_range(text); });
const auto fail_there =
    function("fail_there", [](const std::string& worker) { return call(worker, fail, "deep"); });

TEST(Rpc, CallsGoToAllWorkersAndThisOne) {
  run_workers(3, [](Agent& agent, int rank) {
    EXPECT_THAT(agent.workers(), ElementsAre("w0", "w1", "w2"));
    for (const auto& worker : agent.workers()) {
      EXPECT_TRUE(at::equal(call(worker, add, at::ones({2}), at::ones({2})), at::full({2}, 2.0)));
    }
    const auto next = "w" + std::to_string((rank + 1) % 3);
    call(next, tell, 7);
    EXPECT_EQ(call(next, get_told), 7);
    const auto said = call_async(next, describe, Batch{at::ones({3}), {4, 5}}, "sum").wait();
    EXPECT_EQ(said.at("sum"), 3);
    EXPECT_EQ(said.at("labels"), 2);
  });
}

/// The addresses at which this process listens for TCP, in numbers.
std::multiset<std::string> listens_at() {
  std::multiset<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    const auto name = local_name(fd);
    if (name.ss_family != AF_UNIX) found.insert(numeric_text(name));
  }
  return found;
}

TEST(Rpc, OnOneHostNothingListensBeyondTheHost) {
  for (const Options& options : {Options{}, Options{.poll = false}}) {
    spawn(
        [&](int rank) {
          const World world = lockstep::init(InitOptions{});
          const auto before = listens_at();
          Agent agent = rpc::init(world, "w" + std::to_string(rank), options);
          // A large tensor, by whatever way.
          call("w" + std::to_string(1 - rank), add, at::ones({1'000'000}), at::ones({1'000'000}));
          const auto now = listens_at();
          if (options.poll) {
            EXPECT_EQ(now, before) << "no port is opened";
          } else {
            EXPECT_GT(now.size(), before.size()) << "workers meet over loopback";
            EXPECT_EQ(now.count("127.0.0.1"), now.size());
          }
          agent.shutdown();
          if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed");
        },
        2);
  }
}

TEST(Rpc, AFailureComesBackWithTypeMessageAndPlace) {
  run_workers(3, [](Agent&, int rank) {
    if (rank != 0) return;
    const auto check = [](const RemoteError& e, const std::string& worker, const char* message) {
      EXPECT_EQ(e.worker(), worker);
      EXPECT_EQ(e.function(), "fail");
      EXPECT_EQ(e.type(), "std::out_of_range");
      EXPECT_EQ(e.message(), message);
      EXPECT_THAT(e.what(), HasSubstr("'fail' on worker '" + worker + "' threw std::out_of_range"));
    };
    try {
      call("w1", fail, "far");
      FAIL();
    } catch (const RemoteError& e) {
      check(e, "w1", "far");
    }
    try {
      call("w1", fail_there, "w2");
      FAIL();
    } catch (const RemoteError& e) {
      check(e, "w2", "deep");
    }
    const auto reference = remote("w1", fail, "kept");
    try {
      reference.to_here();
      FAIL();
    } catch (const RemoteError& e) {
      check(e, "w1", "kept");
    }
  });
}

TEST(Rpc, UnknownNamesAndOtherTypesAreErrors) {
  run_workers(2, [](Agent&, int rank) {
    if (rank != 0) return;
    EXPECT_THROW(call("w7", add, at::ones({1}), at::ones({1})), UsageError);
    try {
      call("w1", Function<int()>("ad"));
      FAIL();
    } catch (const RemoteError& e) {
      EXPECT_THAT(e.message(), HasSubstr("no function 'ad'"));
      EXPECT_THAT(e.message(), HasSubstr("did you mean"));
    }
    try {
      call("w1", Function<int(at::Tensor)>("add"), at::ones({1}));
      FAIL();
    } catch (const MismatchError& e) {
      EXPECT_THAT(e.what(), HasSubstr("'add' is (Tensor) -> int32 here, and "
                                      "(Tensor, Tensor) -> Tensor on worker 'w1'"));
    }
  });
}

int nest_here(int depth, int size, int rank);
const auto nest = function("nest", nest_here);
int nest_here(int depth, int size, int rank) {
  if (depth == 0) return 0;
  const int next = (rank + 1) % size;
  return 1 + call("w" + std::to_string(next), nest, depth - 1, size, next);
}

TEST(Rpc, NestedCallsDoNotLockUp) {
  run_workers(3,
              [](Agent&, int rank) {
                std::vector<Future<int>> calls;
                for (int i = 0; i < 20; ++i) calls.push_back(call_async("w1", nest, 10, 3, 1));
                for (const int depth : when_all(calls).wait()) EXPECT_EQ(depth, 10);
                EXPECT_EQ(nest_here(rank == 0 ? 1'000 : 1, 3, rank), rank == 0 ? 1'000 : 1);
              },
              {.threads = 4});
}

struct Counter {
  explicit Counter(int start) : value(start) { ++living; }
  ~Counter() { --living; }
  int increase(int by) { return value += by; }
  int get() const { return value; }
  std::atomic<int> value;
  static inline std::atomic<int> living = 0;
};
const auto make_counter =
    function("make_counter", [](int start) { return std::make_shared<Counter>(start); });
const auto increase = method("Counter.increase", &Counter::increase);
const auto get = method("Counter.get", &Counter::get);
const auto living = function("living", [] { return Counter::living.load(); });
const auto use_elsewhere = function(
    "use_elsewhere", [](const RRef<Counter>& counter) { return counter.rpc_sync(increase, 1); });

TEST(RpcRRef, AnObjectStaysWithItsOwner) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank != 0) return;
    {
      const auto counter = remote("w1", make_counter, 5);
      EXPECT_FALSE(counter.is_owner());
      EXPECT_EQ(counter.owner_name(), "w1");
      EXPECT_EQ(counter.rpc_sync(increase, 2), 7);
      EXPECT_EQ(counter.rpc_async(get).wait(), 7);
      EXPECT_EQ(counter.remote(get).to_here(), 7);
      EXPECT_EQ(call("w2", use_elsewhere, counter), 8);  // A fork on a third worker.
      EXPECT_EQ(call("w1", use_elsewhere, counter), 9);  // On the owner itself.
      EXPECT_THROW(counter.local_value(), UsageError);
      EXPECT_EQ(call("w1", living), 1);
    }
    while (call("w1", living) > 0) std::this_thread::yield();
    const auto here = remote("w0", make_counter, 1);
    EXPECT_TRUE(here.is_owner());
    EXPECT_EQ(here.local_value().get(), 1);
    EXPECT_EQ(call("w2", use_elsewhere, here), 2);
  });
}

// The third worker serves the call when the owner has confirmed its reference: later, and on
// another thread than the one that read the message.
TEST(RpcRRef, ARemoteCallMayCarryAThirdWorkersObject) {
  run_workers(3, [](Agent&, int rank) {
    if (rank != 0) return;
    for (int i = 0; i < 20; ++i) {
      const auto counter = remote("w1", make_counter, i);
      EXPECT_EQ(remote("w2", use_elsewhere, counter).to_here(), i + 1);
    }
    while (call("w1", living) > 0) std::this_thread::yield();
  });
}

}  // namespace rpc_test
}  // namespace lockstep::rpc
