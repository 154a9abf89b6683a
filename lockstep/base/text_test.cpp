#include "lockstep/base/text.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace text_test {

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

TEST(Text, RandomTextIsHexadecimalAndNeverTheSame) {
  const std::string text = random_hex(16);
  EXPECT_EQ(text.size(), 32U);
  EXPECT_EQ(text.find_first_not_of("0123456789abcdef"), std::string::npos) << text;
  EXPECT_NE(text, random_hex(16));
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

TEST(Text, SecondsAsAUserWritesThem) {
  EXPECT_EQ(seconds_text(std::chrono::milliseconds(1500)), "1.5 s");
  EXPECT_EQ(seconds_text(std::chrono::milliseconds(120'000)), "120 s");
}

TEST(Text, AnEndpointOfIpv6HasBrackets) {
  EXPECT_EQ(endpoint_text("host", 29500), "host:29500");
  EXPECT_EQ(endpoint_text("fe80::1", 1), "[fe80::1]:1");
  const auto parsed = parse_endpoint(endpoint_text("::1", 65535));
  ASSERT_TRUE(parsed);
  EXPECT_EQ(*parsed, std::pair(std::string("[::1]"), uint16_t{65535}));
}

}  // namespace text_test
}  // namespace lockstep
