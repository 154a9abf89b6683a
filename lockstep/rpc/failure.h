#pragma once

#include <exception>
#include <string>

namespace lockstep::rpc::detail {

/// What a handler threw as a text that LibTorch carries to the caller, who gets a RemoteError of
/// it. A RemoteError is carried on as it is, so that nested calls tell the first place. LibTorch
/// puts words of its own around the text.
std::string encode_failure(const std::exception_ptr& error, const std::string& worker,
                           const std::string& function);

/// What the two ends know of a function, where they differ.
std::string encode_mismatch(const std::string& function, const std::string& worker,
                            const std::string& types);

/// One of our errors for what LibTorch's RPC failed with: RemoteError, MismatchError, TimeoutError,
/// PeerLostError, else CommError. `what`: "rpc: 'add' on worker 'ps'". `types`: the caller's.
std::exception_ptr decode_failure(const std::exception_ptr& error, const std::string& what,
                                  const std::string& types);

}  // namespace lockstep::rpc::detail
