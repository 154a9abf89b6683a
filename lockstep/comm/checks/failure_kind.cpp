#include "lockstep/comm/checks/failure_kind.h"

#include <c10/util/Exception.h>

#include <array>
#include <string_view>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

/// Words, in lower case, by which another library's message tells its kind: Gloo and NCCL throw
/// std::runtime_error and c10::Error for everything. The only list of them. The first row counts:
/// "timed out" stands in messages of all three kinds.
constexpr auto kFailureWords = std::to_array<std::pair<std::string_view, FailureKind>>({
    {"connection timed out", FailureKind::silence},                     // the kernel
    {"application timeout caused pair closure", FailureKind::silence},  // Gloo
    {"connection closed", FailureKind::connection},                     // Gloo, NCCL
    {"connection was likely closed", FailureKind::connection},          // c10d
    {"recvvalue failed", FailureKind::connection},                      // c10d
    {"socket closed", FailureKind::connection},                         // Gloo
    {"remote process", FailureKind::connection},                        // NCCL
    {"connection reset", FailureKind::connection},                      // the kernel
    {"connection refused", FailureKind::connection},
    {"connection abort", FailureKind::connection},
    {"broken pipe", FailureKind::connection},
    {"endpoint is not connected", FailureKind::connection},
    {"no route to host", FailureKind::connection},
    {"network is unreachable", FailureKind::connection},
    {"timed out", FailureKind::timeout},                        // Gloo, c10d, NCCL
    {"timeout", FailureKind::timeout},                          // c10d, NCCL
    {"failed to pass monitoredbarrier", FailureKind::timeout},  // c10d
});

FailureKind kind_of_text(std::string_view message) {
  const std::string text = to_lower(message);
  for (const auto& [words, kind] : kFailureWords)
    if (text.find(words) != std::string::npos) return kind;
  return FailureKind::other;
}

}  // namespace

std::string whole_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

FailureKind failure_kind(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return FailureKind::ours;
  } catch (const c10::DistNetworkError&) {
    const FailureKind kind = kind_of_text(failure_text(error));
    return kind == FailureKind::other ? FailureKind::connection : kind;
  } catch (const std::exception&) {
    return kind_of_text(failure_text(error));
  } catch (...) {
    return FailureKind::other;
  }
}

std::string failure_text(const std::exception_ptr& error) {
  std::string text = whole_text(error);
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
  return is_lost(kind_of_text(error.what()));
}

std::exception_ptr translate(std::exception_ptr error) {
  if (!error) return nullptr;
  const FailureKind kind = failure_kind(error);
  if (kind == FailureKind::ours) return error;
  const std::string text = whole_text(error);
  if (kind == FailureKind::timeout || kind == FailureKind::silence)
    return std::make_exception_ptr(TimeoutError(text));
  return std::make_exception_ptr(CommError(text));
}

}  // namespace lockstep
