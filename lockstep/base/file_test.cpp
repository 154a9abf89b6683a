#include "lockstep/base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

size_t entries(const fs::path& folder) {
  return static_cast<size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(File, AtomicFileAppearsOnlyAtCommit) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / "a.txt";
  {
    AtomicFile file(path);
    file.write("half");
    EXPECT_FALSE(fs::exists(path));
  }
  EXPECT_EQ(entries(folder.path()), 0u);
  write_file_atomically(path, "whole");
  EXPECT_EQ(read_file(path), "whole");
  EXPECT_EQ(entries(folder.path()), 1u);
}

TEST(File, AtomicFileReplacesOldContent) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / "a.txt";
  write_file_atomically(path, "old");
  write_file_atomically(path, "new");
  EXPECT_EQ(read_file(path), "new");
}

TEST(File, AtomicFileFollowsALink) {
  const TemporaryDirectory folder;
  fs::create_symlink("real.txt", folder.path() / "link.txt");
  write_file_atomically(folder.path() / "link.txt", "x");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "link.txt"));
  EXPECT_EQ(read_file(folder.path() / "real.txt"), "x");
}

TEST(File, AtomicFileLeavesAPipeAlone) {
  const TemporaryDirectory folder;
  const fs::path pipe = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(write_file_atomically(pipe, "x"), Error);
  EXPECT_TRUE(fs::is_fifo(pipe));
}

TEST(File, MissingFolderIsNamed) {
  const TemporaryDirectory folder;
  try {
    write_file_atomically(folder.path() / "none" / "a.txt", "x");
    FAIL() << "no error";
  } catch (const SystemError& error) {
    EXPECT_EQ(error.errno_value(), ENOENT);
    EXPECT_THAT(error.what(), testing::HasSubstr("none/a.txt"));
  }
}

TEST(File, FullDiskIsReported) {
  UniqueFd full(::open("/dev/full", O_WRONLY));
  if (!full) GTEST_SKIP() << "this machine has no /dev/full";
  const std::string block(1 << 16, 'x');
  EXPECT_THROW(write_all(full.get(), block.data(), block.size(), "/dev/full"), SystemError);
}

TEST(File, TemporaryDirectoryIsRemoved) {
  fs::path path;
  {
    const TemporaryDirectory folder;
    path = folder.path();
    write_file_atomically(path / "a", "x");
  }
  EXPECT_FALSE(fs::exists(path));
}

}  // namespace
}  // namespace lockstep
