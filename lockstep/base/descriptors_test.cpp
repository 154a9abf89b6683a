#include "lockstep/base/descriptors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace descriptors_test {

/// Puts the soft limit back; the hard one stays as it is.
class SoftLimit {
 public:
  SoftLimit() { ::getrlimit(RLIMIT_NOFILE, &before_); }
  ~SoftLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  rlim_t hard() const { return before_.rlim_max; }
  static rlim_t now() {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
  }
  void set(int64_t soft) const {
    const rlimit limit{static_cast<rlim_t>(soft), before_.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }

 private:
  rlimit before_{};
};

TEST(Descriptors, AreCounted) {
  const int64_t before = open_descriptors();
  const UniqueFd one(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const UniqueFd two(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(open_descriptors(), before + 2);
}

TEST(Descriptors, TheSoftLimitIsRaisedOnlyWhereItDoesNotSuffice) {
  const SoftLimit limit;
  const int64_t used = open_descriptors();
  ASSERT_GT(limit.hard(), static_cast<rlim_t>(used + 20));
  limit.set(used + 10);
  make_room_for_descriptors(10, "test");
  EXPECT_EQ(SoftLimit::now(), static_cast<rlim_t>(used + 10));
  make_room_for_descriptors(20, "test");
  EXPECT_EQ(SoftLimit::now(), static_cast<rlim_t>(used + 20));
}

TEST(Descriptors, TooLowAHardLimitIsNamed) {
  const SoftLimit limit;
  if (limit.hard() == RLIM_INFINITY) GTEST_SKIP() << "no hard limit";
  const rlim_t before = SoftLimit::now();
  try {
    make_room_for_descriptors(static_cast<int64_t>(limit.hard()), "4 ranks");
    FAIL() << "no error";
  } catch (const Error& error) {
    const auto needed = static_cast<int64_t>(limit.hard()) + open_descriptors();
    EXPECT_THAT(error.what(),
                testing::AllOf(testing::StartsWith("4 ranks: " + std::to_string(needed)),
                               testing::HasSubstr("`ulimit -n` allows " + std::to_string(before)),
                               testing::HasSubstr("hard limit " + std::to_string(limit.hard()))));
  }
  EXPECT_EQ(SoftLimit::now(), before);
}

}  // namespace descriptors_test
}  // namespace lockstep
