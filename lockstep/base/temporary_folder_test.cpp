#include "lockstep/base/temporary_folder.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace temporary_folder_test {

class TemporaryFolder : public testing::Test {
 protected:
  ~TemporaryFolder() override {
    if (before_) {
      setenv("TMPDIR", before_->c_str(), 1);
    } else {
      unsetenv("TMPDIR");
    }
  }

 private:
  std::optional<std::string> before_ = env_string("TMPDIR");
};

TEST_F(TemporaryFolder, IsTmpdir) {
  const TemporaryDirectory folder;
  setenv("TMPDIR", folder.path().c_str(), 1);
  EXPECT_EQ(temporary_folder(), folder.path());
  const TemporaryDirectory within;
  EXPECT_EQ(within.path().parent_path(), folder.path());
}

TEST_F(TemporaryFolder, UnsetOrEmptyIsTmp) {
  unsetenv("TMPDIR");
  EXPECT_EQ(temporary_folder(), "/tmp");
  setenv("TMPDIR", "", 1);
  EXPECT_EQ(temporary_folder(), "/tmp");
}

TEST_F(TemporaryFolder, ThatIsMissingOrNoFolderIsReplaced) {
  setenv("TMPDIR", "/nowhere/at/all", 1);
  EXPECT_EQ(temporary_folder(), "/tmp");
  EXPECT_EQ(TemporaryDirectory().path().parent_path(), "/tmp");
  setenv("TMPDIR", "/dev/null", 1);
  EXPECT_EQ(temporary_folder(), "/tmp");
}

}  // namespace temporary_folder_test
}  // namespace lockstep
