#include "lockstep/base/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "lockstep/base/error.h"

namespace lockstep {
namespace file_test {

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

/// The umask while one lives.
class Umask {
 public:
  explicit Umask(mode_t mask) : before_(::umask(mask)) {}
  ~Umask() { ::umask(before_); }

 private:
  mode_t before_;
};

fs::perms permissions(const fs::path& path) {
  return fs::status(path).permissions();
}

TEST(File, WhatIsMadeHasThePermissionsOfAnyNewFile) {
  const TemporaryDirectory folder;
  const Umask mask(027);
  write_file_atomically(folder.path() / "file", "x");
  EXPECT_EQ(permissions(folder.path() / "file"), fs::perms(0640));
  EXPECT_EQ(permissions(make_unique_folder(folder.path() / "folder")), fs::perms(0750));
}

TEST(File, OtherThreadsKeepTheirUmaskMeanwhile) {
  const TemporaryDirectory folder;
  const Umask mask(077);
  std::atomic<bool> done{false};
  std::atomic<int> open_to_others{0};
  std::thread other([&] {
    for (int i = 0; !done; ++i) {
      const fs::path path = folder.path() / ("other" + std::to_string(i));
      const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
      if (permissions(path) != fs::perms(0600)) ++open_to_others;
      fs::remove(path);
    }
  });
  for (int i = 0; i < 5000; ++i) AtomicFile(folder.path() / "file");
  done = true;
  other.join();
  EXPECT_EQ(open_to_others, 0);
}

TEST(File, AFolderThatCannotBeFlushedIsNoReasonToTakeAFileForNotWritten) {
  const TemporaryDirectory folder;
  fs::permissions(folder.path(), fs::perms(0777));
  const fs::path hidden = folder.path() / "hidden";
  fs::create_directory(hidden);
  const pid_t child = ::fork();
  if (child == 0) {
    // Root may read every folder.
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && (::chown(hidden.c_str(), kNobody, kNobody) != 0 ||
                             ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) {
      ::_exit(77);
    }
    if (::chmod(hidden.c_str(), 0300) != 0 || ::open(hidden.c_str(), O_RDONLY) >= 0) ::_exit(77);
    try {
      write_file_atomically(hidden / "file", "x");
    } catch (const std::exception&) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  fs::permissions(hidden, fs::perms(0700));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no folder can be made unreadable here";
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_file(hidden / "file"), "x");
}

TEST(File, ALongNameIsNoObstacle) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / std::string(255, 'n');
  write_file_atomically(path, "x");
  EXPECT_EQ(read_file(path), "x");
}

TEST(File, WhatHasNoEndIsNotReadForEver) {
  EXPECT_THAT([] { read_file("/dev/zero"); }, testing::ThrowsMessage<DataError>(testing::HasSubstr(
                                                  "/dev/zero has more than 16777216 bytes")));
}

TEST(File, NoMoreIsReadThanAskedFor) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / "file";
  write_file_atomically(path, "12345");
  EXPECT_EQ(read_file(path, 5), "12345");
  EXPECT_THROW(read_file(path, 4), DataError);
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

}  // namespace file_test
}  // namespace lockstep
