#pragma once

#include <curl/curl.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

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
  HttpTransfer(CURLM* multi, const EtcdRegistryOptions& options, HttpRequest request);
  ~HttpTransfer();
  HttpTransfer(const HttpTransfer&) = delete;
  HttpTransfer& operator=(const HttpTransfer&) = delete;

  CURL* handle() const { return easy_.get(); }
  /// HTTP's; 0 before there is one.
  int status() const;
  /// What went wrong, in libcurl's words.
  std::string problem(CURLcode code) const;
  /// All that has been received and was not taken.
  const std::string& received() const { return received_; }
  /// The next whole line, without its end.
  std::optional<std::string> take_line();

 private:
  struct Free {
    void operator()(CURL* easy) const { ::curl_easy_cleanup(easy); }
    void operator()(curl_slist* list) const { ::curl_slist_free_all(list); }
  };
  void configure();
  void add_header(const std::string& header);
  static size_t on_data(char* data, size_t size, size_t count, void* self);
  static int on_socket(void* self, curl_socket_t fd, curlsocktype);

  CURLM* const multi_;
  const EtcdRegistryOptions& options_;
  const HttpRequest request_;
  std::array<char, CURL_ERROR_SIZE> error_text_{};
  std::string received_;
  std::unique_ptr<curl_slist, Free> headers_;
  const std::unique_ptr<CURL, Free> easy_;
};

}  // namespace lockstep::elastic
