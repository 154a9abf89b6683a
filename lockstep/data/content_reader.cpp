#include "lockstep/data/content_reader.h"

#include <fcntl.h>
#include <isa-l/crc.h>
#include <isa-l/igzip_lib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr size_t kBufferSize = 1 << 18;
/// Deflate's best ratio is just under 1032 to 1 (zlib's technical notes).
constexpr uint64_t kDeflateRatio = 1032;
constexpr size_t kLargestPiece = 1u << 30;  // ISA-L counts in 32 bits

bool starts_gzip(const unsigned char* bytes, size_t size) {
  return size >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b;
}

}  // namespace

struct ContentReader::Input {
  UniqueFd fd;
  uint64_t position = 0;  ///< Of the next byte to take from the file.
  uint64_t end = 0;
  uint64_t packed_size = 0;
  bool inflating = false;
  bool unpacked_before = false;  ///< By the caller.
  bool stream_done = false;      ///< A deflate stream ended well; another gzip member may follow.
  std::vector<unsigned char> buffer;  ///< Of a packed file.
  /// next_in and avail_in are the unread part of `buffer`, or of what the caller has unpacked.
  inflate_state stream{};
};

ContentReader::ContentReader(fs::path path, ContentOptions options)
    : path_(std::move(path)), options_(std::move(options)), input_(std::make_unique<Input>()) {
  Input& in = *input_;
  // Without O_NONBLOCK a pipe that nobody writes to would be waited for.
  in.fd.reset(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!in.fd) throw SystemError("cannot open " + path_.string(), errno);
  struct stat status {};
  if (::fstat(in.fd.get(), &status) != 0) {
    throw SystemError("cannot read " + path_.string(), errno);
  }
  if (!S_ISREG(status.st_mode)) {
    throw DataError(path_.string() + " is " + (S_ISDIR(status.st_mode) ? "a folder" : "no file") +
                        "; expected a regular file, whose size is known",
                    "copy what comes from a pipe or a device to a file first");
  }
  const auto file_size = static_cast<uint64_t>(status.st_size);
  in.position = std::min(options_.begin, file_size);
  const uint64_t left = file_size - in.position;
  in.end = in.position + std::min(left, options_.size.value_or(left));
  in.packed_size = in.end - in.position;
  using Packing = ContentOptions::Packing;
  bool packed = options_.packing == Packing::deflate;
  if (options_.packing == Packing::detect_gzip) {
    unsigned char start[2] = {};
    const size_t read = read_file(start, sizeof start);
    in.position -= read;
    packed = starts_gzip(start, read);
  }
  if (!packed) return;
  in.buffer.resize(kBufferSize);
  start_inflating();
}

ContentReader::ContentReader(fs::path path, std::span<const std::byte> content)
    : path_(std::move(path)), input_(std::make_unique<Input>()) {
  input_->unpacked_before = true;
  if (content.size() > UINT32_MAX) fail(0, "the content has 4 GiB or more");
  // The bytes are only read.
  input_->stream.next_in = reinterpret_cast<uint8_t*>(const_cast<std::byte*>(content.data()));
  input_->stream.avail_in = static_cast<uint32_t>(content.size());
}

ContentReader::~ContentReader() = default;

void ContentReader::start_inflating() {
  Input& in = *input_;
  fill();  // ISA-L forgets a header's checksum where the input ends within the header.
  if (in.inflating && !starts_gzip(in.stream.next_in, in.stream.avail_in)) {
    fail(offset_, "bytes follow that are no gzip member", "copy or download the file again");
  }
  ::isal_inflate_reset(&in.stream);
  const bool raw = options_.packing == ContentOptions::Packing::deflate;
  in.stream.crc_flag = raw ? ISAL_DEFLATE : ISAL_GZIP;
  in.inflating = true;
  in.stream_done = false;
}

bool ContentReader::compressed() const {
  return input_->inflating;
}

uint64_t ContentReader::remaining_limit() const {
  const Input& in = *input_;
  if (in.inflating) return in.packed_size * kDeflateRatio;
  return in.end - in.position + in.stream.avail_in;
}

void ContentReader::fail(uint64_t offset, const std::string& complaint,
                         const std::string& hint) const {
  const std::string member = options_.member.empty() ? "" : " (" + options_.member + " in it)";
  const bool inflated = input_->inflating || input_->unpacked_before;
  const std::string unpacked = inflated ? " of the decompressed content: " : ": ";
  throw DataError(
      path_.string() + member + ", byte " + std::to_string(offset) + unpacked + complaint, hint);
}

/// Takes `size` bytes from the file at its position. Fewer only at the content's end.
size_t ContentReader::read_file(unsigned char* out, size_t size) {
  Input& in = *input_;
  size_t done = 0;
  while (done < size && in.position < in.end) {
    const auto wanted = static_cast<size_t>(std::min<uint64_t>(size - done, in.end - in.position));
    const ssize_t n = ::pread(in.fd.get(), out + done, wanted, static_cast<off_t>(in.position));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw SystemError("cannot read " + path_.string(), errno);
    if (n == 0) in.end = in.position;  // the file has become shorter since it was opened
    in.position += static_cast<uint64_t>(n);
    done += static_cast<size_t>(n);
  }
  return done;
}

/// Moves what is unread to the buffer's start and reads as much behind it as fits. Gives how much
/// is unread.
size_t ContentReader::fill() {
  Input& in = *input_;
  auto& left = in.stream.avail_in;
  std::copy_n(in.stream.next_in, left, in.buffer.data());
  left += static_cast<uint32_t>(read_file(in.buffer.data() + left, in.buffer.size() - left));
  in.stream.next_in = in.buffer.data();
  return left;
}

size_t ContentReader::read_unpacked(unsigned char* out, size_t size) {
  auto& stream = input_->stream;
  const size_t n = std::min<size_t>(size, stream.avail_in);
  std::copy_n(stream.next_in, n, out);
  stream.next_in += n;
  stream.avail_in -= static_cast<uint32_t>(n);
  return n;
}

size_t ContentReader::inflate_into(unsigned char* out, size_t size) {
  Input& in = *input_;
  inflate_state& stream = in.stream;
  size_t done = 0;
  while (done < size) {
    if (in.stream_done && options_.packing == ContentOptions::Packing::deflate) break;
    // It may hold back what it has unpacked already, so the file's end is not the content's.
    const bool at_end = stream.avail_in == 0 && fill() == 0;
    if (in.stream_done) {
      if (at_end) break;
      start_inflating();
    }
    const size_t piece = std::min(size - done, kLargestPiece);
    stream.next_out = out + done;
    stream.avail_out = static_cast<uint32_t>(piece);
    const int result = ::isal_inflate(&stream);
    const size_t made = piece - stream.avail_out;
    done += made;
    in.stream_done = stream.block_state == ISAL_BLOCK_FINISH;
    if (result < 0) {
      const std::string reason = result == ISAL_INCORRECT_CHECKSUM
                                     ? "incorrect data check"
                                     : "error " + std::to_string(result) + " of ISA-L";
      fail(offset_ + done, "the compressed data is damaged (" + reason + ")",
           "copy or download the file again");
    }
    if (at_end && made == 0 && !in.stream_done) {
      fail(offset_ + done, "the compressed data ends here; expected more: the file is truncated",
           "copy or download the file again");
    }
  }
  return done;
}

size_t ContentReader::read_some(void* out, size_t size) {
  auto* bytes = static_cast<unsigned char*>(out);
  const size_t n = input_->inflating         ? inflate_into(bytes, size)
                   : input_->unpacked_before ? read_unpacked(bytes, size)
                                             : read_file(bytes, size);
  // Without the test for 0, a null `out` (an empty tensor's memory) would start the sum anew.
  if (options_.crc32 && n > 0) crc32_ = static_cast<uint32_t>(::crc32_gzip_refl(crc32_, bytes, n));
  offset_ += n;
  return n;
}

void ContentReader::read_exact(void* out, size_t size, std::string_view what) {
  const uint64_t start = offset_;
  const size_t n = read_some(out, size);
  if (n == size) return;
  constexpr const char* kRemedy = "copy or download the file again";
  if (offset_ == 0) fail(0, "the file is empty; expected " + std::string(what), kRemedy);
  fail(offset_,
       "the file ends here; expected " + std::to_string(size) + " bytes of " + std::string(what) +
           " from byte " + std::to_string(start) + " on, got " + std::to_string(n),
       kRemedy);
}

void ContentReader::expect_end() {
  const uint64_t end = offset_;
  char extra;
  if (read_some(&extra, 1) != 0) fail(end, "more bytes follow; expected the end of the file");
  if (options_.crc32 && crc32_ != *options_.crc32) {
    fail(0, "the content's CRC-32 is not the archive's: the file is damaged",
         "copy or download the file again");
  }
}

std::string content_hash(const fs::path& path, Hasher::Algorithm algorithm) {
  ContentReader file(path, {.packing = ContentOptions::Packing::plain});
  Hasher hasher(algorithm);
  std::vector<char> buffer(1 << 20);
  while (const size_t n = file.read_some(buffer.data(), buffer.size())) {
    hasher.update(buffer.data(), n);
  }
  return hasher.finish();
}

}  // namespace lockstep
