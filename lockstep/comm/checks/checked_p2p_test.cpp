// Sends and receives through the checked backend.
#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
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
using test::run_gloo;
using test::tells;
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

/// Both sides must get a MismatchError with all texts.
void expect_mismatch(const at::Tensor& sent, const at::Tensor& received,
                     const std::vector<std::string>& texts) {
  const auto outcomes = run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
    (rank == 0 ? isend(backend, sent, 1, 5) : irecv(backend, received, 0, 5))->wait();
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<MismatchError>()) << outcome.text();
    for (const auto& text : texts) EXPECT_THAT(outcome.text(), HasSubstr(text));
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

// Its process lives on, so nothing else tells it but the store.
TEST(CheckedP2P, AMessageToOneWhoHasLeftTheGroupEndsAtOnce) {
  for (const bool aborts : {true, false}) {
    for (const bool sends : {true, false}) {
      std::atomic<bool> is_over{false};
      const auto outcomes =
          run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
            if (rank == 1) {
              aborts ? backend.abort() : backend.shutdown();
              return wait_until([&] { return is_over.load(); }, "rank 0 to notice");
            }
            const auto end = c10::make_scope_exit([&] { is_over = true; });
            const at::Tensor tensor = at::zeros({2});
            (sends ? isend(backend, tensor, 1) : irecv(backend, tensor, 1))->wait();
          });
      EXPECT_TRUE(outcomes[0].is<PeerLostError>()) << outcomes[0].text();
      const auto kind = aborts ? Failure::Kind::gave_up : Failure::Kind::closed;
      EXPECT_TRUE(tells(outcomes[0].failure(), kind, 1)) << outcomes[0].text();
    }
  }
}

TEST(CheckedP2P, WhoGivesUpAfterALateMessageTellsWhomItWaitedFor) {
  const auto outcomes = run_gloo(2, options_of(DebugLevel::info), [](int rank, Backend& backend) {
    if (rank == 1) return void(irecv(backend, at::zeros({2}), 0)->wait());
    backend.setTimeout(std::chrono::milliseconds(100));
    EXPECT_THROW(irecv(backend, at::zeros({2}), 1)->wait(), TimeoutError);
    backend.abort();
  });
  EXPECT_TRUE(tells(outcomes[1].failure(), Failure::Kind::gave_up, 0)) << outcomes[1].text();
  EXPECT_THAT(outcomes[1].text(), HasSubstr("rank 1 did not call the send within 0.1 s"));
}

/// One side's calls are made before the other's, and more than are compared.
void expect_first_of_many_to_differ(bool sends_first) {
  constexpr int kMessages = 15;
  std::atomic<bool> begun{false};
  const auto outcomes = run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
    const bool sends = rank == 0, is_first = sends == sends_first;
    if (!is_first) wait_until([&] { return begun.load(); }, "the other side's calls");
    std::vector<WorkPtr> works;
    Tensors tensors;
    for (int i = 0; i < kMessages; ++i) {
      const int64_t size = i == 0 && sends ? 8 : 4;
      tensors.push_back(filled(size, sends ? i : -1));
      works.push_back(sends ? isend(backend, tensors.back(), 1)
                            : irecv(backend, tensors.back(), 0));
    }
    if (is_first) begun = true;
    EXPECT_THROW(works[0]->wait(), MismatchError) << "on rank " << rank;
    for (int i = 1; i < kMessages; ++i) {
      works[static_cast<size_t>(i)]->wait();
      EXPECT_EQ(tensors[static_cast<size_t>(i)][3].item<float>(), i) << "on rank " << rank;
    }
  });
  expect_ok(outcomes);
}

TEST(CheckedP2P, ManyReceivesAtOnceAreComparedAsFewAre) {
  expect_first_of_many_to_differ(/*sends_first=*/false);
}

TEST(CheckedP2P, ManySendsAtOnceAreComparedAsFewAre) {
  expect_first_of_many_to_differ(/*sends_first=*/true);
}

// What was given up is not met by a call that comes late.
TEST(CheckedP2P, ACallThatTimedOutFailsItsCounterpart) {
  for (const bool sends : {true, false}) {
    std::atomic<bool> is_late{false};
    const auto outcomes =
        run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
          const bool mine = (rank == 0) == sends;
          const auto call = [&] {
            const at::Tensor tensor = filled(2, rank);
            (mine ? isend(backend, tensor, 1 - rank) : irecv(backend, tensor, 1 - rank))->wait();
          };
          if (rank == 1) {
            wait_until([&] { return is_late.load(); }, "rank 0 to have waited");
            return call();
          }
          backend.setTimeout(std::chrono::milliseconds(100));
          EXPECT_THROW(call(), TimeoutError);
          is_late = true;
        });
    EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].text();
    EXPECT_TRUE(outcomes[1].is<PeerLostError>() &&
                tells(outcomes[1].failure(), Failure::Kind::gave_up, 0))
        << outcomes[1].text();
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

// Its own key, the answers' and the announcement of receives from any are all that may stay.
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
          const at::Tensor tensor = filled(i == 3 ? 4 + rank : 4, i);
          const auto work = rank == 0 ? isend(backend, tensor, 1) : irecv(backend, tensor, 0);
          if (i == 3) {
            EXPECT_THROW(work->wait(), MismatchError);
          } else {
            work->wait();
          }
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

TEST(CheckedP2P, ACallThatTheBackendRefusesFailsItsCounterpartAndNoOther) {
  for (const bool refuses_first : {true, false}) {
    std::atomic<bool> begun{false};
    const auto outcomes =
        run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
          // Gloo takes contiguous tensors only.
          const at::Tensor bad = at::zeros({4, 4}).t(), good = at::zeros({4, 4});
          if ((rank == 0) != refuses_first)
            wait_until([&] { return begun.load(); }, "the other side's call");
          if (rank == 0) {
            EXPECT_ANY_THROW(isend(backend, bad, 1));
            begun = true;
          } else {
            EXPECT_THROW(
                {
                  const auto receive = irecv(backend, good, 0);
                  begun = true;
                  receive->wait();
                },
                CommError);
          }
          const at::Tensor next = filled(3, rank == 0 ? 5 : 0);
          (rank == 0 ? isend(backend, next, 1) : irecv(backend, next, 0))->wait();
          EXPECT_EQ(next[2].item<float>(), 5);
        });
    expect_ok(outcomes);
  }
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

TEST(CheckedP2P, NobodySends) {
  std::atomic<bool> done{false};
  const auto outcomes =
      run_gloo(2, options_of(DebugLevel::info, 400), [&](int rank, Backend& backend) {
        if (rank == 1) {
          wait_until([&] { return done.load(); }, "rank 0 to be done");
          return;
        }
        try {
          irecv(backend, at::zeros({4}), 1, 3)->wait();
        } catch (...) {
          done = true;
          throw;
        }
      });
  EXPECT_TRUE(outcomes[0].is<TimeoutError>()) << outcomes[0].text();
  EXPECT_THAT(outcomes[0].text(),
              HasSubstr("rank 0 called recv(from rank 1) into float32 [4] with tag 3 in group "
                        "'default', but rank 1 did not call the send within 0.4 s"));
}

TEST(CheckedP2P, ShortWaitLeavesTheReceiveGoingOn) {
  std::atomic<bool> waited{false};
  const auto outcomes = run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
    if (rank == 1) {
      wait_until([&] { return waited.load(); }, "rank 0 to have waited");
      isend(backend, filled(2, 6), 0)->wait();
      return;
    }
    auto incoming = at::zeros({2});
    auto work = irecv(backend, incoming, 1);
    EXPECT_FALSE(work->isCompleted());
    EXPECT_THROW(work->wait(std::chrono::milliseconds(20)), TimeoutError);
    waited = true;
    work->wait();
    EXPECT_EQ(incoming[1].item<float>(), 6);
    EXPECT_EQ(work->sourceRank(), 1);
  });
  expect_ok(outcomes);
}

TEST(CheckedP2P, AbortAndCloseEndWhatIsHeldBack) {
  const auto outcomes = run_gloo(2, options_of(DebugLevel::info), [&](int rank, Backend& backend) {
    if (rank == 1) return;
    auto aborted = irecv(backend, at::zeros({2}), 1);
    aborted->abort();
    EXPECT_THROW(aborted->wait(), CommError);
    EXPECT_TRUE(aborted->isCompleted());
    auto closed = irecv(backend, at::zeros({2}), 1, 9);
    backend.shutdown();
    EXPECT_THROW(closed->wait(), CommError);
  });
  expect_ok(outcomes);
}

}  // namespace checked_p2p_test
}  // namespace lockstep
