#include "lockstep/base/file_writer.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "lockstep/base/error.h"

namespace lockstep {
namespace file_writer_test {

/// No two blocks of it are alike.
std::string bytes_of(size_t size) {
  std::string bytes(size, 0);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>((i * 2654435761u) >> 24);
  return bytes;
}

TEST(FileWriter, WritesWhatItWasGivenInPiecesOfAnySize) {
  constexpr size_t kBlock = FileWriter::kBlock;
  for (const size_t size :
       {size_t{0}, size_t{5}, kBlock, kBlock + 1, 5 * kBlock, 6 * kBlock + 4099}) {
    const TemporaryDirectory folder;
    const std::string bytes = bytes_of(size);
    FileWriter file(folder.path() / "x");
    for (size_t at = 0, piece = 1; at < size; at += piece, piece = piece * 3 + 1)
      file.write(std::string_view(bytes).substr(at, piece));
    file.finish();
    EXPECT_TRUE(read_file(folder.path() / "x") == bytes) << size;
  }
}

TEST(FileWriter, IsForNewFiles) {
  const TemporaryDirectory folder;
  write_file_atomically(folder.path() / "x", "old");
  EXPECT_THROW(FileWriter(folder.path() / "x"), SystemError);
  EXPECT_THROW(FileWriter(folder.path() / "missing" / "x"), SystemError);
  EXPECT_EQ(read_file(folder.path() / "x"), "old");
}

/// The limit stands for a full disk: the thread's error comes out.
TEST(FileWriter, SaysWhereTheDiskIsFull) {
  const TemporaryDirectory folder;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit small = {FileWriter::kBlock + 5000, before.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_DFL);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string bytes = bytes_of(6 * FileWriter::kBlock);
  FileWriter file(folder.path() / "x");
  EXPECT_THROW(
      {
        file.write(bytes);
        file.finish();
      },
      SystemError);
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
}

}  // namespace file_writer_test
}  // namespace lockstep
