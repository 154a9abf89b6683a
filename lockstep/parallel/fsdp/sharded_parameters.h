#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/unit_plan.h"
#include "lockstep/parallel/fsdp/watched_memory.h"

namespace lockstep::detail {

/// In which order units are used, learned in one round and foretold in the next. A round is a
/// forward and its backward. One that stops early, as an evaluation does, changes nothing.
class UseOrder {
 public:
  /// A new round begins.
  void begin() {
    const bool is_start_of_before = follows_ && now_.size() <= before_.size();
    if (!is_start_of_before) before_ = now_;
    now_.clear();
    follows_ = true;
  }

  /// Notes that `unit` is used next. Gives the unit that was used after it in the round before;
  /// none when this round has gone another way, or that one ended here.
  std::optional<size_t> use(size_t unit) {
    const size_t at = now_.size();
    now_.push_back(unit);
    follows_ = follows_ && at < before_.size() && before_[at] == unit;
    if (!follows_ || at + 1 == before_.size()) return std::nullopt;
    return before_[at + 1];
  }

 private:
  std::vector<size_t> before_;
  std::vector<size_t> now_;
  bool follows_ = true;  ///< So far this round is the one before.
};

/// The parameters of a module, of which each rank keeps a shard, and which are whole while they are
/// used.
///
/// The module's tensors become views of watched memory, one memory per unit. The first operation on
/// one of them gathers its unit. When other units are used, it is freed again. The order of a
/// round's uses is remembered. In later rounds the gather of the unit to come runs ahead.
///
/// Where all ranks have a memory in common (`shared`), the whole parameters lie there once, and
/// nothing is gathered. A shard is then a part of it, which its rank writes. Barriers keep the
/// others from reading meanwhile: one when a round begins, one when it ends. Between rounds the
/// module's tensors have no memory, so that a raw pointer into one is an error.
class ShardedParameters : private MemoryWatcher {
 public:
  /// Takes the values that the module's parameters have on this rank. Those on the meta device have
  /// none: `set_values` gives them. A collective.
  ShardedParameters(std::vector<FlatUnit> units, const ProcessGroup& group,
                    const FsdpOptions& options, c10::Device device);
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

  /// Takes the values of parameters that were given other memory (set_data, torch::load) into the
  /// shards, and gives them the units' memory again. A collective where there are such. Throws
  /// UsageError for one of another shape or dtype. Ends a round.
  void take_values();
  /// Puts this rank's pieces of a parameter into its shards. `values` is of the parameter's shape.
  void set_values(const at::Tensor& parameter, const at::Tensor& values);
  /// The module's tensors become views of the units' memory. Their old memory is freed. Once.
  void adopt_module();

  const std::vector<FlatUnit>& units() const { return units_; }
  /// What the module's parameters can have for a gradient that is spread over shards. Using it is a
  /// UsageError. Has no values.
  at::Tensor refused_gradient(const at::Tensor& parameter) const;
  /// Whether no parameter needs a gradient now, as of a GAN's discriminator at times.
  bool all_frozen() const;
  const FlatParameter& parameter_of(const Piece& piece) const {
    return units_[piece.unit].parameters[piece.parameter];
  }
  const std::vector<Piece>& pieces() const { return pieces_; }
  /// This rank's shard of a unit, [shard_size]. To be written between rounds only.
  const at::Tensor& shard(size_t unit) const { return shards_[unit]; }
  const ProcessGroup& group() const { return group_; }
  c10::Device device() const { return device_; }
  bool shared() const { return shared_; }

  /// Parameters are about to be used; nothing in a round. A collective, as all that follow.
  void begin_round();
  /// Nobody uses them any more. Nothing outside of a round. `all_know`: every rank has come to this
  /// point already.
  void end_round(bool all_know = false);
  /// From now on used units are freed also where they are kept after forward.
  void begin_backward() { in_backward_ = true; }
  /// The unit's backward is done.
  void release(size_t unit);

  /// Makes all units whole until `end_full`. With `writable`, `end_full` keeps in the shards what
  /// was written to the module's parameters. All ranks must have written the same.
  void begin_full(bool writable);
  void end_full();

  int64_t gathers() const { return gathers_; }
  int64_t foretold_gathers() const { return foretold_; }

  /// Throws what the last gather before an operation threw, if it did, once.
  void rethrow_failure();

 private:
  struct Unit {
    WatchedMemory memory;
    at::Tensor buffer = {};  ///< Gathered values.
    Work work = {};  ///< Gathers them, until they are put into the memory. Holds the buffer.
    std::vector<at::Tensor> views = {};  ///< Of the memory, by parameter.
  };

  void before_use(const std::vector<size_t>& memories) override;
  void after_use() noexcept override;
  void before_write(size_t memory, const std::string& operation) override;

  void expect_no_gradient(const std::vector<size_t>& memories) const;
  void share_memory();
  void make_shards();
  void open_common();
  int64_t whole_bytes(size_t unit) const;
  bool is_whole(size_t unit) const { return state_[unit].memory.is_there(); }
  void start_gather(size_t unit);
  void finish_gather(size_t unit);
  void make_whole(size_t unit);
  void free_unit(size_t unit);
  void check_marker(size_t unit, const at::Tensor& whole) const;
  void note_switch(size_t unit);
  at::ScalarType whole_dtype(size_t unit) const;

  static constexpr size_t kRefused = SIZE_MAX;
  WatchedMemory refused_{*this, kRefused, 1, at::kFloat, c10::kCPU};
  const std::vector<FlatUnit> units_;
  const std::vector<Piece> pieces_;
  const ProcessGroup group_;
  const c10::Device device_;
  const FsdpOptions options_;
  bool shared_ = false;
  std::vector<at::Tensor> common_;  ///< Each unit, where ranks have them in common.
  std::vector<at::Tensor> shards_;
  std::vector<Unit> state_;
  std::vector<at::Tensor> free_buffers_;
  std::vector<size_t> in_use_;      ///< Of the operation that runs.
  std::optional<size_t> current_;   ///< The unit last used. It is whole.
  std::optional<size_t> previous_;  ///< The one before.
  UseOrder order_;
  bool in_round_ = false;
  bool in_backward_ = false;
  bool lone_use_ = false;  ///< This round is one operation outside of forward and backward.
  bool full_ = false;
  bool writable_ = false;
  int64_t gathers_ = 0;
  int64_t foretold_ = 0;
  std::exception_ptr failure_;  ///< Of a gather, until it is thrown again.
};

}  // namespace lockstep::detail
