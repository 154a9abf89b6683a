#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

namespace detail {
class WorkState;
}

/// An asynchronous communication. A handle, whose copies share the operation. The tensors of the
/// operation must not be touched until it is complete. The handle keeps them alive. Destroying the
/// last handle neither waits nor cancels. Any thread may call.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<detail::WorkState> state) : state_(std::move(state)) {}

  /// Blocks until the operation is complete; at once when it is. Throws what it failed with
  /// (TimeoutError, PeerLostError, MismatchError, ...). Without `timeout` the group's own holds.
  /// One that is shorter ends this wait by a TimeoutError. The operation goes on and may be waited
  /// for again. Only a send or receive over shm ends with it: its tensors are free then. (Over nccl
  /// LibTorch decides.) A longer one does not make the group's own longer. On CUDA it orders the
  /// current stream after the operation and does not block the host.
  void wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;
  bool is_completed() const;
  /// Runs `callback` once when the operation is complete: with null on success, else the error. It
  /// runs on the backend's thread, or at once on the calling thread when the operation is complete
  /// already. Must not block or throw, nor own the last handle of the group.
  void then(std::function<void(std::exception_ptr)> callback) const;
  /// The operation's output tensors. Call after `wait`.
  std::vector<at::Tensor> result() const;

  explicit operator bool() const { return state_ != nullptr; }

 private:
  detail::WorkState& state() const;
  std::shared_ptr<detail::WorkState> state_;
};

}  // namespace lockstep
