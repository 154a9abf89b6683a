#include "lockstep/base/env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace env_test {

class EnvTest : public testing::Test {
 protected:
  void TearDown() override { unsetenv("LOCKSTEP_ENV_TEST"); }
  void set(const char* value) { setenv("LOCKSTEP_ENV_TEST", value, 1); }
};

TEST_F(EnvTest, UnsetAndEmptyAreNone) {
  EXPECT_FALSE(env_string("LOCKSTEP_ENV_TEST"));
  set("");
  EXPECT_FALSE(env_string("LOCKSTEP_ENV_TEST"));
  EXPECT_FALSE(env_int("LOCKSTEP_ENV_TEST"));
  EXPECT_FALSE(env_flag("LOCKSTEP_ENV_TEST"));
}

TEST_F(EnvTest, IntegersAreParsedWhole) {
  set("42");
  EXPECT_EQ(env_int("LOCKSTEP_ENV_TEST", 0, 42), 42);
  set("42x");
  EXPECT_THROW(env_int("LOCKSTEP_ENV_TEST"), UsageError);
}

TEST_F(EnvTest, RangeErrorNamesVariableValueAndRange) {
  set("-1");
  try {
    env_int("LOCKSTEP_ENV_TEST", 0, 9);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("LOCKSTEP_ENV_TEST='-1'"));
    EXPECT_THAT(error.what(), testing::HasSubstr("at least 0 and at most 9"));
  }
}

TEST_F(EnvTest, FlagsTakeTheUsualWords) {
  for (const char* yes : {"1", "True", "YES", "on"}) {
    set(yes);
    EXPECT_TRUE(env_flag("LOCKSTEP_ENV_TEST")) << yes;
  }
  for (const char* no : {"0", "false", "No", "OFF"}) {
    set(no);
    EXPECT_FALSE(env_flag("LOCKSTEP_ENV_TEST")) << no;
  }
  set("maybe");
  EXPECT_THROW(env_flag("LOCKSTEP_ENV_TEST"), UsageError);
}

}  // namespace env_test
}  // namespace lockstep
