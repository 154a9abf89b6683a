#include "lockstep/data/content_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr size_t kBufferSize = 1 << 18;
/// Deflate's best ratio is just under 1032 to 1 (zlib's technical notes).
constexpr uint64_t kDeflateRatio = 1032;
constexpr size_t kLargestPiece = 1u << 30;  // zlib counts in 32 bits

}  // namespace

struct ContentReader::Inflater {
  UniqueFd fd;
  uint64_t file_size = 0;
  bool gzip = false;
  bool member_done = false;  ///< The last member's checksum was right; another may follow.
  std::vector<unsigned char> buffer = std::vector<unsigned char>(kBufferSize);
  z_stream
      stream{};  ///< next_in and avail_in are the unread part of `buffer`, for plain files too.

  ~Inflater() {
    if (gzip) ::inflateEnd(&stream);
  }
};

ContentReader::ContentReader(fs::path path, bool inflate_gzip)
    : path_(std::move(path)), inflater_(std::make_unique<Inflater>()) {
  Inflater& in = *inflater_;
  in.fd.reset(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (!in.fd) throw SystemError("cannot open " + path_.string(), errno);
  struct stat status {};
  if (::fstat(in.fd.get(), &status) != 0) {
    throw SystemError("cannot read " + path_.string(), errno);
  }
  in.file_size = static_cast<uint64_t>(status.st_size);
  fill();
  const unsigned char* start = in.stream.next_in;
  if (inflate_gzip && in.stream.avail_in >= 2 && start[0] == 0x1f && start[1] == 0x8b) {
    if (::inflateInit2(&in.stream, 16 + MAX_WBITS) != Z_OK) {
      throw Error("zlib cannot start to inflate " + path_.string());
    }
    in.gzip = true;
  }
}

ContentReader::~ContentReader() = default;

bool ContentReader::compressed() const {
  return inflater_->gzip;
}

uint64_t ContentReader::size_limit() const {
  const uint64_t size = inflater_->file_size;
  return inflater_->gzip ? size * kDeflateRatio : size;
}

void ContentReader::fail(uint64_t offset, const std::string& complaint,
                         const std::string& hint) const {
  throw DataError(path_.string() + ", byte " + std::to_string(offset) +
                      (compressed() ? " of the decompressed content: " : ": ") + complaint,
                  hint);
}

/// Refills the empty buffer; 0 at the end of the file.
size_t ContentReader::fill() {
  Inflater& in = *inflater_;
  ssize_t n;
  do {
    n = ::read(in.fd.get(), in.buffer.data(), in.buffer.size());
  } while (n < 0 && errno == EINTR);
  if (n < 0) throw SystemError("cannot read " + path_.string(), errno);
  in.stream.next_in = in.buffer.data();
  in.stream.avail_in = static_cast<uInt>(n);
  return static_cast<size_t>(n);
}

size_t ContentReader::read_plain(char* out, size_t size) {
  Inflater& in = *inflater_;
  const size_t buffered = std::min<size_t>(size, in.stream.avail_in);
  std::memcpy(out, in.stream.next_in, buffered);
  in.stream.next_in += buffered;
  in.stream.avail_in -= static_cast<uInt>(buffered);
  size_t done = buffered;
  while (done < size) {
    const ssize_t n = ::read(in.fd.get(), out + done, std::min(size - done, kLargestPiece));
    if (n == 0) break;
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      throw SystemError("cannot read " + path_.string(), errno);
    }
  }
  return done;
}

size_t ContentReader::inflate_into(char* out, size_t size) {
  Inflater& in = *inflater_;
  z_stream& stream = in.stream;
  size_t done = 0;
  while (done < size) {
    if (stream.avail_in == 0 && fill() == 0) {
      if (in.member_done) break;
      fail(offset_ + done, "the gzip stream is truncated", "copy or download the file again");
    }
    if (in.member_done) {
      ::inflateReset(&stream);
      in.member_done = false;
    }
    const size_t piece = std::min(size - done, kLargestPiece);
    stream.next_out = reinterpret_cast<unsigned char*>(out + done);
    stream.avail_out = static_cast<uInt>(piece);
    const int result = ::inflate(&stream, Z_NO_FLUSH);
    done += piece - stream.avail_out;
    if (result == Z_STREAM_END) {
      in.member_done = true;
    } else if (result == Z_MEM_ERROR) {
      throw Error("no memory to inflate " + path_.string());
    } else if (result != Z_OK && result != Z_BUF_ERROR) {
      fail(offset_ + done,
           std::string("the gzip stream is damaged (") +
               (stream.msg ? stream.msg : "zlib gives no reason") + ")",
           "copy or download the file again");
    }
  }
  return done;
}

size_t ContentReader::read_some(void* out, size_t size) {
  char* bytes = static_cast<char*>(out);
  const size_t n = inflater_->gzip ? inflate_into(bytes, size) : read_plain(bytes, size);
  offset_ += n;
  return n;
}

void ContentReader::read_exact(void* out, size_t size, std::string_view what) {
  const uint64_t start = offset_;
  const size_t n = read_some(out, size);
  if (n == size) return;
  if (offset_ == 0) fail(0, "the file is empty; expected " + std::string(what));
  fail(offset_, "the file ends here; expected " + std::to_string(size) + " bytes of " +
                    std::string(what) + " from byte " + std::to_string(start) + " on, got " +
                    std::to_string(n));
}

void ContentReader::expect_end() {
  const uint64_t end = offset_;
  char extra;
  if (read_some(&extra, 1) != 0) {
    fail(end, "more bytes follow; expected the end of the file");
  }
}

}  // namespace lockstep
