#include "lockstep/data/download.h"

#include <curl/curl.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/base/descriptors.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

/// Why an address did not deliver.
struct Problem {
  std::string text;
  bool may_pass = false;  ///< Worth another try at the same address.
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

void write_to_terminal(const std::string& text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

/// One try at one address.
class Transfer {
 public:
  Transfer(std::string url, const fs::path& target, const DownloadOptions& options)
      : url_(std::move(url)), name_(target.filename().string()), file_(target), options_(options) {}

  /// None: the file is in its place.
  std::optional<Problem> run(const std::string& md5) {
    static std::once_flag once;
    std::call_once(once, [] { ::curl_global_init(CURL_GLOBAL_DEFAULT); });
    const std::unique_ptr<CURL, decltype(&::curl_easy_cleanup)> handle(::curl_easy_init(),
                                                                       &::curl_easy_cleanup);
    if (!handle) throw Error("libcurl cannot start a transfer");
    configure(handle.get());
    const CURLcode code = ::curl_easy_perform(handle.get());
    if (shown_ >= 0) write_to_terminal("\r\x1b[K");
    if (write_error_) std::rethrow_exception(write_error_);
    if (code != CURLE_OK) {
      long status = 0;
      ::curl_easy_getinfo(handle.get(), CURLINFO_RESPONSE_CODE, &status);
      return Problem{error_text_[0] ? error_text_.data() : ::curl_easy_strerror(code),
                     may_pass(code, status)};
    }
    const std::string found = hasher_.finish();
    if (found != md5) return Problem{"the MD5 of the file is " + found + "; expected " + md5};
    file_.commit();
    curl_off_t bytes = 0, microseconds = 0;
    ::curl_easy_getinfo(handle.get(), CURLINFO_SIZE_DOWNLOAD_T, &bytes);
    ::curl_easy_getinfo(handle.get(), CURLINFO_TOTAL_TIME_T, &microseconds);
    log_info("downloaded " + url_ + " (" + human_bytes(static_cast<uint64_t>(bytes)) + " in " +
             human_seconds(static_cast<double>(microseconds) / 1e6) + ")");
    return std::nullopt;
  }

 private:
  void configure(CURL* handle) {
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
    ::curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
    ::curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME,
                       static_cast<long>(options_.stall_timeout.count()));
    const std::string ca_file = certificates();
    if (!ca_file.empty()) ::curl_easy_setopt(handle, CURLOPT_CAINFO, ca_file.c_str());
    ::curl_easy_setopt(handle, CURLOPT_WRITEDATA, this);
    ::curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, &Transfer::on_data);
    if (::isatty(STDERR_FILENO) != 1 || log_level() > LogLevel::info) return;
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
      transfer->file_.write(data, size * count);
      transfer->hasher_.update(data, size * count);
      return size * count;
    } catch (...) {  // C code is between here and run(), which rethrows it
      transfer->write_error_ = std::current_exception();
      return 0;
    }
  }

  static int on_progress(void* self, curl_off_t total, curl_off_t now, curl_off_t, curl_off_t) {
    auto* transfer = static_cast<Transfer*>(self);
    const curl_off_t percent = total > 0 ? 100 * now / total : transfer->shown_;
    if (percent == transfer->shown_) return 0;
    transfer->shown_ = percent;
    write_to_terminal("\r" + transfer->name_ + " " + std::to_string(percent) + "% of " +
                      human_bytes(static_cast<uint64_t>(total)) + "\x1b[K");
    return 0;
  }

  std::string url_;
  std::string name_;
  AtomicFile file_;
  const DownloadOptions& options_;
  Hasher hasher_{Hasher::Algorithm::md5};
  std::array<char, CURL_ERROR_SIZE> error_text_{};
  std::exception_ptr write_error_;
  curl_off_t shown_ = -1;  ///< Percent on the terminal.
};

/// Tries one address until it delivers or its failure cannot pass. Gives what went wrong.
std::optional<std::string> fetch(const std::string& url, const fs::path& target,
                                 const std::string& md5, const DownloadOptions& options) {
  auto pause = options.first_pause;
  for (int attempt = 1;; ++attempt) {
    const auto problem = Transfer(url, target, options).run(md5);
    if (!problem) return std::nullopt;
    if (!problem->may_pass || attempt >= options.attempts) {
      return url + ": " + problem->text +
             (attempt > 1 ? " (" + std::to_string(attempt) + " tries)" : "");
    }
    log_warning("download of " + url + " failed (" + problem->text + "); try " +
                std::to_string(attempt + 1) + " of " + std::to_string(options.attempts) + " in " +
                human_seconds(std::chrono::duration<double>(pause).count()));
    std::this_thread::sleep_for(pause);
    pause *= 2;
  }
}

/// The file's lock; nothing while another process has it.
UniqueFd try_lock(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd) {
    throw SystemError("cannot make " + path.string(), errno,
                      "the folder must be writable to download into it");
  }
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK || errno == EINTR) return {};
    throw SystemError("cannot lock " + path.string(), errno);
  }
  // An owner that is done removes it.
  return is_still_named(fd.get(), path) ? std::move(fd) : UniqueFd();
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw SystemError("cannot make the folder " + folder.string(), error.value());
}

}  // namespace

std::vector<std::string> mirrors(const std::string& variable,
                                 const std::vector<std::string>& known) {
  std::string chosen = env_string(variable).value_or("");
  if (chosen.empty()) return known;
  if (!chosen.ends_with('/')) chosen += '/';
  return {chosen};
}

void download(const std::vector<std::string>& urls, const fs::path& target, const std::string& md5,
              const DownloadOptions& options, const std::string& mirror_variable) {
  std::vector<std::string> problems;
  for (const std::string& url : urls) {
    const auto problem = fetch(url, target, md5, options);
    if (!problem) return;
    problems.push_back(*problem);
  }
  throw DataError("cannot download " + target.string() + ":\n  " + join(problems, "\n  "),
                  "try again, set " + mirror_variable +
                      " to a mirror's URL, or get the file by other means and put it there");
}

void fill_folder(const fs::path& folder, const std::function<bool()>& filled,
                 const std::function<void()>& fill, std::chrono::milliseconds timeout) {
  const fs::path path = folder / ".lockstep.lock";
  const bool first = env_int("LOCAL_RANK", 0).value_or(0) == 0;
  const std::chrono::seconds head_start(first ? 0 : 10);  // The first rank shows the progress.
  const auto start = Clock::now();
  while (!filled()) {
    const auto waited = Clock::now() - start;
    if (waited >= head_start) {
      make_folder(folder);
      if (const UniqueFd lock = try_lock(path)) {
        const std::shared_ptr<void> removal(nullptr, [&](void*) { ::unlink(path.c_str()); });
        if (!filled()) fill();
        return;
      }
    }
    if (waited >= timeout) {
      throw TimeoutError(
          "waited " + seconds_text(timeout) + " for another process to fill " + folder.string(),
          "find the process that holds " + path.string() + " (fuser names it)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace lockstep
