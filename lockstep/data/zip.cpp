#include "lockstep/data/zip.h"

#include <algorithm>
#include <string_view>

#include "lockstep/base/error.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kEndRecordSize = 22;
constexpr uint64_t kLongestComment = 65535;
constexpr uint64_t kZip64LocatorSize = 20;
constexpr uint64_t kZip64RecordSize = 56;
constexpr uint64_t kDirectoryEntrySize = 46;
constexpr uint64_t kLocalHeaderSize = 30;
constexpr uint32_t kSaturated32 = 0xffffffff;  // "see the zip64 field"
constexpr std::string_view kEndSignature("PK\x05\x06", 4);
constexpr std::string_view kZip64LocatorSignature("PK\x06\x07", 4);
constexpr std::string_view kZip64RecordSignature("PK\x06\x06", 4);
constexpr std::string_view kDirectorySignature("PK\x01\x02", 4);
constexpr std::string_view kLocalSignature("PK\x03\x04", 4);

/// A number of `size` bytes; the caller has checked that they are there.
uint64_t number(std::string_view bytes, size_t offset, size_t size) {
  uint64_t value = 0;
  bytes.copy(reinterpret_cast<char*>(&value), size, offset);
  return value;
}

/// Replaces the saturated fields of a member by those of its zip64 extra field (4.5.3). False when
/// one is missing.
bool apply_zip64(ZipMember& member, std::string_view extra) {
  constexpr uint64_t kZip64Tag = 1;
  std::string_view fields;
  while (extra.size() >= 4) {
    const uint64_t tag = number(extra, 0, 2);
    const uint64_t size = number(extra, 2, 2);
    if (size > extra.size() - 4) return false;
    if (tag == kZip64Tag) fields = extra.substr(4, size);
    extra.remove_prefix(4 + size);
  }
  for (uint64_t* field : {&member.size, &member.packed_size, &member.header_offset}) {
    if (*field != kSaturated32) continue;
    if (fields.size() < 8) return false;
    *field = number(fields, 0, 8);
    fields.remove_prefix(8);
  }
  return true;
}

}  // namespace

ZipArchive::ZipArchive(fs::path path, uint64_t begin, std::optional<uint64_t> size)
    : path_(std::move(path)), begin_(begin) {
  std::error_code error;
  size_ = size ? *size : fs::file_size(path_, error);
  if (error) throw SystemError("cannot read " + path_.string(), error.value());
  read_directory(find_directory());
}

std::string ZipArchive::place(uint64_t offset) const {
  return path_.string() + ", byte " + std::to_string(begin_ + offset);
}

std::string ZipArchive::bytes_at(uint64_t offset, uint64_t size, const std::string& what) const {
  if (offset > size_ || size > size_ - offset) {
    throw DataError(place(std::min(offset, size_)) + ": expected " + std::to_string(size) +
                    " bytes of " + what + " at byte " + std::to_string(offset) +
                    ", but the archive has " + std::to_string(size_));
  }
  ContentReader reader(
      path_, {.packing = ContentOptions::Packing::plain, .begin = begin_ + offset, .size = size});
  std::string bytes(size, '\0');
  reader.read_exact(bytes.data(), bytes.size(), what);
  return bytes;
}

ZipArchive::Directory ZipArchive::find_directory() const {
  const uint64_t tail_size = std::min(size_, kZip64LocatorSize + kEndRecordSize + kLongestComment);
  const std::string tail = bytes_at(size_ - tail_size, tail_size, "the archive's end");
  const size_t found = tail.rfind(kEndSignature);
  if (found == std::string::npos || tail.size() - found < kEndRecordSize) {
    throw DataError(
        place(size_) + ": the end of a zip archive was expected here and is not there",
        "the file is truncated, or no zip file as npz and .pt files (since PyTorch 1.6) are");
  }
  const bool is_zip64 = found >= kZip64LocatorSize &&
                        tail.compare(found - kZip64LocatorSize, kZip64LocatorSignature.size(),
                                     kZip64LocatorSignature) == 0;
  if (!is_zip64) {
    return {.offset = number(tail, found + 16, 4),
            .size = number(tail, found + 12, 4),
            .count = number(tail, found + 10, 2)};
  }
  const uint64_t record_start = number(tail, found - kZip64LocatorSize + 8, 8);
  const std::string record = bytes_at(record_start, kZip64RecordSize, "the zip64 end record");
  if (!record.starts_with(kZip64RecordSignature)) {
    throw DataError(place(record_start) +
                    ": expected a zip64 end record (PK 06 06): the archive is damaged");
  }
  return {.offset = number(record, 48, 8),
          .size = number(record, 40, 8),
          .count = number(record, 32, 8)};
}

void ZipArchive::read_directory(const Directory& directory) {
  const std::string bytes = bytes_at(directory.offset, directory.size, "the archive's directory");
  uint64_t position = 0;
  for (uint64_t i = 0; i < directory.count; ++i) {
    const auto fail = [&](const std::string& complaint) {
      throw DataError(place(directory.offset + position) + ": " + complaint);
    };
    const std::string_view entry = std::string_view(bytes).substr(position);
    if (entry.size() < kDirectoryEntrySize || !entry.starts_with(kDirectorySignature)) {
      fail("expected entry " + std::to_string(i + 1) + " of " + std::to_string(directory.count) +
           " of the archive's directory (PK 01 02): the archive is damaged");
    }
    const uint64_t flags = number(entry, 8, 2);
    const uint64_t method = number(entry, 10, 2);
    const uint64_t name_size = number(entry, 28, 2);
    const uint64_t extra_size = number(entry, 30, 2);
    const uint64_t comment_size = number(entry, 32, 2);
    const uint64_t entry_size = kDirectoryEntrySize + name_size + extra_size + comment_size;
    if (entry.size() < entry_size) fail("the archive's directory ends within this entry");
    ZipMember member{.name = std::string(entry.substr(kDirectoryEntrySize, name_size)),
                     .deflated = method == 8,
                     .crc32 = static_cast<uint32_t>(number(entry, 16, 4)),
                     .packed_size = number(entry, 20, 4),
                     .size = number(entry, 24, 4),
                     .header_offset = number(entry, 42, 4)};
    if (flags & 1) fail("'" + member.name + "' is encrypted; expected a member without password");
    if (method != 0 && method != 8) {
      fail("'" + member.name + "' is packed by method " + std::to_string(method) +
           "; expected 0 (stored) or 8 (deflated)");
    }
    if (!apply_zip64(member, entry.substr(kDirectoryEntrySize + name_size, extra_size))) {
      fail("'" + member.name + "' lacks the sizes of its zip64 field: the archive is damaged");
    }
    has_checksums_ |= member.crc32 != 0;
    members_.push_back(std::move(member));
    position += entry_size;
  }
}

ContentOptions ZipArchive::place_of(const ZipMember& member) const {
  const std::string what = "the header of '" + member.name + "'";
  const std::string header = bytes_at(member.header_offset, kLocalHeaderSize, what);
  if (!header.starts_with(kLocalSignature)) {
    throw DataError(place(member.header_offset) + ": expected " + what +
                    " (PK 03 04): the archive is damaged");
  }
  const uint64_t begin =
      member.header_offset + kLocalHeaderSize + number(header, 26, 2) + number(header, 28, 2);
  if (begin > size_ || member.packed_size > size_ - begin) {
    throw DataError(place(std::min(begin, size_)) + ": expected the " +
                    std::to_string(member.packed_size) + " bytes of '" + member.name +
                    "', but the file ends at byte " + std::to_string(size_));
  }
  using Packing = ContentOptions::Packing;
  return {.packing = member.deflated ? Packing::deflate : Packing::plain,
          .begin = begin_ + begin,
          .size = member.packed_size,
          .crc32 = has_checksums_ ? std::optional(member.crc32) : std::nullopt,
          .member = member.name};
}

}  // namespace lockstep
