#include "lockstep/launch/line_cutter.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/text.h"

namespace lockstep::launch {

void LineCutter::feed(std::string_view bytes, Time now, const Sink& sink) {
  if (last_line_ == Time{}) last_line_ = now;
  fed_ = now;
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    const size_t room = kLongestLine - partial_.size();
    const size_t taken = std::min({newline, bytes.size(), room});
    partial_.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    const bool ended = !bytes.empty() && bytes.front() == '\n';
    if (ended || partial_.size() == kLongestLine) {
      if (ended) bytes.remove_prefix(1);
      sink(partial_);
      partial_.clear();
      last_line_ = now;
    }
  }
  const size_t rewrite = partial_.rfind('\r');
  if (rewrite == std::string::npos || rewrite == 0 || now - last_line_ < kProgressInterval) return;
  sink(std::string_view(partial_).substr(0, rewrite));
  partial_.erase(0, rewrite);
  last_line_ = now;
}

void LineCutter::finish(const Sink& sink) {
  if (!partial_.empty()) sink(partial_);
  partial_.clear();
}

std::string LineCutter::take_prompt(Time now) {
  if (!has_unfinished() || now - fed_ < kPromptDelay) return {};
  return std::exchange(partial_, {});
}

void Tail::feed(std::string_view bytes) {
  kept_.append(bytes.substr(bytes.size() - std::min(bytes.size(), 2 * kBytes)));
  if (kept_.size() > 2 * kBytes) kept_.erase(0, kept_.size() - kBytes);
}

std::vector<std::string> Tail::lines() const {
  auto text = std::string_view(kept_).substr(kept_.size() - std::min(kept_.size(), kBytes));
  if (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  if (text.empty()) return {};
  auto lines = split(text, '\n');
  if (lines.size() > kLines) {
    lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(kLines));
  }
  return lines;
}

}  // namespace lockstep::launch
