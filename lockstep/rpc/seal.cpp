#include "lockstep/rpc/seal.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/rpc/message.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using native::Message;

/// Sender and number.
constexpr size_t kHeadBytes = 2 + 8;

}  // namespace

Seal::Seal(int self, const std::string& secret, const std::string& job)
    : self_(self), key_(secret.empty() ? "" : hmac_sha256(secret, job)) {}

uint64_t Seal::next_number() {
  const std::lock_guard lock(mutex_);
  return ++last_;
}

std::string Seal::code(const Message& message, int sender, int receiver, uint64_t number) const {
  Hmac hmac(key_);
  for (const int64_t part : {static_cast<int64_t>(message.type()), static_cast<int64_t>(sender),
                             static_cast<int64_t>(receiver), static_cast<int64_t>(number),
                             static_cast<int64_t>(message.payload().size()),
                             static_cast<int64_t>(message.tensors().size())}) {
    hmac.add_number(part);
  }
  hmac.add(message.payload().data(), message.payload().size());
  for (const auto& tensor : message.tensors()) {
    const at::Tensor plain = tensor.detach().cpu().contiguous();
    hmac.add_number(static_cast<int64_t>(plain.scalar_type()));
    hmac.add_number(plain.dim());
    for (const int64_t size : plain.sizes()) hmac.add_number(size);
    hmac.add(plain.const_data_ptr(), plain.nbytes());
  }
  return hmac.finish();
}

MessagePtr Seal::close(const MessagePtr& message, int receiver, uint64_t number) const {
  std::vector<char> payload;
  payload.reserve(message->payload().size() + kHeadBytes + kCodeBytes);
  payload = message->payload();
  const auto add = [&](const void* data, size_t size) {
    const char* first = static_cast<const char*>(data);
    payload.insert(payload.end(), first, first + size);
  };
  const auto sender = static_cast<uint16_t>(self_);
  add(&sender, sizeof(sender));
  add(&number, sizeof(number));
  if (!key_.empty()) {
    const std::string its = code(*message, self_, receiver, number);
    add(its.data(), its.size());
  }
  std::vector<at::Tensor> tensors = message->tensors();
  return c10::make_intrusive<Message>(std::move(payload), std::move(tensors), message->type(),
                                      message->id());
}

Seal::Opened Seal::take_off(Message& message) const {
  auto& payload = message.payload();
  const size_t size = kHeadBytes + (key_.empty() ? 0 : kCodeBytes);
  if (payload.size() < size) throw DataError("rpc: a message without its seal");
  const std::string seal(payload.end() - static_cast<std::ptrdiff_t>(size), payload.end());
  payload.resize(payload.size() - size);
  uint16_t sender = 0;
  Opened opened;
  std::memcpy(&sender, seal.data(), sizeof(sender));
  std::memcpy(&opened.number, seal.data() + sizeof(sender), sizeof(opened.number));
  opened.sender = sender;
  if (!key_.empty()) {
    const std::string its = code(message, opened.sender, self_, opened.number);
    if (!same_code(its, {seal.data() + kHeadBytes, kCodeBytes})) {
      throw DataError("rpc: a message that was not made with the job's secret, or was changed");
    }
  }
  return opened;
}

Seal::Opened Seal::open_request(Message& message) {
  const Opened opened = take_off(message);
  if (key_.empty()) return opened;
  const std::lock_guard lock(mutex_);
  if (!used_[opened.sender].use(opened.number)) {
    throw DataError("rpc: a message that came before");
  }
  return opened;
}

void Seal::open_answer(Message& message, int sender, uint64_t number) const {
  const Opened opened = take_off(message);
  if (opened.sender != sender || opened.number != number) {
    throw DataError("rpc: an answer to another call");
  }
}

}  // namespace lockstep::rpc::detail
