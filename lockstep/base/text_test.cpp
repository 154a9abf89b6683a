#include "lockstep/base/text.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Text, ParseIntTakesOnlyWholeNumbers) {
  EXPECT_EQ(parse_int("-12"), -12);
  EXPECT_FALSE(parse_int("12 "));
  EXPECT_FALSE(parse_int(""));
  EXPECT_FALSE(parse_int("99999999999999999999"));
}

TEST(Text, ParseDouble) {
  EXPECT_EQ(parse_double("1e-3"), 1e-3);
  EXPECT_FALSE(parse_double("1e-3x"));
}

TEST(Text, SplitAndJoinAreInverse) {
  EXPECT_EQ(split("a,,b", ','), (std::vector<std::string>{"a", "", "b"}));
  EXPECT_EQ(join(split("a,,b", ','), ","), "a,,b");
}

TEST(Text, NearestFindsTyposAndSwaps) {
  const std::vector<std::string> known = {"--max-epochs", "--batch-size", "--lr"};
  EXPECT_EQ(nearest("--max-epoch", known), "--max-epochs");
  EXPECT_EQ(nearest("--bacth-size", known), "--batch-size");
  EXPECT_FALSE(nearest("--colour", known));
}

TEST(Text, UnknownWordListsWhatIsKnownWhenNothingIsNear) {
  EXPECT_EQ(unknown_word("model", "mpl", {"mlp", "linear"}),
            "unknown model 'mpl'; did you mean 'mlp'?");
  EXPECT_EQ(unknown_word("model", "resnet50", {"mlp", "linear"}),
            "unknown model 'resnet50'; known: mlp, linear");
}

TEST(Text, HumanUnits) {
  EXPECT_EQ(human_bytes(12), "12 B");
  EXPECT_EQ(human_bytes(437'000), "437 KB");
  EXPECT_EQ(human_bytes(1'500'000'000), "1.5 GB");
  EXPECT_EQ(human_seconds(0.45), "450ms");
  EXPECT_EQ(human_seconds(12.34), "12.3s");
  EXPECT_EQ(human_seconds(187), "3m07s");
  EXPECT_EQ(human_seconds(7500), "2h05m");
}

}  // namespace
}  // namespace lockstep
