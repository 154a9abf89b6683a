#pragma once

#include <chrono>
#include <exception>
#include <vector>

#include "lockstep/comm/checks/call_signature.h"
#include "lockstep/comm/checks/check_context.h"

namespace lockstep {

/// How far a rank may look for the cause of a failure after it, at most.
inline constexpr std::chrono::milliseconds kReportPatience{1000};

/// Turns what a backend threw for `call` into TimeoutError or PeerLostError. Other exceptions come
/// back as they are. Tells the other ranks through the store that this one failed. Waits up to
/// kReportPatience for their word: which have ended, which failed as well, which are silent.
/// `timeout` is the one that applied. `died`: the ranks whose death is the cause, where that is
/// known.
std::exception_ptr translate_failure(const std::exception_ptr& error, CheckContext& context,
                                     const CallSignature& call, std::chrono::milliseconds timeout,
                                     const std::vector<int>& died = {});

/// For a wait that its caller limited to `timeout`, while the operation goes on.
std::exception_ptr short_wait_error(const CheckContext& context, const CallSignature& call,
                                    std::chrono::milliseconds timeout);

}  // namespace lockstep
