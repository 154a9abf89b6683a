#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/hash.h"

namespace lockstep {

/// Which bytes of a file make up the content and how they are packed.
struct ContentOptions {
  enum class Packing {
    detect_gzip,  ///< gzip when the first two bytes say so (the name does not matter), else plain.
    plain,        ///< As they are, whatever they start with.
    deflate,      ///< Raw deflate, as in zip archives.
  };
  Packing packing = Packing::detect_gzip;
  uint64_t begin = 0;                  ///< The first byte, counted from the start of the file.
  std::optional<uint64_t> size = {};   ///< How many bytes; none: up to the end of the file.
  std::optional<uint32_t> crc32 = {};  ///< Of the content; compared by expect_end().
  std::string member = {};             ///< The name inside an archive, for messages.
};

/// Reads the content of a file from front to back and inflates it on the way, straight into the
/// caller's memory. One thread at a time.
///
/// Every complaint is a DataError that names the file, the offset in its (decompressed) content and
/// what was expected there. Only a file that cannot be opened or read is a SystemError.
class ContentReader {
 public:
  explicit ContentReader(std::filesystem::path path, ContentOptions options = {});
  /// Reads what the caller has unpacked, less than 4 GiB, and no file. `path` is for messages.
  /// They count bytes as of a packed file. `content` must outlive it.
  ContentReader(std::filesystem::path path, std::span<const std::byte> content);
  ~ContentReader();
  ContentReader(const ContentReader&) = delete;
  ContentReader& operator=(const ContentReader&) = delete;

  /// Reads exactly `size` bytes. `what` says of what, for the message ("the header", ...).
  void read_exact(void* out, size_t size, std::string_view what);
  /// Reads up to `size` bytes. Fewer only at the end.
  size_t read_some(void* out, size_t size);
  /// Throws when there is content left or when the content's checksum (gzip's own or
  /// ContentOptions::crc32) is another.
  void expect_end();

  bool compressed() const;
  /// The offset of the next byte in the content.
  uint64_t offset() const { return offset_; }
  /// No more content follows than this: what is left of the file or, for deflate, the most that
  /// could be made of the whole file. Check a size from a header against it before memory is taken.
  uint64_t remaining_limit() const;

  /// Throws DataError "PATH, byte OFFSET: COMPLAINT".
  [[noreturn]] void fail(uint64_t offset, const std::string& complaint,
                         const std::string& hint = {}) const;

 private:
  struct Input;

  void start_inflating();
  size_t read_file(unsigned char* out, size_t size);
  size_t fill();
  size_t read_unpacked(unsigned char* out, size_t size);
  size_t inflate_into(unsigned char* out, size_t size);

  std::filesystem::path path_;
  ContentOptions options_;
  std::unique_ptr<Input> input_;
  uint64_t offset_ = 0;
  uint32_t crc32_ = 0;
};

/// The hash of a file's bytes, read in pieces: it may be larger than the memory that is free.
std::string content_hash(const std::filesystem::path& path, Hasher::Algorithm algorithm);

}  // namespace lockstep
