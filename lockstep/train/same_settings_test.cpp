#include "lockstep/train/same_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace same_settings_test {

using test::run_group;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

class SameSettings : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, SameSettings, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

TEST_P(SameSettings, EachDifferenceIsNamedWithBothRanksAndValuesOnAllRanks) {
  run_group(3,
            [](ProcessGroup group) {
              Settings mine{{"--seed", group.rank() == 2 ? "7" : "0"}, {"--optimizer", "sgd"}};
              if (group.rank() == 1) mine["--lr"] = "0.1";
              EXPECT_THAT([&] { check_same_settings(mine, group); },
                          ThrowsMessage<MismatchError>(::testing::AllOf(
                              HasSubstr("--seed is 0 on rank 0 and 7 on rank 2"),
                              HasSubstr("--lr is not set on rank 0 and 0.1 on rank 1"),
                              Not(HasSubstr("--optimizer")))));
            },
            {.backend = GetParam()});
}

TEST_P(SameSettings, TheSameOnesPass) {
  run_group(2,
            [](ProcessGroup group) {
              check_same_settings({{"--seed", "0"}}, group);
            },
            {.backend = GetParam()});
}

}  // namespace same_settings_test
}  // namespace lockstep
