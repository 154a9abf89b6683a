#include "lockstep/base/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

/// Smaller ones leave a fast disk idle between calls.
constexpr size_t kBlock = size_t{4} << 20;
/// Of memory that any disk reads by itself.
constexpr size_t kPage = 4096;

}  // namespace

FileWriter::FileWriter(std::filesystem::path path)
    : path_(std::move(path)),
      fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (!fd_) throw SystemError("cannot write " + path_.string(), errno);
  ::fcntl(fd_.get(), F_SETFL, O_DIRECT);  // Else it is written through the cache.
  for (auto& block : blocks_) {
    block.reset(static_cast<char*>(std::aligned_alloc(kPage, kBlock)));
    if (!block) throw std::bad_alloc();
  }
}

void FileWriter::write(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const size_t part = std::min(size, kBlock - filled_);
    std::memcpy(blocks_[filling_].get() + filled_, next, part);
    next += part;
    size -= part;
    filled_ += part;
    if (filled_ == kBlock) write_block();
  }
}

void FileWriter::wait() {
  if (writing_.valid()) writing_.get();
}

void FileWriter::write_block() {
  wait();
  writing_ = std::async(std::launch::async, [this, block = blocks_[filling_].get()] {
    write_all(fd_.get(), block, kBlock, path_);
  });
  filling_ = 1 - filling_;
  filled_ = 0;
}

void FileWriter::finish() {
  wait();
  ::fcntl(fd_.get(), F_SETFL, 0);  // The rest is no whole number of a disk's sectors.
  write_all(fd_.get(), blocks_[filling_].get(), filled_, path_);
  if (::fsync(fd_.get()) != 0) throw SystemError("cannot flush " + path_.string(), errno);
  fd_.reset();
}

}  // namespace lockstep
