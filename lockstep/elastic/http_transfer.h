#pragma once

#include <curl/curl.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "lockstep/elastic/etcd_registry.h"

namespace lockstep::elastic {

/// A POST of JSON.
struct HttpRequest {
  std::string url;
  std::string body;
  std::string authorization{};           ///< A header; empty: none.
  std::chrono::milliseconds timeout{0};  ///< Of the whole; 0: none, for a stream.
};

/// One transfer within a multi handle of libcurl, from its making until it is destroyed. Only the
/// thread that drives the multi handle uses it.
class HttpTransfer {
 public:
  /// `options` must outlive it. Throws Error where libcurl refuses it.
  HttpTransfer(CURLM* multi, const EtcdRegistryOptions& options, HttpRequest request)
      : multi_(multi), request_(std::move(request)), easy_(::curl_easy_init()) {
    if (!easy_) throw Error("libcurl cannot start a transfer");
    configure(options);
    if (const CURLMcode code = ::curl_multi_add_handle(multi_, easy_.get()); code != CURLM_OK)
      throw Error(std::string("libcurl cannot start a transfer: ") + ::curl_multi_strerror(code));
  }
  ~HttpTransfer() { ::curl_multi_remove_handle(multi_, easy_.get()); }
  HttpTransfer(const HttpTransfer&) = delete;
  HttpTransfer& operator=(const HttpTransfer&) = delete;

  CURL* handle() const { return easy_.get(); }
  /// HTTP's; 0 before there is one.
  int status() const {
    long status = 0;
    ::curl_easy_getinfo(easy_.get(), CURLINFO_RESPONSE_CODE, &status);
    return static_cast<int>(status);
  }
  /// What went wrong, in libcurl's words.
  std::string problem(CURLcode code) const {
    return error_text_[0] ? error_text_.data() : ::curl_easy_strerror(code);
  }
  /// All that has been received and was not taken.
  const std::string& received() const { return received_; }
  /// The next whole line, without its end.
  std::optional<std::string> take_line() {
    const size_t end = received_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    std::string line = received_.substr(0, end);
    received_.erase(0, end + 1);
    return line;
  }

 private:
  struct Free {
    void operator()(CURL* easy) const { ::curl_easy_cleanup(easy); }
    void operator()(curl_slist* list) const { ::curl_slist_free_all(list); }
  };
  static constexpr size_t kMostReceived = 64 * 1024 * 1024;

  void configure(const EtcdRegistryOptions& options) {
    const auto set = [this](CURLoption option, auto value) {
      ::curl_easy_setopt(easy_.get(), option, value);
    };
    add_header("Content-Type: application/json");
    add_header("Expect:");                        // it would cost a round trip
    add_header("Grpc-Metadata-hasleader: true");  // etcd: no stream from a member that is cut off
    if (!request_.authorization.empty()) add_header("Authorization: " + request_.authorization);
    set(CURLOPT_URL, request_.url.c_str());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_PROXY, "");
    set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_USERAGENT, "lockstep");
    set(CURLOPT_HTTPHEADER, headers_.get());
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
    set(CURLOPT_POSTFIELDS, request_.body.c_str());
    set(CURLOPT_ERRORBUFFER, error_text_.data());
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options.try_timeout.count()));
    set(CURLOPT_TIMEOUT_MS, static_cast<long>(request_.timeout.count()));
    set(CURLOPT_WRITEDATA, this);
    set(CURLOPT_WRITEFUNCTION, &HttpTransfer::on_data);
    set(CURLOPT_SOCKOPTDATA, &options);
    set(CURLOPT_SOCKOPTFUNCTION, &HttpTransfer::on_socket);
    if (!options.ca_file.empty()) set(CURLOPT_CAINFO, options.ca_file.c_str());
    if (!options.certificate.empty()) set(CURLOPT_SSLCERT, options.certificate.c_str());
    if (!options.key.empty()) set(CURLOPT_SSLKEY, options.key.c_str());
  }

  void add_header(const std::string& header) {
    curl_slist* longer = ::curl_slist_append(headers_.get(), header.c_str());
    if (!longer) throw Error("libcurl cannot start a transfer");
    (void)headers_.release();
    headers_.reset(longer);
  }

  static size_t on_data(char* data, size_t size, size_t count, void* self) {
    std::string& received = static_cast<HttpTransfer*>(self)->received_;
    if (received.size() + size * count > kMostReceived) return 0;  // libcurl: a write error
    received.append(data, size * count);
    return size * count;
  }

  static int on_socket(void* options, curl_socket_t fd, curlsocktype) {
    limit_silence_of(fd, static_cast<const EtcdRegistryOptions*>(options)->silence_limit);
    return CURL_SOCKOPT_OK;
  }

  CURLM* const multi_;
  const HttpRequest request_;
  std::array<char, CURL_ERROR_SIZE> error_text_{};
  std::string received_;
  std::unique_ptr<curl_slist, Free> headers_;
  const std::unique_ptr<CURL, Free> easy_;
};

}  // namespace lockstep::elastic
