#pragma once

#include <unistd.h>

#include "lockstep/base/file.h"

namespace lockstep::test_process {

/// Standard output goes to a descriptor of the test's while one lives.
class RedirectedOutput {
 public:
  explicit RedirectedOutput(int to) : saved_(::dup(STDOUT_FILENO)) { ::dup2(to, STDOUT_FILENO); }
  ~RedirectedOutput() { ::dup2(saved_.get(), STDOUT_FILENO); }

 private:
  UniqueFd saved_;
};

}  // namespace lockstep::test_process
