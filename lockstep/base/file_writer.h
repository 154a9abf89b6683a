#pragma once

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <string_view>

#include "lockstep/base/file.h"

namespace lockstep {

/// Writes a new file from front to back, in blocks, past the kernel's cache (O_DIRECT) where the
/// file system can. So it has the disk's speed, and the cache keeps what others read. Threads write
/// while the caller gives more. Every call throws SystemError naming the file. A file that is not
/// finished stays as it is. Takes 32 MiB.
class FileWriter {
 public:
  static constexpr size_t kBlock = size_t{8} << 20;

  /// Nothing may have this name yet.
  explicit FileWriter(std::filesystem::path path);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Writes what is left and flushes the file to the disk, but not its folder's entry.
  void finish();

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  void write_block();

  std::filesystem::path path_;
  UniqueFd fd_;
  /// Several, as on a busy machine the caller or a thread comes late.
  static constexpr size_t kBlocks = 4;
  std::unique_ptr<char, Free> blocks_[kBlocks];
  size_t filling_ = 0;  ///< Of the blocks.
  size_t filled_ = 0;
  std::shared_future<void> newest_;  ///< Of what follows. It waits for those before it.
  /// Of each block. Last: they are waited for before the rest goes.
  std::shared_future<void> writing_[kBlocks];
};

}  // namespace lockstep
