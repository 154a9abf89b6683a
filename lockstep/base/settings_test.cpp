#include "lockstep/base/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep {
namespace settings_test {

using std::chrono::milliseconds;

constexpr const char* kNames[] = {"LOCKSTEP_TIMEOUT", "LOCKSTEP_DEBUG", "LOCKSTEP_LOG_LEVEL"};

class Settings : public testing::Test {
 protected:
  void SetUp() override { TearDown(); }
  void TearDown() override {
    for (const char* name : kNames) unsetenv(name);
  }
  static std::string refusal(const char* name, const char* value) {
    setenv(name, value, 1);
    std::string text;
    try {
      check_settings();
    } catch (const UsageError& error) {
      text = error.what();
    }
    unsetenv(name);
    return text;
  }
};

TEST_F(Settings, UnsetAndEmptyAreNone) {
  for (const char* name : kNames) setenv(name, "", 1);
  EXPECT_FALSE(timeout_setting());
  EXPECT_FALSE(debug_setting());
  EXPECT_FALSE(log_level_setting());
}

TEST_F(Settings, GoodOnesAreRead) {
  setenv("LOCKSTEP_TIMEOUT", "2.5", 1);
  setenv("LOCKSTEP_DEBUG", "DETAIL", 1);
  setenv("LOCKSTEP_LOG_LEVEL", "warning", 1);
  EXPECT_NO_THROW(check_settings());
  EXPECT_EQ(timeout_setting(), milliseconds(2500));
  EXPECT_EQ(debug_setting(), "detail");
  EXPECT_EQ(log_level_setting(), "warning");
}

TEST_F(Settings, BadOnesAreNamedWithWhatWasExpected) {
  for (const char* value : {"soon", "0", "-1", "nan", "inf", "1e10", "5s"}) {
    EXPECT_THAT(refusal("LOCKSTEP_TIMEOUT", value),
                testing::AllOf(testing::HasSubstr("LOCKSTEP_TIMEOUT='" + std::string(value) + "'"),
                               testing::HasSubstr("from 0.001 to 1000000 seconds")));
  }
  for (const auto& [name, value, says] :
       {std::array{"LOCKSTEP_DEBUG", "detial", "did you mean 'detail'"},
        std::array{"LOCKSTEP_LOG_LEVEL", "warn", "did you mean 'warning'"},
        std::array{"LOCKSTEP_LOG_LEVEL", "7", "it takes debug, info, warning, error, quiet"}}) {
    EXPECT_THAT(refusal(name, value),
                testing::AllOf(testing::HasSubstr(name), testing::HasSubstr(says)));
  }
}

}  // namespace settings_test
}  // namespace lockstep
