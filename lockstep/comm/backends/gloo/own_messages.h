#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::gloo {

/// A rank's sends to itself, for which Gloo has no connection. A send is done when its receive has
/// come. Both fail with a MismatchError where dtype or size differ. Any thread may call.
class OwnMessages {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// `name`: the rank's number in the default group.
  OwnMessages(int rank, int name);
  ~OwnMessages();

  /// `timeout`: of a wait that has none.
  WorkPtr send(const at::Tensor& tensor, int tag, std::chrono::milliseconds timeout);
  WorkPtr recv(const at::Tensor& tensor, int tag, std::chrono::milliseconds timeout);
  /// Whether a send of this tag waits for its receive.
  bool has_sent(int tag);

 private:
  class OwnWork;
  using Queue = std::deque<c10::intrusive_ptr<OwnWork>>;

  c10::intrusive_ptr<OwnWork> make(c10d::OpType type, const at::Tensor& tensor, int tag,
                                   std::chrono::milliseconds timeout) const;
  WorkPtr meet(c10::intrusive_ptr<OwnWork> work, Queue& others, Queue& own);
  static void move(OwnWork& send, OwnWork& recv);
  static void drop_ended(Queue& queue);

  const int rank_, name_;
  const std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  std::map<int, Queue> sends_, receives_;  ///< By tag; what has not met its counterpart.
};

}  // namespace lockstep::gloo
