#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// What has gone wrong between ranks, as data: code decides by the fields, never by words. It
/// travels in shared memory, under keys of the store and between hosts (`encode`), and within
/// exceptions (CommError::failure).
struct Failure {
  enum class Kind : uint8_t {
    unknown,
    ended,        ///< The process has ended.
    left,         ///< It closed the group after a number of steps of its program's loop.
    closed,       ///< It closed the group.
    gave_up,      ///< It gave up the group because of a failure that may be elsewhere.
    unreachable,  ///< Its connection broke, or it was silent for too long.
    late,         ///< It did not come within the time-out.
    stuck,        ///< It came to the call, but did not finish it within the time-out.
    mismatch,     ///< It called something else than the others.
    store_lost,   ///< The store cannot be reached.
  };
  /// A rank that it concerns.
  struct Rank {
    int number = -1;          ///< In the default group.
    Kind kind{};              ///< What became of it.
    int process = -1;         ///< On its host; -1: not known.
    int64_t steps = 0;        ///< Of its loop, where it has left.
    int64_t calls = -1;       ///< How many collectives of the group it has called; -1: not known.
    std::vector<int> host{};  ///< All ranks of its host, where it speaks for them.
    /// The ranks that it gave to new_group, where others gave another list.
    std::vector<int> asked_group{};
    bool operator==(const Rank&) const = default;
  };

  Kind kind = Kind::unknown;
  std::vector<Rank> ranks{};
  int64_t calls = 0;      ///< Where ranks are late: how many collectives the one that waits called.
  int64_t waited_ms = 0;  ///< Likewise: for how long.
  std::string detail{};   ///< More for the reader, which follows the words for the fields.
  std::string text{};     ///< Words in place of those for the fields, where they say more.
  std::shared_ptr<const Failure> cause{};  ///< What caused it; null: not known.

  /// The ranks were late. Else something was lost.
  bool timed_out() const { return kind == Kind::late || kind == Kind::stuck; }
  /// Whether it, or one of its causes, is of this kind.
  bool has(Kind what) const;
  /// Whether it, or one of its causes, concerns the rank, or the whole host of the rank.
  bool concerns(int rank) const;
  /// Adds the other failure's ranks. If the kinds differ, the result is `left` if one of them is,
  /// else the first kind.
  void add(const Failure& other);
};

/// "ended", "left", ...: the name in an error file.
std::string_view name_of(Failure::Kind kind);
/// None for another word.
std::optional<Failure::Kind> failure_kind_named(std::string_view name);

/// The words: "rank 1 (process 4711) has closed the group: rank 2 (process 4712) has ended".
std::string describe(const Failure& failure);
/// The text for a peer that left after `steps` of its loop: " left its loop after 287 steps".
std::string left_after(int64_t steps);

/// Encodes it in at most `most` bytes; `most` must be 64 or more. Causes, words and ranks that do
/// not fit are left out, in this order. The processes must have the same byte order.
std::string encode(const Failure& failure, size_t most = 4000);
/// Decodes the result of `encode`, even if more bytes follow. Empty for other or damaged bytes.
std::optional<Failure> decode_failure(std::string_view bytes);

}  // namespace lockstep
