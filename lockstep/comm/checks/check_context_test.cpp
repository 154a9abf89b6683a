// What the checks of a group share, also when the store is lost.
#include "lockstep/comm/checks/check_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"
#include "lockstep/comm/native_store.h"
#include "lockstep/comm/store.h"
#include "tests/support/ended_identity.h"
#include "tests/support/run_ranks.h"

namespace lockstep {
namespace check_context_test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// A store in this process and a client of it, as another process has one.
struct Served {
  Store server = tcp_store({.is_listener = true});
  Store client = tcp_store({.port = tcp_store_port(server), .timeout = seconds(60)});

  StorePtr prefixed() const {
    return c10::make_intrusive<c10d::PrefixStore>(
        "outer", c10::make_intrusive<c10d::PrefixStore>("inner/", native_store(client)));
  }
  std::shared_ptr<CheckContext> context(int rank) const {
    return std::make_shared<CheckContext>(prefixed(), rank, 2, RankNames{}, "default", seconds(60));
  }
};

TEST(CheckContext, ItsKeysLieUnderThoseOfTheStore) {
  const Served served;
  auto context = served.context(0);
  context->store().set("key", std::string("value"));
  EXPECT_EQ(served.prefixed()->get_to_str(check_prefix("default") + "/key"), "value");
}

TEST(CheckContext, RequestsToALostStoreFailAtOnce) {
  Served served;
  auto context = served.context(0);
  served.server = {};
  const auto before = Clock::now();
  for (int i = 0; i < 5; ++i) {
    try {
      context->store().check({"key"});
      ADD_FAILURE() << "nobody was there";
    } catch (const std::exception& error) {
      EXPECT_TRUE(is_store_lost(error)) << error.what();
    }
  }
  context->tell_failed("all_reduce");
  EXPECT_EQ(context->told(), "all_reduce");
  EXPECT_TRUE(context->ended({1}).empty());
  EXPECT_FALSE(context->told_end(1));
  const Failure end = context->end_of({1});
  EXPECT_EQ(end.kind, Failure::Kind::ended);
  EXPECT_TRUE(end.concerns(1));
  EXPECT_LT(Clock::now() - before, seconds(5));
}

TEST(CheckContext, HowARankLeftIsToldOnce) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto context = [&](int rank) {
    return std::make_shared<CheckContext>(store, rank, 4, RankNames{}, "default", seconds(60));
  };
  const auto here = context(0);
  EXPECT_FALSE(here->told_end(1));
  context(1)->tell_end(Failure::Kind::closed, 287);
  EXPECT_TRUE(here->has_left_its_loop(1));
  EXPECT_EQ(here->told_end(1)->ranks[0].steps, 287);
  const auto failed = context(2);
  failed->tell_failed("all_reduce");
  failed->tell_end(Failure::Kind::closed, 287);
  failed->tell_end(Failure::Kind::gave_up);
  EXPECT_EQ(here->told_end(2)->kind, Failure::Kind::closed) << "who failed did not leave";
  const auto gave_up = context(3);
  gave_up->tell_failed("barrier");
  gave_up->tell_end(Failure::Kind::gave_up);
  EXPECT_EQ(here->told_end(3)->kind, Failure::Kind::gave_up);
  EXPECT_THAT(here->told_end(3)->detail, ::testing::HasSubstr("barrier"));
}

TEST(CheckContext, AFailureCallbackIsAskedUntilItIsReplaced) {
  auto context = std::make_shared<CheckContext>(c10::make_intrusive<c10d::HashStore>(), 0, 2,
                                                RankNames{}, "default", seconds(60));
  EXPECT_FALSE(context->seen_failure());
  context->set_failure_callback([] { return Failure{.kind = Failure::Kind::ended}; });
  ASSERT_TRUE(context->seen_failure());
  EXPECT_THROW(throw_failure("barrier: ", *context->seen_failure()), PeerLostError);
  EXPECT_THROW(throw_failure("barrier: ", {.kind = Failure::Kind::late}), TimeoutError);
  context->set_failure_callback({});
  EXPECT_FALSE(context->seen_failure());
}

// Else two ranks that waited for each other in two groups, and both for a third, would name each
// other only.
TEST(CheckContext, WhoWasSilentIsNamedBesideARankThatGaveUp) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CheckContext context(store, 0, 3, RankNames{}, "default", seconds(60));
  CheckContext other(store, 1, 3, RankNames{}, "default", seconds(60));
  other.tell_failed("send(to rank 0)");
  const CallSignature call{.operation = Operation::recv_any};
  const auto failure_after = [&](bool given_up) {
    context.set_failure_callback([given_up] {
      const auto kind = given_up ? Failure::Kind::gave_up : Failure::Kind::closed;
      return Failure{.kind = kind, .ranks = {{1, kind}}};
    });
    const auto late = std::make_exception_ptr(std::runtime_error("timed out"));
    return test::failure_in(translate_failure(late, context, call, seconds(5)));
  };
  EXPECT_TRUE(failure_after(true).concerns(1));
  EXPECT_TRUE(failure_after(true).concerns(2));
  EXPECT_FALSE(failure_after(false).concerns(2));
}

Failure lost_store(CheckContext& context) {
  try {
    throw std::runtime_error("Broken pipe");
  } catch (const std::exception&) {
    return test::failure_in(context.store_lost("send(to rank 1) in group 'default'"));
  }
}

TEST(CheckContext, ALostStoreIsToldWithWhatIsSeenOfTheOthers) {
  CheckContext context(c10::make_intrusive<c10d::HashStore>(), 0, 3, RankNames{}, "default",
                       seconds(60));
  context.store().set(announcement_key(1), test_process::ended_identity());
  context.store().set(announcement_key(2), process_identity());
  context.remember_identities();  // Before the first call, when nothing was compared yet.
  const auto look = [&](bool given_up) {
    context.set_failure_callback([given_up] {
      return Failure{.kind = given_up ? Failure::Kind::gave_up : Failure::Kind::ended,
                     .text = "what was seen"};
    });
    return lost_store(context);
  };
  EXPECT_TRUE(test::tells(lost_store(context), Failure::Kind::ended, 1));
  EXPECT_FALSE(lost_store(context).concerns(2));
  EXPECT_EQ(look(false).cause->text, "what was seen");
  EXPECT_TRUE(look(true).concerns(1)) << "who gave up did so over something";
}

TEST(CheckContext, ALostStoreIsTheCauseUnlessThereWasOneBefore) {
  CheckContext context(c10::make_intrusive<c10d::HashStore>(), 0, 2, RankNames{}, "default",
                       seconds(60));
  lost_store(context);
  EXPECT_EQ(context.told(), "send(to rank 1) in group 'default' lost the store");
  context.tell_failed("rank 1 has ended");
  lost_store(context);
  EXPECT_EQ(context.told(), "rank 1 has ended");
}

}  // namespace check_context_test
}  // namespace lockstep
