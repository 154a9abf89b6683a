#include "lockstep/comm/backends/gloo/own_messages.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/call_signature.h"

namespace lockstep::gloo {

class OwnMessages::OwnWork final : public c10d::Work {
 public:
  OwnWork(int rank, int name, c10d::OpType type, at::Tensor tensor, int tag,
          std::chrono::milliseconds timeout, std::shared_ptr<std::mutex> meeting)
      : c10d::Work(rank, type),
        name_(name),
        tensor_(std::move(tensor)),
        tag_(tag),
        timeout_(timeout),
        meeting_(std::move(meeting)) {}

  int sourceRank() const override { return rank_; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  void abort() override { end_unmet(std::make_exception_ptr(CommError(text() + " was given up"))); }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto limit = timeout.count() > 0 ? timeout : timeout_;
    std::unique_lock lock(mutex_);
    if (!cv_.wait_for(lock, limit, [this] { return completed_; })) {
      lock.unlock();
      Failure late{.kind = Failure::Kind::late, .ranks = {{name_, Failure::Kind::late}}};
      end_unmet(std::make_exception_ptr(TimeoutError(
          text() + ": its counterpart did not come within " + seconds_text(limit), {}, late)));
      lock.lock();
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void end(std::exception_ptr error) { finish(std::move(error)); }
  const at::Tensor& tensor() const { return tensor_; }
  /// "rank 1: send to itself of float32 [4] with tag 0".
  std::string text() const {
    return "rank " + std::to_string(name_) +
           (retrieveOpType() == c10d::OpType::SEND ? ": send to" : ": recv from") + " itself of " +
           describe(signature_of(tensor_)) + " with tag " + std::to_string(tag_);
  }

 private:
  void end_unmet(std::exception_ptr error) {
    const std::lock_guard meeting(*meeting_);
    if (!isCompleted()) finish(std::move(error));
  }

  const int name_;
  const at::Tensor tensor_;
  const int tag_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<std::mutex> meeting_;  ///< Held while two meet.
};

OwnMessages::OwnMessages(int rank, int name) : rank_(rank), name_(name) {}
OwnMessages::~OwnMessages() = default;

c10::intrusive_ptr<OwnMessages::OwnWork> OwnMessages::make(
    c10d::OpType type, const at::Tensor& tensor, int tag, std::chrono::milliseconds timeout) const {
  return c10::make_intrusive<OwnWork>(rank_, name_, type, tensor, tag, timeout, mutex_);
}

OwnMessages::WorkPtr OwnMessages::send(const at::Tensor& tensor, int tag,
                                       std::chrono::milliseconds timeout) {
  const std::lock_guard meeting(*mutex_);
  return meet(make(c10d::OpType::SEND, tensor, tag, timeout), receives_[tag], sends_[tag]);
}

OwnMessages::WorkPtr OwnMessages::recv(const at::Tensor& tensor, int tag,
                                       std::chrono::milliseconds timeout) {
  const std::lock_guard meeting(*mutex_);
  return meet(make(c10d::OpType::RECV, tensor, tag, timeout), sends_[tag], receives_[tag]);
}

bool OwnMessages::has_sent(int tag) {
  const std::lock_guard meeting(*mutex_);
  const auto found = sends_.find(tag);
  if (found == sends_.end()) return false;
  drop_ended(found->second);
  return !found->second.empty();
}

OwnMessages::WorkPtr OwnMessages::meet(c10::intrusive_ptr<OwnWork> work, Queue& others,
                                       Queue& own) {
  drop_ended(others);
  if (others.empty()) {
    own.push_back(work);
    return work;
  }
  const auto other = std::move(others.front());
  others.pop_front();
  const bool sends = work->retrieveOpType() == c10d::OpType::SEND;
  sends ? move(*work, *other) : move(*other, *work);
  return work;
}

void OwnMessages::move(OwnWork& send, OwnWork& recv) {
  const at::Tensor &from = send.tensor(), &to = recv.tensor();
  std::exception_ptr error;
  if (from.scalar_type() != to.scalar_type() || from.numel() != to.numel()) {
    error = std::make_exception_ptr(
        MismatchError(send.text() + " has met a receive of " + describe(signature_of(to))));
  } else {
    const at::AutoDispatchBelowADInplaceOrView outside_autograd;
    to.copy_(from.view_as(to));
  }
  send.end(error);
  recv.end(error);
}

void OwnMessages::drop_ended(Queue& queue) {
  std::erase_if(queue, [](const auto& work) { return work->isCompleted(); });
}

}  // namespace lockstep::gloo
