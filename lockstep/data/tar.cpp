#include "lockstep/data/tar.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

namespace lockstep {
namespace {

// The header of a member (POSIX ustar): a block of so many bytes, with fields at these places.
constexpr size_t kBlock = 512;
constexpr size_t kNameSize = 100, kSizeAt = 124, kSizeSize = 12, kChecksumAt = 148,
                 kChecksumSize = 8, kTypeAt = 156, kMagicAt = 257, kPrefixAt = 345,
                 kPrefixSize = 155;

using Block = std::array<char, kBlock>;

std::string text_at(const Block& block, size_t at, size_t size) {
  const char* from = block.data() + at;
  return {from, strnlen(from, size)};
}

std::optional<uint64_t> octal_at(const Block& block, size_t at, size_t size) {
  uint64_t value = 0;
  bool any = false;
  for (size_t i = 0; i < size; ++i) {
    const char digit = block[at + i];
    if (digit >= '0' && digit <= '7') {
      value = value * 8 + static_cast<uint64_t>(digit - '0');
      any = true;
    } else if (any || digit != ' ') {
      break;
    }
  }
  return any ? std::optional(value) : std::nullopt;
}

/// The sum of all bytes, with blanks in place of itself.
uint64_t checksum_of(const Block& block) {
  uint64_t sum = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    const bool own = i >= kChecksumAt && i < kChecksumAt + kChecksumSize;
    sum += own ? ' ' : static_cast<uint8_t>(block[i]);
  }
  return sum;
}

void skip(ContentReader& reader, uint64_t size) {
  std::array<char, 64 * 1024> unused;
  while (size > 0) {
    const size_t part = std::min<uint64_t>(size, unused.size());
    reader.read_exact(unused.data(), part, "the archive");
    size -= part;
  }
}

}  // namespace

void read_tar(const std::filesystem::path& path,
              const std::function<bool(const TarMember&)>& wanted,
              const std::function<void(const TarMember&, ContentReader&)>& take) {
  ContentReader reader(path);
  Block block;
  for (;;) {
    const uint64_t start = reader.offset();
    const size_t size = reader.read_some(block.data(), kBlock);
    if (size == 0 && start > 0) break;  // Some archives have no empty blocks at their end.
    if (size < kBlock)
      reader.fail(start, "the archive is cut short; expected a block of 512 bytes");
    if (std::all_of(block.begin(), block.end(), [](char byte) { return byte == 0; })) break;
    const auto checksum = octal_at(block, kChecksumAt, kChecksumSize);
    const auto bytes = octal_at(block, kSizeAt, kSizeSize);
    if (!checksum || *checksum != checksum_of(block) || !bytes) {
      reader.fail(start, "this is no header of a tar archive");
    }
    TarMember member{text_at(block, 0, kNameSize), *bytes};
    const std::string prefix = text_at(block, kPrefixAt, kPrefixSize);
    if (text_at(block, kMagicAt, 6) == "ustar" && !prefix.empty()) {
      member.name = prefix + "/" + member.name;
    }
    const bool regular = block[kTypeAt] == '0' || block[kTypeAt] == '\0';
    const uint64_t content = reader.offset();
    if (regular && wanted(member)) take(member, reader);
    const uint64_t padded = (*bytes + kBlock - 1) / kBlock * kBlock;
    skip(reader, content + padded - reader.offset());
  }
  std::array<char, 64 * 1024> rest;
  while (reader.read_some(rest.data(), rest.size()) > 0) {
  }
  reader.expect_end();
}

}  // namespace lockstep
