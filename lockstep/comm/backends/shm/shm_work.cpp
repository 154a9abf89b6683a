#include "lockstep/comm/backends/shm/shm_work.h"

#include <ATen/ATen.h>

namespace lockstep::shm {
namespace {

constexpr std::chrono::hours kNoLimit{24 * 365};
/// Of a message's hash; the others are the number of elements.
constexpr int kDtypeBits = 8;

}  // namespace

uint64_t ShmWork::hash() const {
  uint64_t hash = TensorWork::hash();
  if (!region_.region) return hash;
  for (const uint64_t part :
       {static_cast<uint64_t>(region_.number), static_cast<uint64_t>(region_.offset)})
    hash = (hash ^ part) * 0x9E3779B97F4A7C15U;
  return hash ^ hash >> 32;
}

bool ShmWork::run_here() {
  const bool blocking = !request().async;
  if (!blocking && bytes() > inline_bytes_) return false;
  begun_ = true;
  shm::start(group_, *this, plan_);
  if (!blocking && !group_.all_here(group_.spin())) return false;
  shm::finish(group_, *this, plan_, request().timeout, blocking ? Waiter::caller : Waiter::thread);
  return true;
}

void ShmWork::run_later() {
  if (!begun_) shm::start(group_, *this, plan_);
  shm::finish(group_, *this, plan_, request().timeout);
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
  const CallSignature send{.operation = Operation::send,
                           .root = met.receiver,
                           .sequence = met.number,
                           .inputs = {tensor(met.send)}};
  const CallSignature recv{
      .operation = Operation::recv, .root = met.sender, .outputs = {tensor(met.recv)}};
  return find_p2p_mismatch(send, recv, met.tag, names.ranks, names.group)
      .value_or("a send and its receive differ");
}

void ShmMessageWork::begin(Messages& messages, backends::CallQueue& queue, int tag) {
  const auto self = c10::intrusive_ptr<ShmMessageWork>::unsafe_reclaim_from_nonowning(this);
  const bool sends = request().operation == Operation::send;
  const at::Tensor memory = sends ? given(tensor()) : taken(tensor(), false);
  MessageCall call;
  call.tag = tag_ = tag;
  call.data = memory.data_ptr();
  call.bytes = memory.nbytes();
  // Until the message is done it holds this work, also when the program has dropped it.
  call.call = std::shared_ptr<const Call>(this, [self](const Call*) {});
  call.timeout = request().timeout;
  call.finished = [this, &queue](const std::exception_ptr& error) {
    if (end(error))
      queue.call_back(c10::intrusive_ptr<ShmMessageWork>::unsafe_reclaim_from_nonowning(this));
  };
  message_ = sends ? messages.post_send(request().root, std::move(call))
                   : messages.post_recv(request().root, std::move(call));
}

const at::Tensor& ShmMessageWork::tensor() const {
  return (request().inputs.empty() ? request().outputs : request().inputs)[0];
}

uint64_t ShmMessageWork::hash() const {
  return static_cast<uint64_t>(tensor().numel()) << kDtypeBits |
         static_cast<uint64_t>(tensor().scalar_type());
}

std::string ShmMessageWork::text() const {
  return describe(signature(), names()->ranks) + " with tag " + std::to_string(tag_) +
         " of group '" + names()->group + "'";
}

bool ShmMessageWork::wait(std::chrono::milliseconds timeout) {
  message_->wait(timeout == kNoTimeout ? kNoLimit : timeout);
  return TensorWork::wait(kNoTimeout);
}

}  // namespace lockstep::shm
