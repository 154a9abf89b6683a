#pragma once

// For tests of what malloc keeps.

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <vector>

namespace lockstep::test {

/// How often the kernel gave this process a page, up to now.
inline long page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// The same, while so many bytes are allocated in blocks of 1 kB, written, and freed.
inline long page_faults_of_small_blocks(size_t bytes) {
  constexpr size_t kBlock = 1000;
  const long before = page_faults();
  std::vector<std::unique_ptr<char[]>> blocks(bytes / kBlock);
  for (auto& block : blocks) {
    block = std::make_unique<char[]>(kBlock);
    static_cast<volatile char*>(block.get())[0] = 1;
  }
  blocks.clear();
  return page_faults() - before;
}

/// How often the kernel gave this process a page during some steps that allocate, write and free.
inline long page_faults_of_steps() {
  const auto step = [] {
    std::vector<std::unique_ptr<char[]>> blocks;
    for (const size_t bytes : {30U << 20, 300U << 10, 30U << 20, 30U << 20}) {
      blocks.push_back(std::make_unique<char[]>(bytes));
      for (size_t at = 0; at < bytes; at += 4096) {
        static_cast<volatile char*>(blocks.back().get())[at] = 1;
      }
    }
  };
  step();
  const long before = page_faults();
  for (int i = 0; i < 3; ++i) step();
  return page_faults() - before;
}

/// What `body` returns in a process of its own, as its exit code.
template <class Body>
int in_another_process(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace lockstep::test
