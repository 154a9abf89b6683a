#pragma once

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <string_view>

#include "lockstep/base/file.h"

namespace lockstep {

/// Writes a new file from front to back, in blocks of 4 MiB, past the kernel's cache (O_DIRECT)
/// where the file system can. So it has the disk's speed, and the cache keeps what others read. A
/// thread writes a block while the caller gives the next. Every call throws SystemError naming the
/// file. A file that is not finished stays as it is.
class FileWriter {
 public:
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
  void wait();

  std::filesystem::path path_;
  UniqueFd fd_;
  std::unique_ptr<char, Free> blocks_[2];
  int filling_ = 0;  ///< Of the blocks.
  size_t filled_ = 0;
  std::future<void> writing_;  ///< Last: it is waited for before the rest goes.
};

}  // namespace lockstep
