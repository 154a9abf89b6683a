#include "lockstep/base/failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace failure_test {

using Kind = Failure::Kind;

Failure example() {
  Failure cause{.kind = Kind::ended, .ranks = {{.number = 2, .kind = Kind::ended, .process = 12}}};
  return {.kind = Kind::closed,
          .ranks = {{.number = 1,
                     .kind = Kind::closed,
                     .process = 11,
                     .calls = 7,
                     .asked_group = {0, 2, 5}}},
          .calls = 9,
          .detail = "!",
          .cause = std::make_shared<const Failure>(cause)};
}

TEST(Failure, ComesBackFromItsBytes) {
  const auto back = decode_failure(encode(example()) + "what follows");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->kind, Kind::closed);
  EXPECT_EQ(back->ranks, example().ranks);
  EXPECT_EQ(back->calls, 9);
  EXPECT_EQ(back->detail, "!");
  ASSERT_TRUE(back->cause);
  EXPECT_EQ(back->cause->ranks, example().cause->ranks);
  EXPECT_FALSE(back->cause->cause);
}

TEST(Failure, DamagedBytesAreNone) {
  const std::string whole = encode(example());
  for (size_t length = 0; length < whole.size(); ++length)
    EXPECT_FALSE(decode_failure(whole.substr(0, length))) << length;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x40);
    EXPECT_FALSE(decode_failure(damaged)) << at;
  }
}

TEST(Failure, KeepsTheKindAndTheFirstRanksWithinAFewBytes) {
  Failure failure = example();
  failure.detail = std::string(5'000, 'x');
  for (int rank = 0; rank < 100; ++rank)
    failure.ranks.push_back({.number = rank, .kind = Kind::ended});
  const std::string bytes = encode(failure, 500);
  EXPECT_LE(bytes.size(), 500U);
  const auto back = decode_failure(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->kind, Kind::closed);
  ASSERT_FALSE(back->ranks.empty());
  EXPECT_EQ(back->ranks[0].number, 1);
  EXPECT_TRUE(decode_failure(encode(failure, 64)));
}

TEST(Failure, EveryKindHasAName) {
  for (int kind = 0; kind <= static_cast<int>(Kind::store_lost); ++kind)
    EXPECT_EQ(failure_kind_named(name_of(static_cast<Kind>(kind))), static_cast<Kind>(kind));
  EXPECT_FALSE(failure_kind_named("gone"));
}

TEST(Failure, IsToldInWords) {
  EXPECT_EQ(describe(example()),
            "rank 1 (process 11) has closed the group!: rank 2 (process 12) has ended");
  const auto of = [](Kind kind) {
    return describe({.kind = kind,
                     .ranks = {{.number = 3, .kind = kind, .steps = 287, .calls = 4}},
                     .calls = 5});
  };
  EXPECT_EQ(of(Kind::ended), "rank 3 has ended");
  EXPECT_EQ(of(Kind::left), "rank 3 left its loop after 287 steps");
  EXPECT_EQ(of(Kind::gave_up), "rank 3 has given the group up");
  EXPECT_EQ(of(Kind::unreachable), "rank 3 has ended or cannot be reached any more");
  EXPECT_EQ(of(Kind::late), "rank 3 did not come (it has called 4 of the group's 5 collectives)");
  EXPECT_EQ(of(Kind::stuck), "rank 3 came but does not go on");
  EXPECT_EQ(describe({.kind = Kind::unreachable,
                      .ranks = {{.number = 2, .kind = Kind::unreachable, .host = {2, 3, 5}}}}),
            "rank 2, which speaks for ranks 2, 3 and 5 of its host, has ended or cannot be reached "
            "any more");
}

TEST(Failure, DecidesTheErrorsType) {
  const auto thrown = [](const Failure& failure) -> std::string {
    try {
      throw_failure("barrier cannot finish: ", failure);
    } catch (const PeerLeftError& error) {
      return "left " + std::to_string(error.ranks().at(0));
    } catch (const PeerLostError& error) {
      return "lost " + std::to_string(error.ranks().at(0));
    } catch (const TimeoutError& error) {
      return "late " + std::to_string(error.ranks().at(0));
    }
  };
  const auto of = [](Kind kind) { return Failure{.kind = kind, .ranks = {{1, kind}}}; };
  EXPECT_EQ(thrown(of(Kind::ended)), "lost 1");
  EXPECT_EQ(thrown(of(Kind::left)), "left 1");
  EXPECT_EQ(thrown(of(Kind::late)), "late 1");
  Failure over = of(Kind::closed);
  over.cause = std::make_shared<const Failure>(of(Kind::left));
  EXPECT_EQ(thrown(over), "left 1");
  // Words decide nothing.
  Failure worded = of(Kind::ended);
  worded.detail = left_after(3);
  EXPECT_EQ(thrown(worded), "lost 1");
}

}  // namespace failure_test
}  // namespace lockstep
