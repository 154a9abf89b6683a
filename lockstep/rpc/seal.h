#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "lockstep/base/hmac.h"
#include "lockstep/base/used_numbers.h"

namespace torch::distributed::rpc {
class Message;
}

namespace lockstep::rpc::detail {

using MessagePtr = c10::intrusive_ptr<torch::distributed::rpc::Message>;

/// The window is more than a worker's calls under way, so that none which is late is refused.
using UsedNumbers = lockstep::UsedNumbers<1 << 17>;
using lockstep::hmac_sha256;
inline constexpr size_t kCodeBytes = kHmacBytes;

/// What a worker puts behind the bytes of each message: who sends it, the request's number, and, in
/// a job with a secret, an HMAC-SHA256 of all that is in the message. So only who knows the secret
/// can call, nobody can change what is sent, and no message counts twice. Nothing is encrypted. Any
/// thread.
class Seal {
 public:
  struct Opened {
    int sender = 0;
    uint64_t number = 0;
  };
  /// `secret`: empty for none. `job`: of this job alone, so that messages of others do not count.
  Seal(int self, const std::string& secret, const std::string& job);

  uint64_t next_number();
  /// A copy of the message with a seal, for the receiver. An answer has its request's number.
  MessagePtr close(const MessagePtr& message, int receiver, uint64_t number) const;
  /// Takes a request's seal off. Throws DataError when it has none, a wrong one, or one that came
  /// before.
  Opened open_request(torch::distributed::rpc::Message& message);
  /// Of the answer from `sender` to the request of that number.
  void open_answer(torch::distributed::rpc::Message& message, int sender, uint64_t number) const;

 private:
  Opened take_off(torch::distributed::rpc::Message& message) const;
  std::string code(const torch::distributed::rpc::Message& message, int sender, int receiver,
                   uint64_t number) const;

  const int self_;
  const std::string key_;  ///< Empty: without codes.
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<int, UsedNumbers> used_;  ///< By sender.
};

}  // namespace lockstep::rpc::detail
