#include "lockstep/data/download.h"

#include <curl/curl.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/data/download_progress.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

/// The file that grows beside the target.
class PartFile {
 public:
  explicit PartFile(const fs::path& target) : path_(target.string() + ".part") {
    fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!fd_) {
      throw SystemError("cannot write " + path_.string(), errno,
                        "check that the folder exists and that you may write there");
    }
  }

  uint64_t size() const {
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0) {
      throw SystemError("cannot read " + path_.string(), errno);
    }
    return static_cast<uint64_t>(status.st_size);
  }

  void clear() {
    if (::ftruncate(fd_.get(), 0) != 0) throw SystemError("cannot write " + path_.string(), errno);
  }

  void append(const void* data, size_t size) { write_all(fd_.get(), data, size, path_); }

  /// Flushes the file and gives it its final name.
  void publish(const fs::path& target) {
    fsync_path(path_);
    if (::rename(path_.c_str(), target.c_str()) != 0) {
      throw SystemError("cannot rename " + path_.string() + " to " + target.string(), errno);
    }
    fsync_path(target.has_parent_path() ? target.parent_path() : ".");
  }

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  UniqueFd fd_;
};

/// How one request ended.
struct Outcome {
  bool complete = false;
  bool may_pass = false;       ///< Worth another try at the same address.
  bool cannot_resume = false;  ///< The server does not give the rest of the part that is there.
  std::string problem;
};

bool may_pass(CURLcode code, long status) {
  switch (code) {
    case CURLE_HTTP_RETURNED_ERROR:
      return status == 408 || status == 429 || status >= 500;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_PARTIAL_FILE:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM:
      return true;
    default:
      return false;
  }
}

/// One address and the part that is filled from it.
class Transfer {
 public:
  Transfer(std::string url, PartFile& part, const DownloadOptions& options)
      : url_(std::move(url)), part_(part), options_(options) {}

  Outcome run() {
    static std::once_flag once;
    std::call_once(once, [] { ::curl_global_init(CURL_GLOBAL_DEFAULT); });
    const std::unique_ptr<CURL, decltype(&::curl_easy_cleanup)> handle(::curl_easy_init(),
                                                                       &::curl_easy_cleanup);
    if (!handle) throw Error("libcurl cannot start a transfer");
    const uint64_t have = part_.size();
    progress_.emplace(fs::path(part_.path()).stem().string(), have);
    configure(handle.get(), have);
    const CURLcode code = ::curl_easy_perform(handle.get());
    if (write_error_) std::rethrow_exception(write_error_);
    long status = 0;
    ::curl_easy_getinfo(handle.get(), CURLINFO_RESPONSE_CODE, &status);
    return outcome_of(code, status, have);
  }

 private:
  void configure(CURL* handle, uint64_t have) {
    const bool secure = to_lower(url_).starts_with("https:");
    ::curl_easy_setopt(handle, CURLOPT_URL, url_.c_str());
    ::curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
    ::curl_easy_setopt(handle, CURLOPT_REDIR_PROTOCOLS_STR, secure ? "https" : "http,https");
    ::curl_easy_setopt(handle, CURLOPT_FOLLOWLOCATION, 1L);
    ::curl_easy_setopt(handle, CURLOPT_MAXREDIRS, 10L);
    ::curl_easy_setopt(handle, CURLOPT_FAILONERROR, 1L);
    ::curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
    ::curl_easy_setopt(handle, CURLOPT_USERAGENT, "lockstep");
    ::curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, error_text_.data());
    ::curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT,
                       static_cast<long>(options_.connect_timeout.count()));
    ::curl_easy_setopt(handle, CURLOPT_RESUME_FROM_LARGE, static_cast<curl_off_t>(have));
    const std::string ca_file = certificates();
    if (!ca_file.empty()) ::curl_easy_setopt(handle, CURLOPT_CAINFO, ca_file.c_str());
    ::curl_easy_setopt(handle, CURLOPT_WRITEDATA, this);
    ::curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, &Transfer::on_data);
    ::curl_easy_setopt(handle, CURLOPT_NOPROGRESS, 0L);
    ::curl_easy_setopt(handle, CURLOPT_XFERINFODATA, this);
    ::curl_easy_setopt(handle, CURLOPT_XFERINFOFUNCTION, &Transfer::on_progress);
  }

  std::string certificates() const {
    if (!options_.ca_file.empty()) return options_.ca_file.string();
    if (const auto bundle = env_string("CURL_CA_BUNDLE")) return *bundle;
    return env_string("SSL_CERT_FILE").value_or("");
  }

  static size_t on_data(char* data, size_t size, size_t count, void* self) {
    auto* transfer = static_cast<Transfer*>(self);
    try {
      transfer->part_.append(data, size * count);
      return size * count;
    } catch (...) {  // C code is between here and run(), which rethrows it
      transfer->write_error_ = std::current_exception();
      return 0;
    }
  }

  /// libcurl calls this at least about once a second; anything but 0 ends the transfer. (Its own
  /// limit of the speed takes the mean of some seconds, which a stall comes through late.)
  static int on_progress(void* self, curl_off_t total, curl_off_t now, curl_off_t, curl_off_t) {
    auto* transfer = static_cast<Transfer*>(self);
    if (now != transfer->last_now_) {
      transfer->last_now_ = now;
      transfer->last_change_ = Clock::now();
    }
    transfer->progress_->update(static_cast<uint64_t>(now), static_cast<uint64_t>(total));
    transfer->stalled_ = Clock::now() - transfer->last_change_ >= transfer->stall_limit();
    return transfer->stalled_ ? 1 : 0;
  }

  /// Until the first byte there is the connecting too.
  Clock::duration stall_limit() const {
    if (last_now_ > 0) return options_.stall_timeout;
    return options_.stall_timeout + options_.connect_timeout;
  }

  Outcome outcome_of(CURLcode code, long status, uint64_t have) {
    if (code == CURLE_OK) {
      progress_->done(url_);
      return {.complete = true, .problem = {}};
    }
    constexpr long kRangeNotSatisfiable = 416;
    const bool cannot_resume =
        have > 0 && (code == CURLE_RANGE_ERROR || status == kRangeNotSatisfiable);
    if (stalled_) {
      const std::chrono::duration<double> limit = stall_limit();
      return {.may_pass = true, .problem = "no byte came for " + human_seconds(limit.count())};
    }
    std::string problem = error_text_[0] ? error_text_.data() : ::curl_easy_strerror(code);
    return {.may_pass = may_pass(code, status), .cannot_resume = cannot_resume, .problem = problem};
  }

  std::string url_;
  PartFile& part_;
  const DownloadOptions& options_;
  std::array<char, CURL_ERROR_SIZE> error_text_{};
  std::exception_ptr write_error_;
  curl_off_t last_now_ = 0;
  Clock::time_point last_change_ = Clock::now();
  bool stalled_ = false;
  std::optional<DownloadProgress> progress_;
};

/// Tries one address until it delivers or its failure cannot pass; none when the part is complete,
/// else what went wrong.
std::optional<std::string> fetch(const std::string& url, PartFile& part,
                                 const DownloadOptions& options) {
  auto pause = options.first_pause;
  for (int attempt = 1;; ++attempt) {
    Outcome outcome = Transfer(url, part, options).run();
    if (outcome.cannot_resume) {
      part.clear();
      outcome = Transfer(url, part, options).run();
    }
    if (outcome.complete) return std::nullopt;
    if (!outcome.may_pass || attempt >= options.attempts) {
      return url + ": " + outcome.problem +
             (attempt > 1 ? " (" + std::to_string(attempt) + " tries)" : "");
    }
    log_warning("download of " + url + " failed (" + outcome.problem + "); try " +
                std::to_string(attempt + 1) + " of " + std::to_string(options.attempts) + " in " +
                human_seconds(std::chrono::duration<double>(pause).count()));
    std::this_thread::sleep_for(pause);
    pause *= 2;
  }
}

/// Fetches from one address and verifies. A part that was there before and makes the whole wrong is
/// dropped and everything fetched once more.
std::optional<std::string> fetch_verified(const std::string& url, PartFile& part,
                                          const VerifyFile& verify,
                                          const DownloadOptions& options) {
  bool resumed = part.size() > 0;
  while (true) {
    if (auto problem = fetch(url, part, options)) return problem;
    try {
      verify(part.path());
      return std::nullopt;
    } catch (const DataError& error) {
      part.clear();
      if (!resumed) return url + ": " + error.what();
      resumed = false;
    }
  }
}

}  // namespace

std::vector<std::string> mirrors(std::string chosen, const std::string& variable,
                                 const std::vector<std::string>& known) {
  if (chosen.empty()) chosen = env_string(variable).value_or("");
  if (chosen.empty()) return known;
  if (!chosen.ends_with('/')) chosen += '/';
  return {chosen};
}

void download(const std::vector<std::string>& urls, const fs::path& target,
              const VerifyFile& verify, const DownloadOptions& options,
              const std::string& mirror_variable) {
  PartFile part(target);
  std::vector<std::string> problems;
  for (const std::string& url : urls) {
    const auto problem = fetch_verified(url, part, verify, options);
    if (!problem) {
      part.publish(target);
      return;
    }
    problems.push_back(*problem);
  }
  if (part.size() == 0) fs::remove(part.path());
  throw DataError("cannot download " + target.string() + ":\n  " + join(problems, "\n  "),
                  "try again (what has arrived is kept), " +
                      (mirror_variable.empty() ? "name another mirror"
                                               : "set " + mirror_variable + " to a mirror's URL") +
                      ", or get the file by other means and put it there");
}

}  // namespace lockstep
