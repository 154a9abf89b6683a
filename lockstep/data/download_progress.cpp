#include "lockstep/data/download_progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr size_t kBarWidth = 24;
constexpr std::chrono::milliseconds kRedraw{100};

void write_error_text(const std::string& text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

DownloadProgress::DownloadProgress(std::string name, uint64_t already)
    : name_(std::move(name)),
      already_(already),
      terminal_(::isatty(STDERR_FILENO) == 1 && log_level() <= LogLevel::info) {}

DownloadProgress::~DownloadProgress() {
  if (drawn_) write_error_text("\n");
}

double DownloadProgress::seconds() const {
  return std::max(1e-3, std::chrono::duration<double>(Clock::now() - start_).count());
}

void DownloadProgress::update(uint64_t now, uint64_t total) {
  now_ = now;
  const bool last = total > 0 && now >= total;
  if (!terminal_ || now == 0 || (!last && Clock::now() - last_drawn_ < kRedraw)) return;
  last_drawn_ = Clock::now();
  drawn_ = true;
  const uint64_t whole = total > 0 ? already_ + total : 0;
  write_error_text("\r" + bar(name_, already_ + now, whole, static_cast<double>(now) / seconds()) +
                   "\x1b[K");
}

void DownloadProgress::done(const std::string& url) {
  if (terminal_) return;
  log_info("downloaded " + url + " (" + human_bytes(already_ + now_) + " in " +
           human_seconds(seconds()) + (already_ > 0 ? ", resumed" : "") + ")");
}

std::string DownloadProgress::bar(const std::string& name, uint64_t now, uint64_t total,
                                  double bytes_per_second) {
  const std::string speed = human_bytes(static_cast<uint64_t>(bytes_per_second)) + "/s";
  if (total == 0) return name + " " + human_bytes(now) + ", " + speed;
  const double share = std::min(1.0, static_cast<double>(now) / static_cast<double>(total));
  const auto filled = static_cast<size_t>(std::floor(share * kBarWidth));
  char percent[8];
  std::snprintf(percent, sizeof percent, "%3.0f%%", std::floor(share * 100));
  return name + " " + percent + " [" + std::string(filled, '=') +
         std::string(kBarWidth - filled, ' ') + "] " + human_bytes(now) + " of " +
         human_bytes(total) + ", " + speed;
}

}  // namespace lockstep
