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
/// `context_ended`: the call's autograd context has, without which LibTorch can do nothing with it.
std::exception_ptr decode_failure(const std::exception_ptr& error, const std::string& what,
                                  const std::string& types, bool context_ended = false);

/// The failure of a call that was not answered in time, and of one whose worker is gone. `how`:
/// what is known of that.
std::exception_ptr late_failure(const std::string& what);
std::exception_ptr lost_failure(const std::string& what, const std::string& how);

}  // namespace lockstep::rpc::detail
