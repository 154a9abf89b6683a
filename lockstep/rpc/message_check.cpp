#include "lockstep/rpc/message_check.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <algorithm>
#include <climits>
#include <iterator>
#include <string>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/rpc/sent_tensors.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using native::MessageType;

[[noreturn]] void fail(const std::string& what) {
  throw DataError("rpc: a message that cannot be read: " + what);
}

/// How many elements LibTorch takes from a kind's tuple without looking.
struct Form {
  MessageType type;
  bool is_tuple;
  uint32_t least;
};
constexpr Form kForms[] = {
    {MessageType::SCRIPT_CALL, true, 1},
    {MessageType::SCRIPT_REMOTE_CALL, true, 3},
    {MessageType::SCRIPT_RREF_FETCH_CALL, true, 2},
    {MessageType::RREF_USER_DELETE, true, 2},
    {MessageType::RREF_FORK_REQUEST, true, 2},
    {MessageType::RREF_CHILD_ACCEPT, true, 1},
    {MessageType::RREF_BACKWARD_REQ, true, 3},
    {MessageType::BACKWARD_AUTOGRAD_REQ, true, 3},
    {MessageType::CLEANUP_AUTOGRAD_CONTEXT_REQ, false, 0},
    {MessageType::SCRIPT_RET, false, 0},
    {MessageType::SCRIPT_RREF_FETCH_RET, true, 1},
    {MessageType::REMOTE_RET, true, 2},
};

/// What is sent in an autograd context. No kind that is wrapped itself: it would make LibTorch go
/// deeper and deeper.
constexpr MessageType kWrapped[] = {
    MessageType::SCRIPT_CALL, MessageType::SCRIPT_REMOTE_CALL, MessageType::SCRIPT_RREF_FETCH_CALL,
    MessageType::SCRIPT_RET,  MessageType::REMOTE_RET,         MessageType::SCRIPT_RREF_FETCH_RET,
};

uint64_t bytes_of(const native::Message& message) {
  uint64_t bytes = message.payload().size();
  for (const auto& tensor : message.tensors()) {
    if (!tensor.defined()) continue;
    if (const auto why = why_unsendable(tensor); !why.empty()) fail(why);
    bytes += tensor.nbytes();
  }
  return bytes;
}

std::vector<CarriedReference> check_part(MessageType type, std::string_view bytes,
                                         const PickleLimits& limits) {
  for (const auto& form : kForms) {
    if (form.type != type) continue;
    PickleShape shape = check_pickle(bytes, limits);
    if (form.is_tuple && (!shape.is_tuple || shape.count < form.least)) {
      fail("its kind has at least " + std::to_string(form.least) + " elements");
    }
    return std::move(shape.references);
  }
  fail("of the unknown kind " + std::to_string(static_cast<int>(type)));
}

/// A message in an autograd context: another one's bytes, those of the context, and the latter's
/// size.
std::vector<CarriedReference> check_wrapped(std::string_view bytes, const PickleLimits& limits) {
  constexpr size_t kSizeBytes = 8;
  constexpr uint32_t kContextParts = 5;
  if (bytes.size() < kSizeBytes) fail("it ends too early");
  uint64_t context_size = 0;
  for (const char byte : bytes.substr(bytes.size() - kSizeBytes)) {
    context_size = context_size << 8 | static_cast<unsigned char>(byte);
  }
  bytes.remove_suffix(kSizeBytes);
  if (context_size > bytes.size()) fail("a length beyond its end");
  const size_t first = bytes.size() - context_size;
  const PickleShape context = check_pickle(bytes.substr(first), limits);
  if (!context.is_tuple || context.count != kContextParts) fail("no autograd context");
  const auto type = static_cast<MessageType>(context.first_number);
  if (std::find(std::begin(kWrapped), std::end(kWrapped), type) == std::end(kWrapped)) {
    fail("of a kind that no autograd context has");
  }
  return check_part(type, bytes.substr(0, first), limits);
}

std::vector<CarriedReference> check_payload(const native::Message& message,
                                            const MessageLimits& limits) {
  const std::string_view payload(message.payload().data(), message.payload().size());
  const PickleLimits part{limits.bytes, limits.depth, message.tensors().size()};
  switch (message.type()) {
    case MessageType::FORWARD_AUTOGRAD_REQ:
    case MessageType::FORWARD_AUTOGRAD_RESP:
      return check_wrapped(payload, part);
    case MessageType::RREF_ACK:
    case MessageType::BACKWARD_AUTOGRAD_RESP:
    case MessageType::CLEANUP_AUTOGRAD_CONTEXT_RESP:
    case MessageType::RREF_BACKWARD_RESP:
    case MessageType::EXCEPTION:
      return {};  // Nothing of it is read, or a text.
    default:
      return check_part(message.type(), payload, part);
  }
}

}  // namespace

std::vector<CarriedReference> check_message(const native::Message& message,
                                            const MessageLimits& limits) {
  const uint64_t bytes = bytes_of(message);
  if (bytes > limits.bytes) {
    throw DataError("rpc: a message of " + std::to_string(bytes) + " bytes; expected at most " +
                        std::to_string(limits.bytes),
                    "Options::max_message_bytes is the limit");
  }
  return check_payload(message, limits);
}

std::vector<CarriedReference> references_in(const native::Message& message) {
  return check_payload(message, {UINT64_MAX, INT_MAX});
}

}  // namespace lockstep::rpc::detail
