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

void FileWriter::write_block() {
  const auto write = [this, block = blocks_[filling_].get(), before = newest_]() mutable {
    if (before.valid()) before.get();
    before = {};  // Else each of them would keep all before it.
    write_all(fd_.get(), block, kBlock, path_);
  };
  newest_ = writing_[filling_] = std::async(std::launch::async, write).share();
  filling_ = (filling_ + 1) % kBlocks;
  filled_ = 0;
  if (writing_[filling_].valid()) writing_[filling_].get();
}

void FileWriter::finish() {
  if (newest_.valid()) newest_.get();
  ::fcntl(fd_.get(), F_SETFL, 0);  // The rest is no whole number of a disk's sectors.
  write_all(fd_.get(), blocks_[filling_].get(), filled_, path_);
  if (::fsync(fd_.get()) != 0) throw SystemError("cannot flush " + path_.string(), errno);
  fd_.reset();
}

}  // namespace lockstep
