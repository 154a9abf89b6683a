#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep::launch {

/// Bytes on their way to a descriptor of ours (standard output or error) whose reader may be slow
/// or gone. Nothing here blocks: `write` queues, `pump` passes on what the reader has room for.
class OutputQueue {
 public:
  /// With more than this waiting, stop reading what would be added.
  static constexpr size_t kFull = size_t{4} << 20;

  explicit OutputQueue(int fd) : fd_(fd) {}

  /// `writer`: whose bytes they are, see last_writer.
  void write(std::string_view bytes, const void* writer = nullptr);
  /// Whose bytes came last, written or dropped; null: nobody has said.
  const void* last_writer() const { return last_writer_; }
  /// Passes on what can be without blocking.
  void pump();
  bool pending() const { return failed_with_ == 0 && begin_ < queue_.size(); }
  bool full() const { return queue_.size() - begin_ > kFull; }
  int fd() const { return fd_; }
  /// The errno that ended this output (EPIPE: nobody reads it any more); 0: it works. What is
  /// written after is dropped.
  int failed_with() const { return failed_with_; }

 private:
  int fd_;
  std::string queue_;
  size_t begin_ = 0;
  int failed_with_ = 0;
  const void* last_writer_ = nullptr;
};

/// Whether two descriptors are the same file, pipe or terminal.
bool same_file(int a, int b);

/// Whether standard input may be read: a terminal's is not ours in the background.
bool input_is_ours();

/// Opens /dev/null for those of descriptors 0 to 2 that are closed, so that no pipe gets their
/// number.
void ensure_standard_descriptors();

}  // namespace lockstep::launch
