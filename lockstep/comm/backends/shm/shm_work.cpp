#include "lockstep/comm/backends/shm/shm_work.h"

#include <ATen/ATen.h>

namespace lockstep::shm {
namespace {

constexpr std::chrono::hours kNoLimit{24 * 365};
/// Of a message's hash; the others are the number of elements.
constexpr int kDtypeBits = 8;

/// What a send or a receive says of itself. It owns the memory that is sent or received into: the
/// message holds it until it is done, also when the program has dropped the work.
class MessageText : public Call {
 public:
  MessageText(const backends::Request& request, int tag,
              std::shared_ptr<const backends::GroupNames> names, at::Tensor memory)
      : tag_(tag), names_(std::move(names)), memory_(std::move(memory)) {
    signature_.operation = request.operation;
    signature_.root = request.root;
    signature_.inputs = signatures_of(request.inputs);
    signature_.outputs = signatures_of(request.outputs);
  }
  uint64_t hash() const override {
    return static_cast<uint64_t>(memory_.numel()) << kDtypeBits |
           static_cast<uint64_t>(memory_.scalar_type());
  }
  std::string text() const override {
    return describe(signature_, names_->ranks) + " with tag " + std::to_string(tag_) +
           " of group '" + names_->group + "'";
  }

 private:
  CallSignature signature_;
  int tag_;
  std::shared_ptr<const backends::GroupNames> names_;
  at::Tensor memory_;
};

}  // namespace

uint64_t ShmWork::hash() const {
  uint64_t hash = TensorWork::hash();
  if (!region_.region) return hash;
  for (const uint64_t part :
       {static_cast<uint64_t>(region_.number), static_cast<uint64_t>(region_.offset)})
    hash = (hash ^ part) * 0x9E3779B97F4A7C15U;
  return hash ^ hash >> 32;
}

void ShmWork::add(std::unique_ptr<Plan> plan) {
  if (plan_) {
    further_.push_back(std::move(plan));
  } else {
    plan_ = std::move(plan);
  }
}

void ShmWork::close() {
  if (plan_ && further_.empty()) return;
  if (plan_) further_.insert(further_.begin(), std::move(plan_));
  plan_ = sequence_plan(std::move(further_));
}

std::string judge_messages(const Disagreement& met, const backends::GroupNames& names) {
  const auto tensor = [](const Disagreement::Side& side) {
    return TensorSignature{static_cast<c10::ScalarType>(side.hash & ((1 << kDtypeBits) - 1)),
                           {static_cast<int64_t>(side.hash >> kDtypeBits)}};
  };
  CallSignature send, recv;
  send.operation = Operation::send;
  send.root = met.receiver;
  send.inputs = {tensor(met.send)};
  recv.operation = Operation::recv;
  recv.root = met.sender;
  recv.outputs = {tensor(met.recv)};
  send.sequence = recv.sequence = met.number;
  return find_p2p_mismatch(send, met.sender, recv, met.receiver, met.tag, names.ranks, names.group)
      .value_or("a send and its receive differ");
}

void ShmMessageWork::begin(Messages& messages, backends::CallQueue& queue, int tag) {
  queue_ = &queue;
  const bool sends = request().operation == Operation::send;
  const at::Tensor& tensor = (sends ? request().inputs : request().outputs)[0];
  const at::Tensor memory = sends ? given(tensor) : taken(tensor, false);
  MessageCall call;
  call.tag = tag;
  call.data = memory.data_ptr();
  call.bytes = memory.nbytes();
  call.call = std::make_shared<MessageText>(request(), tag, names(), memory);
  call.timeout = request().timeout;
  copied_ = !sends && !memory.is_same(tensor);
  message_ = sends ? messages.post_send(request().root, std::move(call))
                   : messages.post_recv(request().root, std::move(call));
  if (copied_ || recorded()) watch();
}

void ShmMessageWork::watch() {
  if (watched_.exchange(true)) return;
  const auto self = c10::intrusive_ptr<ShmMessageWork>::unsafe_reclaim_from_nonowning(this);
  message_->then([self] {
    if (self->end(self->message_->error())) self->queue_->call_back(self);
  });
}

bool ShmMessageWork::wait(std::chrono::milliseconds timeout) {
  try {
    message_->wait(timeout == kNoTimeout ? kNoLimit : timeout);
  } catch (...) {
    if (message_->done()) note_end(std::current_exception());
    throw;
  }
  note_end(nullptr);
  return watched_ ? TensorWork::wait(timeout) : true;
}

c10::intrusive_ptr<c10::ivalue::Future> ShmMessageWork::getFuture() {
  auto future = TensorWork::getFuture();
  watch();
  return future;
}

}  // namespace lockstep::shm
