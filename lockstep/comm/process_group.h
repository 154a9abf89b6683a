#pragma once

#include <ATen/core/Tensor.h>
#include <nlohmann/json_fwd.hpp>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/checks/observed_call.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/work.h"

namespace lockstep {

/// What ProcessGroup::all_reduce_values takes: every arithmetic type of up to 8 bytes that can be
/// written to.
template <class T>
concept Reducible = std::is_arithmetic_v<T> && sizeof(T) <= 8 && !std::is_const_v<T> &&
                    !std::is_volatile_v<T>;

/// Refers to a number of any arithmetic type, which must outlive it.
class NumberReference {
 public:
  enum class Kind : uint8_t { boolean, signed_integer, unsigned_integer, floating };

  template <Reducible T>
  explicit NumberReference(T& number) : number_(&number), kind_(kind_of<T>()), bytes_(sizeof(T)) {}

  void* number() const { return number_; }
  Kind kind() const { return kind_; }
  /// Of the number's type, which kind and size determine on one machine.
  uint8_t bytes() const { return bytes_; }

 private:
  template <class T>
  static constexpr Kind kind_of() {
    if (std::is_same_v<T, bool>) return Kind::boolean;
    if (std::is_floating_point_v<T>) return Kind::floating;
    return std::is_signed_v<T> ? Kind::signed_integer : Kind::unsigned_integer;
  }

  void* number_;
  Kind kind_;
  uint8_t bytes_;
};

}  // namespace lockstep

namespace c10d {
class ProcessGroup;
}

namespace lockstep {

/// How ranks' values become one; PyTorch's names. `avg` divides the sum by the group's size.
enum class ReduceOp { sum, avg, product, min, max, band, bor, bxor };

/// One send or receive of a batch; see ProcessGroup::batch_isend_irecv.
struct P2POp {
  enum class Kind { send, recv } kind;
  at::Tensor tensor;
  int peer;     ///< The other rank of the group.
  int tag = 0;  ///< Sends are matched to receives by it, in their order.
};

/// Ranks that communicate. A handle, whose copies share the group. The World closes it: after that
/// every call throws CommError. One thread at a time. All ranks of a group must make the same calls
/// in the same order.
///
/// Ranks in arguments are ranks of this group. Tensors must be on the backend's device. gloo and
/// nccl take contiguous tensors only. shm, hierarchical and mpi take others too: they copy them in
/// and, before `wait` returns, out. A lazily conjugated or negated tensor counts as one that is not
/// contiguous. hierarchical is gloo where no two ranks share a host. A mistake in the arguments is
/// a UsageError before anything is sent. Such are a rank out of range, a tensor list of the wrong
/// length, an output of another dtype than the inputs and a tensor that must be contiguous.
///
/// An input may share memory with a result: it is copied first, unless it lies where its own part
/// of the result goes. Results that share memory with each other are a UsageError.
///
/// A synchronous call returns when the result is there. Its `_async` twin returns at once with a
/// Work. Every call throws:
/// - MismatchError when ranks disagree. Over shm every call is compared, over hierarchical every
///   collective. Of hierarchical's sends and receives, and of all calls over gloo and mpi, the
///   first ten are compared. At debug level `detail` all are, on any backend. recv_any is compared
///   over shm only.
/// - TimeoutError naming operation, sequence number, ranks and seconds.
/// - PeerLostError naming the ranks that ended. It is a PeerLeftError where they closed the group
///   after their training loop, so that the ranks' loops were not of the same length.
class ProcessGroup {
 public:
  class Impl;
  ProcessGroup() = default;
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  int rank() const;
  int size() const;
  /// "gloo", "nccl", ...
  const std::string& backend() const;
  /// The ranks of the default group that form this one, in this group's order.
  const std::vector<int>& global_ranks() const;
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);

  void all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const {
    blocking().all_reduce_async(tensor, op).wait();
  }
  [[nodiscard]] Work all_reduce_async(at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  /// Several tensors of one dtype in one operation.
  void all_reduce_coalesced(std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::sum) const {
    blocking().all_reduce_coalesced_async(tensors, op).wait();
  }
  [[nodiscard]] Work all_reduce_coalesced_async(std::vector<at::Tensor>& tensors,
                                                ReduceOp op = ReduceOp::sum) const;
  /// The result lands in `tensor` of rank `dst`. What the others' tensors hold after is undefined.
  void reduce(at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::sum) const {
    blocking().reduce_async(tensor, dst, op).wait();
  }
  [[nodiscard]] Work reduce_async(at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::sum) const;
  void broadcast(at::Tensor& tensor, int src) const {
    blocking().broadcast_async(tensor, src).wait();
  }
  [[nodiscard]] Work broadcast_async(at::Tensor& tensor, int src) const;
  /// `outputs` has one tensor per rank, each of `input`'s shape.
  void all_gather(std::vector<at::Tensor>& outputs, const at::Tensor& input) const {
    blocking().all_gather_async(outputs, input).wait();
  }
  [[nodiscard]] Work all_gather_async(std::vector<at::Tensor>& outputs,
                                      const at::Tensor& input) const;
  /// `output` holds size() times `input`'s elements, in the order of ranks.
  void all_gather_into_tensor(at::Tensor& output, const at::Tensor& input) const {
    blocking().all_gather_into_tensor_async(output, input).wait();
  }
  [[nodiscard]] Work all_gather_into_tensor_async(at::Tensor& output,
                                                  const at::Tensor& input) const;
  /// `outputs` has one tensor per rank on rank `dst` and is empty on the others.
  void gather(std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst) const {
    blocking().gather_async(outputs, input, dst).wait();
  }
  [[nodiscard]] Work gather_async(std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                  int dst) const;
  /// `inputs` has one tensor per rank on rank `src` and is empty on the others.
  void scatter(at::Tensor& output, const std::vector<at::Tensor>& inputs, int src) const {
    blocking().scatter_async(output, inputs, src).wait();
  }
  [[nodiscard]] Work scatter_async(at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                   int src) const;
  /// `inputs` has one tensor per rank. `output` gets the reduction of all ranks' inputs[rank()].
  void reduce_scatter(at::Tensor& output, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) const {
    blocking().reduce_scatter_async(output, inputs, op).wait();
  }
  [[nodiscard]] Work reduce_scatter_async(at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                          ReduceOp op = ReduceOp::sum) const;
  void reduce_scatter_tensor(at::Tensor& output, const at::Tensor& input,
                             ReduceOp op = ReduceOp::sum) const {
    blocking().reduce_scatter_tensor_async(output, input, op).wait();
  }
  [[nodiscard]] Work reduce_scatter_tensor_async(at::Tensor& output, const at::Tensor& input,
                                                 ReduceOp op = ReduceOp::sum) const;
  /// Rank j's outputs[i] gets rank i's inputs[j].
  void all_to_all(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) const {
    blocking().all_to_all_async(outputs, inputs).wait();
  }
  [[nodiscard]] Work all_to_all_async(std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& inputs) const;
  /// Cuts along dimension 0, by `input_splits`, into `output_splits`. Both are empty for even cuts.
  void all_to_all_single(at::Tensor& output, const at::Tensor& input,
                         const std::vector<int64_t>& output_splits = {},
                         const std::vector<int64_t>& input_splits = {}) const {
    blocking().all_to_all_single_async(output, input, output_splits, input_splits).wait();
  }
  [[nodiscard]] Work all_to_all_single_async(at::Tensor& output, const at::Tensor& input,
                                             const std::vector<int64_t>& output_splits = {},
                                             const std::vector<int64_t>& input_splits = {}) const;
  void barrier() const { blocking().barrier_async().wait(); }
  [[nodiscard]] Work barrier_async() const;
  /// A barrier over the store that throws TimeoutError naming every rank that did not come.
  void monitored_barrier(std::chrono::milliseconds timeout) const;

  /// A tensor of `numel` elements for what is all-reduced again and again, as gradients are. It is
  /// PyTorch's symmetric memory. Over shared memory its data lies where all ranks reach it. An
  /// all_reduce of it, or of the same part of it on every rank, copies nothing in or out. Over
  /// other backends it is an ordinary tensor. The values are undefined. All ranks call with the
  /// same arguments, and use it alike afterwards (MismatchError). It may outlive the group.
  at::Tensor symmetric_empty(int64_t numel, at::ScalarType dtype) const;

  /// Over gloo and hierarchical a message to this rank itself is a UsageError.
  void send(const at::Tensor& tensor, int dst, int tag = 0) const {
    isend(tensor, dst, tag).wait();
  }
  void recv(at::Tensor& tensor, int src, int tag = 0) const { irecv(tensor, src, tag).wait(); }
  /// Receives from the rank that sends first, and returns that rank. Over gloo and hierarchical it
  /// notices a dead rank at the time-out only, and a longer message ends the process.
  int recv_any(at::Tensor& tensor, int tag = 0) const;
  [[nodiscard]] Work isend(const at::Tensor& tensor, int dst, int tag = 0) const;
  [[nodiscard]] Work irecv(at::Tensor& tensor, int src, int tag = 0) const;
  /// Starts all operations. Safe in any order of them on the ranks. What is sent may share memory
  /// with what is received: it is copied first. Gives one Work per operation,
  /// in their order, or one for all where the backend groups them (NCCL). Wait for all of them.
  [[nodiscard]] std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& ops) const;

  /// Reduces numbers of any arithmetic types in place, as they are, and all in one message:
  ///
  ///     double loss_sum = 0;  int64_t correct = 0;  size_t seen = 0;
  ///     ...
  ///     world.group().all_reduce_values(loss_sum, correct, seen);   // sums
  ///
  /// All ranks get the same bits: the ranks' values are combined in their order. Whole numbers are
  /// exact. A result that does not fit its type is a NumericError on every rank. `float` is added
  /// in double and rounded once. `avg` is of floating-point numbers only; `band`, `bor` and `bxor`
  /// are of whole numbers; a `bool` has `min` (all), `max` (any) and the bitwise ones (UsageError).
  /// Ranks of other types or another reduction are a MismatchError. For numbers of a program, not
  /// for tensors: each rank receives those of all.
  template <Reducible... Numbers>
  requires(sizeof...(Numbers) > 0) void all_reduce_values(Numbers&... numbers) const {
    all_reduce_values(ReduceOp::sum, numbers...);
  }
  template <Reducible... Numbers>
  requires(sizeof...(Numbers) > 0) void all_reduce_values(ReduceOp op, Numbers&... numbers) const {
    const NumberReference references[] = {NumberReference(numbers)...};
    all_reduce_numbers(references, op);
  }
  /// The same of numbers whose count or types are known at run time only.
  void all_reduce_numbers(std::span<const NumberReference> numbers,
                          ReduceOp op = ReduceOp::sum) const;

  /// Objects travel as JSON (CBOR on the wire). Their sizes may differ between ranks.
  std::vector<nlohmann::json> all_gather_object(const nlohmann::json& object) const;
  /// As all_gather_object, and empty on all ranks but `dst`.
  std::vector<nlohmann::json> gather_object(const nlohmann::json& object, int dst) const;
  nlohmann::json broadcast_object(const nlohmann::json& object, int src) const;
  /// `objects` has one per rank on rank `src` and is ignored on the others. All go to every rank.
  nlohmann::json scatter_object(const std::vector<nlohmann::json>& objects, int src) const;

  /// Every rank of this group calls. Ranks of one color form a group, ordered by (key, rank). A
  /// rank with a negative color joins none and gets a null handle. Blocks until the group's ranks
  /// have come. Throws PeerLostError where one was lost, or the process that holds the store.
  ProcessGroup split(int color, int key = 0) const;

  /// Says that this rank has made `steps` steps of its training loop; the most said counts. When it
  /// closes the group and others go on, their PeerLeftError tells the number. GradientAverager and
  /// DistributedDataParallel say it: it is for loops without them. Costs and sends nothing.
  void note_steps(int64_t steps) const noexcept;

  explicit operator bool() const { return impl_ != nullptr; }
  bool operator==(const ProcessGroup&) const = default;  ///< Whether they are the same group.
  /// The c10d group (its calls pass through our checks too), for code that speaks c10d.
  c10d::ProcessGroup& native() const;

 private:
  friend Impl& impl_of(const ProcessGroup& group) { return *group.impl_; }
  /// The handle by which a synchronous call tells the backend that its caller waits.
  ProcessGroup blocking() const {
    ProcessGroup handle = *this;
    handle.blocking_ = true;
    return handle;
  }

  std::shared_ptr<Impl> impl_;
  bool blocking_ = false;
};

/// A tensor of `numel` elements that is the same memory on all ranks of the group: what one rank
/// writes, the others read where it lies. It exists once per host, however many ranks there are.
/// Zeroed. Undefined, on all ranks, where they have no such memory: backends other than shm,
/// several hosts, devices other than the CPU.
///
/// The caller orders reads and writes, by barriers or other calls of the group. All ranks call with
/// the same arguments (MismatchError). The tensor may outlive the group. Collective calls take it
/// as any other tensor.
at::Tensor common_empty(const ProcessGroup& group, int64_t numel, at::ScalarType dtype);

/// From here on `observer` is told of every collective that goes through the group on this rank,
/// those of DistributedDataParallel too. Null ends it. Sends, receives and monitored_barrier are
/// not told of. It costs two readings of the clock and a callback per collective. Without an
/// observer it costs the check of a pointer. For NCCL the times are the host's, not the device's.
///
/// Call it while no collective of this rank is under way. Throws CommError when the group is
/// closed.
void observe_calls(const ProcessGroup& group, std::shared_ptr<CallObserver> observer);

/// How long this thread has been held up by calls of process groups and by waits for them. A call
/// counts that had ended when it came back. None counts where the flight recorder is off, and waits
/// for futures of LibTorch's reducer do not.
std::chrono::nanoseconds time_held_up();

}  // namespace lockstep
