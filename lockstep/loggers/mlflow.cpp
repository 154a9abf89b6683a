#include <curl/curl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"
#include "lockstep/loggers/logger.h"

namespace lockstep {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr long kTimeoutMs = 10'000;
constexpr std::chrono::seconds kPause{1};  ///< Between requests: one takes some milliseconds.
constexpr size_t kMostOfRequest = 1000;    ///< The interface's limits.
constexpr size_t kMostParams = 100;
constexpr size_t kMostKept = 100'000;  ///< While the server does not answer.
constexpr size_t kMostText = 500;      ///< Of a parameter's value, for old servers.

int64_t unix_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

struct Free {
  void operator()(CURL* handle) const { ::curl_easy_cleanup(handle); }
  void operator()(curl_slist* list) const { ::curl_slist_free_all(list); }
};

size_t append_body(char* data, size_t size, size_t count, void* body) {
  static_cast<std::string*>(body)->append(data, size * count);
  return size * count;
}

/// The server has answered that it does not take what a request holds.
class Refused : public Error {
 public:
  using Error::Error;
};

/// JSON has no infinity. MLflow takes the words of protobuf's JSON.
json value_of(double value) {
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

/// MLflow's REST interface: one connection, which stays open.
class MlflowApi {
 public:
  explicit MlflowApi(std::string url) : url_(std::move(url)) {
    static std::once_flag once;
    std::call_once(once, [] { ::curl_global_init(CURL_GLOBAL_DEFAULT); });
    handle_.reset(::curl_easy_init());
    if (!handle_) throw Error("libcurl cannot start a transfer");
    headers_.reset(::curl_slist_append(nullptr, "Content-Type: application/json"));
    if (const auto token = env_string("MLFLOW_TRACKING_TOKEN")) {
      (void)::curl_slist_append(headers_.get(), ("Authorization: Bearer " + *token).c_str());
    } else if (const auto user = env_string("MLFLOW_TRACKING_USERNAME")) {
      set(CURLOPT_USERNAME, user->c_str());
      set(CURLOPT_PASSWORD, env_string("MLFLOW_TRACKING_PASSWORD").value_or("").c_str());
    }
    set(CURLOPT_HTTPHEADER, headers_.get());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_TIMEOUT_MS, kTimeoutMs);
    set(CURLOPT_WRITEFUNCTION, &append_body);
  }

  /// The answer to a POST. Throws Error naming the server, with what it says; Refused where another
  /// request may do.
  json post(const std::string& path, const json& body) {
    const std::string sent = body.dump(-1, ' ', false, json::error_handler_t::replace);
    const std::string target = url_ + "/api/2.0/mlflow/" + path;
    std::string answer;
    set(CURLOPT_URL, target.c_str());
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(sent.size()));
    set(CURLOPT_POSTFIELDS, sent.c_str());
    set(CURLOPT_WRITEDATA, &answer);
    const CURLcode code = ::curl_easy_perform(handle_.get());
    long status = 0;
    ::curl_easy_getinfo(handle_.get(), CURLINFO_RESPONSE_CODE, &status);
    const json reply = json::parse(answer, nullptr, /*allow_exceptions=*/false);
    if (code == CURLE_OK && status == 200 && reply.is_object()) return reply;
    const std::string problem = code != CURLE_OK ? ::curl_easy_strerror(code)
                                : reply.is_object()
                                    ? reply.value("message", answer)
                                    : "status " + std::to_string(status) + ", and no JSON";
    const std::string text =
        "the MLflow server at " + url_ + " did not take " + path + ": " + problem;
    if (code == CURLE_OK && (status == 400 || status == 413)) throw Refused(text);
    throw Error(text, "MLFLOW_TRACKING_URI names the server, as `mlflow server` prints it");
  }

 private:
  template <class T>
  void set(CURLoption option, T value) {
    ::curl_easy_setopt(handle_.get(), option, value);
  }
  std::string url_;
  std::unique_ptr<CURL, Free> handle_;
  std::unique_ptr<curl_slist, Free> headers_;
};

class Mlflow : public Logger {
 public:
  explicit Mlflow(MlflowOptions options) : options_(std::move(options)) {}
  ~Mlflow() override {
    close(std::uncaught_exceptions() > 0 ? "the program has ended with an exception" : "");
  }

  void begin(int64_t step, int64_t epochs) override {
    if (api_) {
      if (std::exchange(ended_, false)) send("runs/update", {{"status", "RUNNING"}});
      return;
    }
    MlflowApi api(options_.tracking_uri);
    run_ = options_.run_id.empty() ? new_run(api) : options_.run_id;
    api_.emplace(std::move(api));
    log_info("mlflow: run " + run_ + " at " + options_.tracking_uri);
  }

  void log(int64_t step, const MetricValues& values, const std::string& split) override {
    if (!api_) Logger::begin();
    for (const auto& [name, value] : values) {
      if (std::isnan(value)) continue;
      if (metrics_.size() >= kMostKept) {
        ++lost_;
        continue;
      }
      metrics_.push_back({{"key", split.empty() ? name : split + "/" + name},
                          {"value", value_of(value)},
                          {"timestamp", unix_ms()},
                          {"step", step}});
    }
    if (Clock::now() - sent_ >= kPause) flush();
  }

  void log_hyperparameters(const std::map<std::string, std::string>& values) override {
    if (!api_) Logger::begin();
    std::vector<json> params;
    for (const auto& [name, value] : values)
      params.push_back({{"key", name}, {"value", value.substr(0, kMostText)}});
    for (std::span<const json> left = params; !left.empty();) {
      const size_t count = std::min(left.size(), kMostParams);
      send_items("params", left.first(count));
      left = left.subspan(count);
    }
  }

  /// A server that is away for a while does not end a run.
  void flush() override {
    while (!metrics_.empty()) {
      const size_t count = std::min(metrics_.size(), kMostOfRequest);
      sent_ = Clock::now();
      if (!send_items("metrics", std::span(metrics_).first(count))) return;
      metrics_.erase(metrics_.begin(), metrics_.begin() + static_cast<std::ptrdiff_t>(count));
    }
  }

  void close(const std::string& failure) noexcept override {
    if (!api_ || std::exchange(ended_, true)) return;
    try {
      flush();
      if (const size_t lost = lost_ + metrics_.size(); lost > 0)
        log_warning(counted(static_cast<int64_t>(lost), "value") +
                    " did not reach the MLflow server at " + options_.tracking_uri);
      if (!failure.empty()) send("runs/set-tag", {{"key", "failure"}, {"value", failure}});
      send("runs/update",
           {{"status", failure.empty() ? "FINISHED" : "FAILED"}, {"end_time", unix_ms()}});
    } catch (const std::exception& error) {
      log_warning(error.what());
    }
  }

 private:
  std::string new_run(MlflowApi& api) const {
    const std::string& name = options_.experiment;
    const json found =
        api.post("experiments/search", {{"filter", "name = '" + name + "'"}, {"max_results", 1}});
    const json experiments = found.value("experiments", json::array());
    const json experiment =
        experiments.empty() ? api.post("experiments/create", {{"name", name}}) : experiments[0];
    json request{{"experiment_id", experiment.at("experiment_id")}, {"start_time", unix_ms()}};
    if (!options_.run_name.empty()) request["run_name"] = options_.run_name;
    return api.post("runs/create", request).at("run").at("info").at("run_id");
  }

  /// Metrics or params in one request. Those that the server refuses are found by halves, named and
  /// left out from then on. False, with a warning, where it does not answer.
  bool send_items(const std::string& kind, std::span<const json> items) {
    json list = json::array();
    for (const json& item : items)
      if (!refused_.contains({kind, item.at("key")})) list.push_back(item);
    if (list.empty()) return true;
    try {
      post("runs/log-batch", {{kind, std::move(list)}});
      return true;
    } catch (const Refused& error) {
      if (items.size() > 1) {
        const size_t half = items.size() / 2;
        return send_items(kind, items.first(half)) && send_items(kind, items.subspan(half));
      }
      const auto name = items[0].at("key").get<std::string>();
      refused_.emplace(kind, name);
      log_warning("'" + name + "' of " + kind + " is left out: " + error.what());
      return true;
    } catch (const Error& error) {
      return warn(error);
    }
  }

  /// False, with a warning, where the server does not take it.
  bool send(const std::string& path, json body) {
    try {
      post(path, std::move(body));
      return true;
    } catch (const Error& error) {
      return warn(error);
    }
  }

  void post(const std::string& path, json body) {
    body["run_id"] = run_;
    api_->post(path, body);
    warned_ = false;
  }

  /// Once, until the server takes something again. Gives false.
  bool warn(const Error& error) {
    if (!std::exchange(warned_, true)) log_warning(error.what());
    return false;
  }

  MlflowOptions options_;
  std::optional<MlflowApi> api_;
  std::string run_;
  std::vector<json> metrics_;                              ///< Which are still to be sent.
  std::set<std::pair<std::string, std::string>> refused_;  ///< Kinds and names.
  size_t lost_ = 0;                                        ///< Values over kMostKept.
  Clock::time_point sent_{};
  bool warned_ = false;
  bool ended_ = false;
};

}  // namespace

std::shared_ptr<Logger> mlflow_logger(MlflowOptions options) {
  const auto given = [](std::string& value, const char* variable, const char* otherwise) {
    if (value.empty()) value = env_string(variable).value_or(otherwise);
  };
  given(options.tracking_uri, "MLFLOW_TRACKING_URI", "");
  given(options.experiment, "MLFLOW_EXPERIMENT_NAME", "Default");
  given(options.run_name, "MLFLOW_RUN_NAME", "");
  given(options.run_id, "MLFLOW_RUN_ID", "");
  if (options.tracking_uri.empty()) {
    throw UsageError("the logger mlflow does not know its server",
                     "MLFLOW_TRACKING_URI=http://127.0.0.1:5000, where `mlflow server` runs");
  }
  while (options.tracking_uri.ends_with('/')) options.tracking_uri.pop_back();
  return std::make_shared<Mlflow>(std::move(options));
}

}  // namespace lockstep
