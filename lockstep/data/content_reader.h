#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

/// Reads the content of a file from front to back and inflates it on the way when it is gzip (told
/// by its first bytes, not by its name), straight into the caller's memory. One thread at a time.
///
/// Every complaint is a DataError that names the file, the offset in its (decompressed) content and
/// what was expected there; only a file that cannot be opened or read is a SystemError.
class ContentReader {
 public:
  /// `inflate_gzip` false: the content is the file's bytes, whatever they start with.
  explicit ContentReader(std::filesystem::path path, bool inflate_gzip = true);
  ~ContentReader();
  ContentReader(const ContentReader&) = delete;
  ContentReader& operator=(const ContentReader&) = delete;

  /// Reads exactly `size` bytes; `what` says of what, for the message ("the header", ...).
  void read_exact(void* out, size_t size, std::string_view what);
  /// Reads up to `size` bytes; fewer only at the end.
  size_t read_some(void* out, size_t size);
  /// Throws when there is content left. For gzip this is where the checksum of the last bytes is
  /// known to be right.
  void expect_end();

  const std::filesystem::path& path() const { return path_; }
  bool compressed() const;
  /// The offset of the next byte in the content.
  uint64_t offset() const { return offset_; }
  /// No content is longer than this: the file's size or, for gzip, what deflate can make of it at
  /// most. Check a size from a header against it before memory is taken for it.
  uint64_t size_limit() const;

  /// Throws DataError "PATH, byte OFFSET: COMPLAINT".
  [[noreturn]] void fail(uint64_t offset, const std::string& complaint,
                         const std::string& hint = {}) const;

 private:
  struct Inflater;

  size_t fill();
  size_t read_plain(char* out, size_t size);
  size_t inflate_into(char* out, size_t size);

  std::filesystem::path path_;
  std::unique_ptr<Inflater> inflater_;
  uint64_t offset_ = 0;
};

}  // namespace lockstep
