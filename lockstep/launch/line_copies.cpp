#include "lockstep/launch/line_copies.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::launch {

LineCopies::LineCopies(LineCopiesPlan plan) : plan_(std::move(plan)) {
  if (plan_.file.empty()) return;
  file_.reset(::open(plan_.file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file_) throw SystemError("cannot write the log file " + plan_.file.string(), errno);
}

void LineCopies::take(std::string_view prefix, std::string_view line) {
  const auto in_line = [&](const std::string& word) {
    return line.find(word) != std::string_view::npos;
  };
  if (!file_ || std::none_of(plan_.words.begin(), plan_.words.end(), in_line)) return;
  std::string copy(prefix);
  copy.append(line).append("\n");
  try {
    write_all(file_.get(), copy.data(), copy.size(), plan_.file.string());
  } catch (const SystemError& error) {
    // A full disk costs the copies, not the training.
    log_warning(std::string(error.what()) + "; the copies are not continued");
    file_.reset();
  }
}

}  // namespace lockstep::launch
