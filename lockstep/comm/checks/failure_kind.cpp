#include "lockstep/comm/checks/failure_kind.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 8> kTimeoutWords = {
    "timed out",  "timeout",           "time-out",         "time out",
    "wait timed", "deadline exceeded", "timeoutexception", "failed to pass monitoredbarrier",
};
constexpr std::array<std::string_view, 14> kConnectionWords = {
    "connection closed",     "connection reset",       "connection refused",
    "connection was closed", "connection aborted",     "connection timed out",
    "broken pipe",           "socket closed",          "socket not connected",
    "no route to host",      "network is unreachable", "application timeout caused pair closure",
    "remote process",        "recvvalue failed",
};

template <class Words>
bool holds_one_of(std::string_view text, const Words& words) {
  for (std::string_view word : words)
    if (text.find(word) != std::string_view::npos) return true;
  return false;
}

FailureKind kind_of_text(std::string_view what) {
  const std::string text = to_lower(what);
  if (holds_one_of(text, kConnectionWords)) return FailureKind::connection;
  if (holds_one_of(text, kTimeoutWords)) return FailureKind::timeout;
  return FailureKind::other;
}

}  // namespace

FailureKind failure_kind(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return FailureKind::ours;
  } catch (const c10::DistNetworkError&) {
    const FailureKind kind = kind_of_text(failure_text(error));
    return kind == FailureKind::timeout ? kind : FailureKind::connection;
  } catch (const std::exception&) {
    return kind_of_text(failure_text(error));
  } catch (...) {
    return FailureKind::other;
  }
}

std::string failure_text(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
  text = text.substr(0, text.find('\n'));
  const size_t bracket = text.find("] ");
  if (text.rfind('[', 0) == 0 && bracket != std::string::npos &&
      text.find(':') < bracket)  // [file:line]
    text = text.substr(bracket + 2);
  return text;
}

bool is_store_lost(const std::exception& error) noexcept {
  if (dynamic_cast<const Error*>(&error)) return false;
  if (dynamic_cast<const c10::DistError*>(&error)) return true;
  return kind_of_text(error.what()) == FailureKind::connection;
}

}  // namespace lockstep
