#include "lockstep/comm/checks/translate.h"

#include <c10/util/Exception.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

bool says_timeout(const std::string& text) {
  const std::string lower = to_lower(text);
  return lower.find("timed out") != std::string::npos || lower.find("timeout") != std::string::npos;
}

std::exception_ptr comm_error(const std::string& text) {
  if (says_timeout(text)) return std::make_exception_ptr(TimeoutError(text));
  return std::make_exception_ptr(CommError(text));
}

}  // namespace

std::exception_ptr translate(std::exception_ptr error) {
  if (!error) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return error;
  } catch (const c10::Error& other) {
    return comm_error(other.what_without_backtrace());
  } catch (const std::exception& other) {
    return comm_error(other.what());
  } catch (...) {
    return std::make_exception_ptr(CommError("an exception that is no std::exception"));
  }
}

}  // namespace lockstep
