#include "lockstep/rpc/remote_failure.h"

#include <c10/util/Type.h>
#include <cxxabi.h>

#include <algorithm>
#include <iterator>
#include <typeinfo>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/rpc/future.h"

namespace lockstep::rpc {

RemoteError::RemoteError(std::string worker, std::string function, std::string type,
                         std::string message)
    : Error("rpc: '" + function + "' on worker '" + worker + "' threw " + type + ": " + message),
      worker_(std::move(worker)),
      function_(std::move(function)),
      type_(std::move(type)),
      message_(std::move(message)) {}

namespace detail {
namespace {

// Characters that no message is likely to hold.
constexpr char kFailure[] = "\x01rpc-failure\x02", kMismatch[] = "\x01rpc-mismatch\x02";
constexpr char kEnd = '\x03', kSeparator = '\x02';

std::string current_type_name() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  return type ? c10::demangle(type->name()) : "an unknown type";
}

std::string packed(const char* kind, const std::vector<std::string>& parts) {
  return kind + lockstep::join(parts, std::string(1, kSeparator)) + kEnd;
}

// The parts of a packed text within another one. Empty: there is none.
std::vector<std::string> unpacked(const std::string& text, const std::string& kind, size_t count) {
  const size_t begin = text.find(kind);
  if (begin == std::string::npos) return {};
  const size_t first = begin + kind.size();
  const size_t end = text.find(kEnd, first);
  if (end == std::string::npos) return {};
  auto parts = split(text.substr(first, end - first), kSeparator);
  return parts.size() == count ? parts : std::vector<std::string>();
}

std::exception_ptr local_failure(const std::exception_ptr& error, const std::string& text,
                                 const std::string& what, bool context_ended) {
  const FailureKind kind = failure_kind(error);
  if (kind == FailureKind::ours) return error;
  if (text.find("RPCErr:1:") != std::string::npos || kind == FailureKind::timeout) {
    return late_failure(what);
  }
  // TensorPipe's words. The last one is that of its channel which reads the other process's memory.
  constexpr const char* kLost[] = {"pipe closed", "eof", "EOF", "No such process"};
  const bool is_gone = std::any_of(std::begin(kLost), std::end(kLost), [&](const char* words) {
    return text.find(words) != std::string::npos;
  });
  if (is_lost(kind) || is_gone) {
    return lost_failure(what, failure_text(error));
  }
  if (context_ended) {
    return std::make_exception_ptr(
        UsageError(what + ": the autograd context in which it was made has ended",
                   "keep the AutogradContext until its calls are done"));
  }
  return std::make_exception_ptr(CommError(what + ": " + failure_text(error)));
}

}  // namespace

std::string encode_failure(const std::exception_ptr& error, const std::string& worker,
                           const std::string& function) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError& e) {
    return packed(kFailure, {e.worker(), e.function(), e.type(), e.message()});
  } catch (const Error& e) {
    return packed(kFailure, {worker, function, current_type_name(), e.what()});
  } catch (const std::exception&) {
    return packed(kFailure, {worker, function, current_type_name(), whole_text(error)});
  } catch (...) {
    return packed(kFailure, {worker, function, current_type_name(), "no message"});
  }
}

std::string encode_mismatch(const std::string& function, const std::string& worker,
                            const std::string& types) {
  return packed(kMismatch, {function, worker, types});
}

std::exception_ptr decode_failure(const std::exception_ptr& error, const std::string& what,
                                  const std::string& types, bool context_ended) {
  const std::string text = whole_text(error);
  if (const auto p = unpacked(text, kFailure, 4); !p.empty()) {
    return std::make_exception_ptr(RemoteError(p[0], p[1], p[2], p[3]));
  }
  if (const auto p = unpacked(text, kMismatch, 3); !p.empty()) {
    return std::make_exception_ptr(MismatchError(
        "rpc: '" + p[0] + "' is " + types + " here, and " + p[2] + " on worker '" + p[1] + "'",
        "register the same function on both"));
  }
  return local_failure(error, text, what, context_ended);
}

std::exception_ptr late_failure(const std::string& what) {
  return std::make_exception_ptr(
      TimeoutError(what + ": no answer within the time-out",
                   "is the function that slow, or does it wait for something? The "
                   "call's time-out is that of its Destination, else Options::timeout"));
}

std::exception_ptr lost_failure(const std::string& what, const std::string& how) {
  return std::make_exception_ptr(PeerLostError(what + ": lost the worker (" + how + ")"));
}

}  // namespace detail
}  // namespace lockstep::rpc
