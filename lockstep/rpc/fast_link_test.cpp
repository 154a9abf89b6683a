// Messages between two ends in this process, and a worker's end to which anything is sent.
#include "lockstep/rpc/fast_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/fast_meeting.h"
#include "lockstep/rpc/fast_path.h"
#include "lockstep/rpc/remote_failure.h"
#include "lockstep/rpc/ring_link.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc::detail {
namespace fast_link_test {

using namespace std::chrono_literals;
using test_wait::wait_until;
using Messages = std::vector<FastMessage>;

enum class Over { memory, tcp, tcp_with_secret };

struct Pair {
  explicit Pair(Over over) {
    FastMeeting meeting{.rank = 0, .size = 2, .shared_memory = over == Over::memory};
    if (over == Over::tcp_with_secret) meeting.secret = "sixteen letters!";
    FastMeeting others = meeting;
    others.rank = 1;
    Store store = hash_store();
    std::thread other([&] { second = meet(store, others); });
    first = meet(store, meeting);
    other.join();
    if (!first || !second) throw std::runtime_error("there is no link");
    const bool is_memory = dynamic_cast<RingLink*>(first.get()) != nullptr;
    EXPECT_EQ(is_memory, over == Over::memory);
  }
  std::shared_ptr<FastLink> first, second;
};

Messages taken(FastLink& link) {
  FastCatch caught;
  link.take(caught);
  EXPECT_TRUE(caught.lost.empty());
  return caught.messages;
}

class FastLinks : public ::testing::TestWithParam<Over> {};
std::string name_of(const ::testing::TestParamInfo<Over>& info) {
  if (info.param == Over::memory) return "memory";
  return info.param == Over::tcp ? "tcp" : "tcp_with_secret";
}
INSTANTIATE_TEST_SUITE_P(All, FastLinks,
                         ::testing::Values(Over::memory, Over::tcp, Over::tcp_with_secret),
                         name_of);

/// Sleeps until something has come. Fails when no one wakes it.
void await(FastLink& link, Messages& messages) {
  while (messages.empty()) {
    messages = taken(link);
    if (!messages.empty()) return;
    const auto begin = std::chrono::steady_clock::now();
    link.sleep(
        FastLink::poller, [] { return false; }, 20s);
    ASSERT_LT(std::chrono::steady_clock::now() - begin, 15s) << "a wake-up was lost";
  }
}

TEST_P(FastLinks, MessagesComeWholeAndInOrder) {
  const Pair pair(GetParam());
  constexpr uint64_t kCount = 60;
  std::thread sender([&] {
    for (uint64_t i = 0; i < kCount; ++i) {
      const std::string bytes(i % 2 == 0 ? 10 : 100'000, static_cast<char>(i));
      // Where there is no room, the rest of the one before goes out first.
      while (!pair.first->send(1, {3, i}, bytes)) taken(*pair.first);
    }
  });
  Messages messages;
  wait_until(
      [&] {
        for (auto& message : taken(*pair.second)) messages.push_back(std::move(message));
        taken(*pair.first);
        return messages.size() == kCount;
      },
      "all messages");
  sender.join();
  ASSERT_EQ(messages.size(), kCount);
  for (uint64_t i = 0; i < kCount; ++i) {
    const auto& [from, head, bytes] = messages[i];
    EXPECT_EQ(from, 0);
    EXPECT_EQ(head.kind, 3);
    EXPECT_EQ(head.number, i);
    EXPECT_EQ(bytes, std::string(i % 2 == 0 ? 10 : 100'000, static_cast<char>(i)));
  }
}

TEST_P(FastLinks, RefusesWhatIsTooLargeHasNoRoomOrIsForALostWorker) {
  const Pair pair(GetParam());
  FastLink& link = *pair.first;
  const std::string most(FastLink::kMostBytes, 'x');
  EXPECT_FALSE(link.send(1, {}, most + "x"));
  size_t sent = 0;
  while (link.send(1, {}, most)) ASSERT_LT(++sent, 100);
  EXPECT_GE(sent, 2);
  size_t come = 0;
  wait_until(
      [&] {
        come += taken(*pair.second).size();
        taken(link);
        return come == sent;
      },
      "what was sent");
  EXPECT_TRUE(link.send(1, {}, most)) << "there is room again";
  link.lose(1);
  EXPECT_FALSE(link.send(1, {}, "x"));
}

TEST_P(FastLinks, NoWakeUpIsLost) {
  const Pair pair(GetParam());
  constexpr int kRounds = 3'000;
  const auto play = [](FastLink& link, int other, bool begins) {
    Messages messages;
    for (int i = 0; i < kRounds; ++i) {
      if (begins || i > 0) link.send(other, {}, "ball");
      await(link, messages);
      ASSERT_EQ(messages.size(), 1);
      messages.clear();
    }
    if (!begins) link.send(other, {}, "ball");
  };
  std::thread other([&] { play(*pair.second, 0, false); });
  play(*pair.first, 1, true);
  other.join();
}

const auto twice = function("link.twice", [](int64_t number) {
  return static_cast<int64_t>(2 * static_cast<uint64_t>(number));
});

/// A worker's end, as far as calls need it.
struct Served {
  explicit Served(std::shared_ptr<FastLink> link)
      : path(std::make_shared<FastPath>(std::move(link), std::make_shared<CallRunner>("w1"),
                                        threads)) {
    path->start();
  }
  ~Served() { path->stop(); }
  std::shared_ptr<HandlerThreads> threads = std::make_shared<HandlerThreads>(4);
  std::shared_ptr<FastPath> path;
};

FastHead request_of(uint64_t number) {
  return {static_cast<uint32_t>(FastPath::Kind::request), number};
}

std::string request(const Signature& signature, int64_t argument) {
  std::string bytes;
  EXPECT_TRUE(encode_values(packed_call(signature, {argument}), FastPath::kLimits, bytes));
  return bytes;
}

const auto much = function(
    "link.much", [](int64_t bytes) { return std::string(static_cast<size_t>(bytes), 'x'); });

// Nobody is a worker here.
TEST_P(FastLinks, AnAnswerThatCannotBeBroughtIsTheCallsFailure) {
  const Pair pair(GetParam());
  const Served served(pair.second);
  const auto largest = static_cast<int64_t>(FastLink::kMostBytes);
  ASSERT_TRUE(pair.first->send(1, request_of(1), request(much.signature(), largest)));
  Messages answers;
  await(*pair.first, answers);
  ASSERT_EQ(answers.size(), 1);
  EXPECT_EQ(static_cast<FastPath::Kind>(answers[0].head.kind), FastPath::Kind::failure);
  EXPECT_EQ(answers[0].head.number, 1);
  EXPECT_THAT(answers[0].bytes, ::testing::HasSubstr("lockstep::UsageError"));
}

// It may hold what they want.
TEST_P(FastLinks, CallbacksNeverRunOnTheThreadThatFinishesTheCall) {
  const Pair pair(GetParam());
  const Served served(pair.second);
  constexpr int kCount = 5'000;
  const auto here = std::this_thread::get_id();
  std::atomic<int> run{0}, run_here{0};
  for (int i = 0; i < kCount; ++i) {
    served.path->run_elsewhere(std::make_shared<CallState>(), {[&] {
                                 if (std::this_thread::get_id() == here) ++run_here;
                                 ++run;
                               }});
    // One at a time, so that a thread waits for it.
    while (run <= i) std::this_thread::yield();
  }
  EXPECT_EQ(run_here, 0);
}

TEST_P(FastLinks, SpoiltRequestsAreErrorsAndTheWorkerGoesOn) {
  const auto given = env_string("LOCKSTEP_FUZZ_SEED");
  const uint64_t seed = given ? std::stoull(*given) : std::random_device{}();
  std::printf("LOCKSTEP_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const Pair pair(GetParam());
  Served served(pair.second);
  constexpr uint64_t kCount = 3'000;
  int values = 0, failures = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    Signature signature = twice.signature();
    std::string bytes = request(signature, 21);
    switch (random() % 5) {
      case 0:
        bytes[random() % bytes.size()] = static_cast<char>(random());
        break;
      case 1:
        bytes.resize(random() % bytes.size());
        break;
      case 2:
        signature.hash = static_cast<int64_t>(random());
        bytes = request(signature, 21);
        break;
      default:
        break;
    }
    ASSERT_TRUE(pair.first->send(1, request_of(i), bytes));
    // Of no kind that is known, and an answer that nobody waits for.
    if (random() % 10 == 0) {
      pair.first->send(1, {static_cast<uint32_t>(1 + random() % 9), i}, bytes);
    }
    for (bool is_answered = false; !is_answered;) {
      Messages answers;
      await(*pair.first, answers);
      for (const auto& answer : answers) {
        const auto kind = static_cast<FastPath::Kind>(answer.head.kind);
        EXPECT_EQ(answer.head.number, i);
        ++(kind == FastPath::Kind::value ? values : failures);
        is_answered = true;
      }
    }
  }
  EXPECT_GT(values, 500);
  EXPECT_GT(failures, 500);
}

}  // namespace fast_link_test
}  // namespace lockstep::rpc::detail
