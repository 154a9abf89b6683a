#pragma once

#include <cstddef>
#include <string>

#include "lockstep/base/file.h"

namespace lockstep::shm {

/// "3 MiB", rounded up.
std::string mebibytes(size_t bytes);
size_t whole_pages(size_t bytes);
/// Whole cache lines.
inline size_t up_to_line(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// Zeroed memory without a name, for this user's processes only. Nobody can shorten or extend it.
/// The pages of its first `reserved` bytes are there when it returns. So a lack of memory is an
/// error here and no SIGBUS later. Throws SystemError.
UniqueFd make_memory(size_t bytes, size_t reserved);

/// Shared memory in this process' address space.
class Mapping {
 public:
  Mapping() = default;
  /// All of what make_memory made, of this size; CommError for anything else. The descriptor may be
  /// closed afterwards. Throws SystemError.
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Whether the system gives what shared memory needs; what is missing, else empty.
std::string missing_support();

}  // namespace lockstep::shm
