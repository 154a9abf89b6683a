#include "lockstep/comm/backends/shm/shm_message_work.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::shm {
namespace {

constexpr std::chrono::hours kNoLimit{24 * 365};

}  // namespace

MessageText::MessageText(Operation operation, const at::Tensor& tensor, int peer, int tag,
                         std::shared_ptr<const GroupNames> names, at::Tensor memory)
    : elements_(tensor.numel()), tag_(tag), names_(std::move(names)), memory_(std::move(memory)) {
  signature_.operation = operation;
  signature_.root = peer;
  (operation == Operation::send ? signature_.inputs : signature_.outputs) = {signature_of(tensor)};
}

uint64_t MessageText::hash() const {
  const auto& tensor =
      signature_.operation == Operation::send ? signature_.inputs[0] : signature_.outputs[0];
  return static_cast<uint64_t>(elements_) << 8 | static_cast<uint64_t>(tensor.dtype);
}

std::string MessageText::text() const {
  return describe(signature_, names_->ranks) + " with tag " + std::to_string(tag_) + " of group '" +
         names_->group + "'";
}

std::string judge_messages(const Disagreement& met, const GroupNames& names) {
  if (met.send.empty() || met.recv.empty()) return {};
  CallSignature send = decode(met.send), recv = decode(met.recv);
  send.sequence = recv.sequence = met.number;
  recv.operation = Operation::recv;
  recv.root = met.sender;
  return find_p2p_mismatch(send, met.sender, recv, met.receiver, met.tag, names.ranks, names.group)
      .value_or(std::string());
}

void ShmMessageWork::begin(MessagePtr message) {
  message_ = std::move(message);
  if (memory_.is_same(tensor_) || opType_ == c10d::OpType::SEND) return;
  watched_ = true;
  message_->then([self = c10::intrusive_ptr<ShmMessageWork>::unsafe_reclaim_from_nonowning(this)] {
    self->finished();
  });
}

bool ShmMessageWork::wait(std::chrono::milliseconds timeout) {
  message_->wait(timeout == kNoTimeout ? kNoLimit : timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmMessageWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  const auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future_ = future;
  const bool watch = !watched_, late = ended_;
  watched_ = true;
  lock.unlock();
  const auto self = c10::intrusive_ptr<ShmMessageWork>::unsafe_reclaim_from_nonowning(this);
  if (watch) message_->then([self] { self->finished(); });
  if (late) finished();
  return future;
}

void ShmMessageWork::finished() {
  const auto error = message_->error();
  std::unique_lock lock(mutex_);
  if (!error && !ended_ && !memory_.is_same(tensor_) && opType_ != c10d::OpType::SEND)
    tensor_.copy_(memory_);
  ended_ = true;
  const auto future = future_;
  lock.unlock();
  if (!future || future->completed()) return;
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
  }
}

}  // namespace lockstep::shm
