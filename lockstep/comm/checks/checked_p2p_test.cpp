// Sends and receives through the checked backend.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "tests/support/run_backends.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace checked_p2p_test {

using c10d::Backend;
using test::expect_ok;
using test::Outcome;
using test::outcome_of;
using test::run_gloo;
using test_wait::wait_until;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

CheckedBackendOptions options_of(DebugLevel debug, int milliseconds = 20'000) {
  CheckedBackendOptions options;
  options.debug = debug;
  options.timeout = std::chrono::milliseconds(milliseconds);
  return options;
}

WorkPtr isend(Backend& backend, at::Tensor tensor, int dst, int tag = 0) {
  Tensors tensors{std::move(tensor)};
  return backend.send(tensors, dst, tag);
}
WorkPtr irecv(Backend& backend, at::Tensor tensor, int src, int tag = 0) {
  Tensors tensors{std::move(tensor)};
  return backend.recv(tensors, src, tag);
}
WorkPtr irecv_any(Backend& backend, at::Tensor tensor, int tag = 0) {
  Tensors tensors{std::move(tensor)};
  return backend.recvAnysource(tensors, tag);
}

at::Tensor filled(int64_t n, double value) {
  return at::full({n}, value, at::kFloat);
}

/// The receive must fail with a MismatchError with all texts, and so must the send where it comes
/// second. All later messages must come, of which there are more than are compared.
void expect_mismatch(const at::Tensor& sent, const at::Tensor& received,
                     const std::vector<std::string>& texts) {
  constexpr int kMessages = 15;
  for (const bool sends_first : {true, false}) {
    std::atomic<bool> begun{false};
    const auto outcomes =
        run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
          const bool sends = rank == 0, is_first = sends == sends_first;
          if (!is_first) wait_until([&] { return begun.load(); }, "the other side's calls");
          WorkPtr differing;
          const auto call = [&] {
            differing = sends ? isend(backend, sent, 1, 5) : irecv(backend, received, 0, 5);
          };
          const auto failed = is_first ? Outcome() : outcome_of(call);
          if (is_first) call();
          std::vector<WorkPtr> works;
          Tensors tensors;
          for (int i = 0; i < kMessages; ++i) {
            tensors.push_back(filled(4, sends ? i : -1));
            works.push_back(sends ? isend(backend, tensors.back(), 1, 5)
                                  : irecv(backend, tensors.back(), 0, 5));
          }
          if (is_first) begun = true;
          for (int i = 0; i < kMessages; ++i) {
            works[static_cast<size_t>(i)]->wait();
            EXPECT_EQ(tensors[static_cast<size_t>(i)][3].item<float>(), i) << "on rank " << rank;
          }
          if (is_first && sends) return void(differing->wait());
          const auto outcome = is_first ? outcome_of([&] { differing->wait(); }) : failed;
          EXPECT_TRUE(outcome.is<MismatchError>()) << outcome.text();
          EXPECT_EQ(outcome.failure().ranks.size(), 2U);
          for (const auto& text : texts) EXPECT_THAT(outcome.text(), HasSubstr(text));
        });
    expect_ok(outcomes);
  }
}

TEST(CheckedP2P, AStoreThatIsLostAtTheCallIsToldAsSuch) {
  const auto outcomes = run_gloo(
      2, options_of(DebugLevel::info),
      [](int rank, Backend& backend) { isend(backend, filled(4, 1), 1 - rank, 5)->wait(); },
      c10::make_intrusive<test::StoreLostToMessages>());
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
    EXPECT_TRUE(outcome.failure().has(Failure::Kind::store_lost)) << outcome.text();
  }
}

/// Its requests for messages fail, though it is there.
class FaultyStore final : public c10d::HashStore {
 public:
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    if (key.find("p2p/") != std::string::npos) throw std::runtime_error("no room");
    return HashStore::compareSet(key, expected, desired);
  }
};

TEST(CheckedP2P, AnErrorThatIsNotTheLossOfTheStoreIsNoLostPeer) {
  const auto outcomes = run_gloo(
      2, options_of(DebugLevel::info),
      [](int rank, Backend& backend) { isend(backend, filled(4, 1), 1 - rank, 5)->wait(); },
      c10::make_intrusive<FaultyStore>());
  for (const auto& outcome : outcomes) {
    EXPECT_FALSE(outcome.is<PeerLostError>()) << outcome.text();
    EXPECT_EQ(outcome.text(), "no room");
  }
}

// Nothing is put off until a wait, which may come too late: here both sides are in a collective.
TEST(CheckedP2P, MessagesGoOnWhileTheirRanksWaitForOthers) {
  const auto outcomes = run_gloo(2, options_of(DebugLevel::info), [](int rank, Backend& backend) {
    const at::Tensor incoming = at::zeros({4});
    if (rank == 0) isend(backend, filled(4, 7), 1)->wait();
    const auto receive = rank == 1 ? irecv(backend, incoming, 0) : WorkPtr();
    backend.barrier({})->wait();
    if (receive) receive->wait();
    EXPECT_EQ(incoming[3].item<float>(), rank == 1 ? 7 : 0);
  });
  expect_ok(outcomes);
}

TEST(CheckedP2P, NoKeyOfAMessageIsLeft) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  int64_t before = 0;
  const auto outcomes = run_gloo(
      2, options_of(DebugLevel::detail),
      [&](int rank, Backend& backend) {
        backend.barrier({})->wait();
        if (rank == 0) before = store->getNumKeys();
        backend.barrier({})->wait();
        for (int i = 0; i < 20; ++i) {
          const at::Tensor tensor = filled(4, i);
          (rank == 0 ? isend(backend, tensor, 1) : irecv(backend, tensor, 0))->wait();
        }
        backend.barrier({})->wait();
        if (rank == 0) {
          EXPECT_EQ(store->getNumKeys(), before);
        }
        backend.barrier({})->wait();
      },
      store);
  expect_ok(outcomes);
}

TEST(CheckedP2P, ReceiveTooSmall) {
  expect_mismatch(at::ones({8}), at::ones({4}),
                  {"rank 0 called send(to rank 1) of float32 [8] as message 1 with tag 5",
                   "rank 1 called recv(from rank 0) into float32 [4]"});
}

TEST(CheckedP2P, ReceiveTooLarge) {
  expect_mismatch(at::ones({4}), at::ones({8}), {"float32 [4]", "float32 [8]"});
}

TEST(CheckedP2P, Dtype) {
  expect_mismatch(at::ones({4}), at::ones({4}, at::kInt), {"float32 [4]", "int32 [4]"});
}

class CheckedP2PLevels : public ::testing::TestWithParam<DebugLevel> {};

TEST_P(CheckedP2PLevels, ManyMessagesKeepTheirOrder) {
  constexpr int kMessages = 25;  // More than the compared ones.
  const auto outcomes = run_gloo(2, options_of(GetParam()), [](int rank, Backend& backend) {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> received;
    for (int i = 0; i < kMessages; ++i) {
      if (rank == 0) {
        works.push_back(isend(backend, filled(3, i), 1));
      } else {
        received.push_back(at::zeros({3}));
        works.push_back(irecv(backend, received.back(), 0));
      }
    }
    for (auto& work : works) work->wait();
    for (size_t i = 0; i < received.size(); ++i)
      EXPECT_EQ(received[i][0].item<float>(), static_cast<float>(i));
  });
  expect_ok(outcomes);
}

TEST_P(CheckedP2PLevels, ExchangeStartedByReceivesOnBothSides) {
  const auto outcomes = run_gloo(2, options_of(GetParam()), [](int rank, Backend& backend) {
    for (int i = 0; i < 15; ++i) {
      auto incoming = at::zeros({4});
      auto receive = irecv(backend, incoming, 1 - rank);
      auto send = isend(backend, filled(4, 10.0 * rank + i), 1 - rank);
      send->wait();
      receive->wait();
      EXPECT_EQ(incoming[3].item<float>(),
                10.0F * static_cast<float>(1 - rank) + static_cast<float>(i));
    }
  });
  expect_ok(outcomes);
}

TEST_P(CheckedP2PLevels, TagsAreApart) {
  const auto outcomes = run_gloo(2, options_of(GetParam()), [](int rank, Backend& backend) {
    if (rank == 0) {
      auto first = isend(backend, filled(1, 1), 1, 1);
      auto second = isend(backend, filled(2, 2), 1, 2);
      second->wait();
      first->wait();
    } else {
      auto two = at::zeros({2});
      auto one = at::zeros({1});
      irecv(backend, two, 0, 2)->wait();
      irecv(backend, one, 0, 1)->wait();
      EXPECT_EQ(two[1].item<float>(), 2);
      EXPECT_EQ(one[0].item<float>(), 1);
    }
  });
  expect_ok(outcomes);
}

TEST_P(CheckedP2PLevels, FromAnyFarBeyondTheLimit) {
  static constexpr int kEach = 30;
  const auto outcomes = run_gloo(3, options_of(GetParam()), [](int rank, Backend& backend) {
    if (rank > 0) {
      for (int i = 0; i < kEach; ++i) isend(backend, filled(2, 100.0 * rank + i), 0)->wait();
      return;
    }
    std::map<int, int> next;
    for (int i = 0; i < 2 * kEach; ++i) {
      auto incoming = at::zeros({2});
      auto work = irecv_any(backend, incoming);
      work->wait();
      const int source = work->sourceRank();
      ASSERT_TRUE(source == 1 || source == 2) << source;
      EXPECT_EQ(incoming[0].item<float>(),
                100.0F * static_cast<float>(source) + static_cast<float>(next[source]++));
    }
    EXPECT_EQ(next[1], kEach);
    EXPECT_EQ(next[2], kEach);
  });
  expect_ok(outcomes);
}

TEST_P(CheckedP2PLevels, FromAnyAfterOrdinaryOnesHaveGoneFree) {
  const auto outcomes = run_gloo(3, options_of(GetParam()), [](int rank, Backend& backend) {
    auto tensor = at::zeros({1});
    if (rank == 1) {
      for (int i = 0; i < 24; ++i) isend(backend, at::ones({1}), 0)->wait();
    } else if (rank == 2) {
      for (int i = 0; i < 6; ++i) isend(backend, at::ones({1}), 0)->wait();
    } else {
      for (int i = 0; i < 12; ++i) irecv(backend, tensor, 1)->wait();
      for (int i = 0; i < 12; ++i) irecv_any(backend, tensor)->wait();
      // What is left over of both, whoever was taken above.
      for (int i = 0; i < 6; ++i) irecv_any(backend, tensor)->wait();
    }
  });
  expect_ok(outcomes);
}

INSTANTIATE_TEST_SUITE_P(Levels, CheckedP2PLevels,
                         ::testing::Values(DebugLevel::off, DebugLevel::info, DebugLevel::detail),
                         [](const auto& info) {
                           return info.param == DebugLevel::off    ? "off"
                                  : info.param == DebugLevel::info ? "info"
                                                                   : "detail";
                         });

}  // namespace checked_p2p_test
}  // namespace lockstep
