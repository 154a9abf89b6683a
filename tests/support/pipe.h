#pragma once

#include <unistd.h>

#include <array>
#include <stdexcept>
#include <string>

#include "lockstep/base/file.h"

namespace lockstep::test_process {

/// For tests: a pipe whose ends are closed one by one, in processes that are forked as well.
struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    read.reset(ends[0]);
    write.reset(ends[1]);
  }
  /// Waits for a byte; false at the end of the last writer.
  bool wait() const {
    char byte = 0;
    return ::read(read.get(), &byte, 1) == 1;
  }
  /// The first of what was written, or all of it when nobody can write any more.
  std::string text() const {
    std::array<char, 256> bytes{};
    const ssize_t length = ::read(read.get(), bytes.data(), bytes.size());
    return {bytes.data(), length < 0 ? 0 : static_cast<size_t>(length)};
  }
  void tell(const std::string& text) const {
    if (::write(write.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      throw std::runtime_error("writing to a pipe");
  }
  UniqueFd read;
  UniqueFd write;
};

}  // namespace lockstep::test_process
