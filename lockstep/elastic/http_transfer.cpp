#include "lockstep/elastic/http_transfer.h"

#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"

namespace lockstep::elastic {
namespace {

constexpr size_t kMostReceived = 64 * 1024 * 1024;

}  // namespace

HttpTransfer::HttpTransfer(CURLM* multi, const EtcdRegistryOptions& options, HttpRequest request)
    : multi_(multi), options_(options), request_(std::move(request)), easy_(::curl_easy_init()) {
  if (!easy_) throw Error("libcurl cannot start a transfer");
  configure();
  if (const CURLMcode code = ::curl_multi_add_handle(multi_, easy_.get()); code != CURLM_OK)
    throw Error(std::string("libcurl cannot start a transfer: ") + ::curl_multi_strerror(code));
}

HttpTransfer::~HttpTransfer() {
  ::curl_multi_remove_handle(multi_, easy_.get());
}

void HttpTransfer::configure() {
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
  set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.try_timeout.count()));
  set(CURLOPT_TIMEOUT_MS, static_cast<long>(request_.timeout.count()));
  set(CURLOPT_WRITEDATA, this);
  set(CURLOPT_WRITEFUNCTION, &HttpTransfer::on_data);
  set(CURLOPT_SOCKOPTDATA, this);
  set(CURLOPT_SOCKOPTFUNCTION, &HttpTransfer::on_socket);
  if (!options_.ca_file.empty()) set(CURLOPT_CAINFO, options_.ca_file.c_str());
  if (!options_.certificate.empty()) set(CURLOPT_SSLCERT, options_.certificate.c_str());
  if (!options_.key.empty()) set(CURLOPT_SSLKEY, options_.key.c_str());
}

void HttpTransfer::add_header(const std::string& header) {
  curl_slist* longer = ::curl_slist_append(headers_.get(), header.c_str());
  if (!longer) throw Error("libcurl cannot start a transfer");
  (void)headers_.release();
  headers_.reset(longer);
}

int HttpTransfer::status() const {
  long status = 0;
  ::curl_easy_getinfo(easy_.get(), CURLINFO_RESPONSE_CODE, &status);
  return static_cast<int>(status);
}

std::string HttpTransfer::problem(CURLcode code) const {
  return error_text_[0] ? error_text_.data() : ::curl_easy_strerror(code);
}

std::optional<std::string> HttpTransfer::take_line() {
  const size_t end = received_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  return line;
}

size_t HttpTransfer::on_data(char* data, size_t size, size_t count, void* self) {
  std::string& received = static_cast<HttpTransfer*>(self)->received_;
  if (received.size() + size * count > kMostReceived) return 0;  // libcurl: a write error
  received.append(data, size * count);
  return size * count;
}

int HttpTransfer::on_socket(void* self, curl_socket_t fd, curlsocktype) {
  limit_silence_of(fd, static_cast<HttpTransfer*>(self)->options_.silence_limit);
  return CURL_SOCKOPT_OK;
}

}  // namespace lockstep::elastic
