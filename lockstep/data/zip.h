#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/content_reader.h"

namespace lockstep {

/// One file in a zip archive, as the archive's central directory has it.
struct ZipMember {
  std::string name;
  bool deflated = false;  ///< Else stored as it is.
  uint32_t crc32 = 0;
  uint64_t packed_size = 0;
  uint64_t size = 0;
  uint64_t header_offset = 0;  ///< Of the local header in front of the member's bytes.
};

/// A zip archive, zip64 included, that is read member by member (PKWARE's APPNOTE 6.3.10, sections
/// 4.3 and 4.5). It is what numpy.savez writes.
/// Throws DataError for an archive that is truncated, damaged, encrypted, split, or packed by other
/// methods than "stored" and "deflated". The error names the file, the offset and what was
/// expected.
class ZipArchive {
 public:
  /// The file, or one that lies within it, at `size` bytes from `begin` on.
  explicit ZipArchive(std::filesystem::path path, uint64_t begin = 0,
                      std::optional<uint64_t> size = {});

  const std::vector<ZipMember>& members() const { return members_; }
  /// Where its content lies in the file, for a ContentReader, whose expect_end() compares the
  /// checksum.
  ContentOptions place_of(const ZipMember& member) const;

 private:
  struct Directory {
    uint64_t offset = 0;
    uint64_t size = 0;
    uint64_t count = 0;
  };

  std::string place(uint64_t offset) const;
  std::string bytes_at(uint64_t offset, uint64_t size, const std::string& what) const;
  Directory find_directory() const;
  void read_directory(const Directory& directory);

  std::filesystem::path path_;
  uint64_t begin_ = 0;  ///< In the file. All other offsets count from here.
  uint64_t size_ = 0;
  std::vector<ZipMember> members_;
  bool has_checksums_ = false;  ///< Else each is 0: PyTorch was told to compute none.
};

}  // namespace lockstep
