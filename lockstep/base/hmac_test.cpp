#include "lockstep/base/hmac.h"

#include <gtest/gtest.h>

#include "lockstep/base/used_numbers.h"

namespace lockstep {
namespace hmac_test {

TEST(Hmac, IsThatOfTheStandard) {
  // RFC 4231, test case 2.
  const std::string code = hmac_sha256("Jefe", "what do ya want for nothing?");
  EXPECT_EQ(code.substr(0, 4), std::string("\x5b\xdc\xc1\x46", 4));
  EXPECT_EQ(code.size(), 32U);
  EXPECT_TRUE(same_code(code, code));
  EXPECT_FALSE(same_code(code, code.substr(1)));
  EXPECT_FALSE(same_code(code, hmac_sha256("Jefe", "what do ya want?")));
}

TEST(UsedNumbers, CountOnceInAnyOrder) {
  using Used = UsedNumbers<64>;
  Used used;
  EXPECT_TRUE(used.use(3));
  EXPECT_TRUE(used.use(1));
  EXPECT_FALSE(used.use(3));
  EXPECT_FALSE(used.use(1));
  EXPECT_TRUE(used.use(2));
  constexpr uint64_t kFar = 10 * Used::kWindow;
  EXPECT_TRUE(used.use(kFar));
  EXPECT_FALSE(used.use(4));  // So far behind that it counts as used.
  EXPECT_TRUE(used.use(kFar - Used::kWindow + 1));
  EXPECT_FALSE(used.use(kFar));
}

}  // namespace hmac_test
}  // namespace lockstep
