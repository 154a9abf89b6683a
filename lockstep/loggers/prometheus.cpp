#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <climits>
#include <cmath>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/loggers/json_rows.h"

namespace lockstep {
namespace {

/// Letters, digits and underscores, as Prometheus's names have.
std::string name_of(const std::string& value) {
  std::string name = "lockstep_" + value;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name;
}

class Prometheus : public Logger {
 public:
  explicit Prometheus(PrometheusOptions options) : options_(std::move(options)) {}

  void begin(int64_t step, int64_t epochs) override {
    if (exposer_) return;
    errno = 0;
    try {
      exposer_.emplace(endpoint_text(options_.host, options_.port));
    } catch (const std::exception&) {
      const int error = errno != 0 ? errno : EADDRNOTAVAIL;  // The host has no address.
      throw SystemError(
          "cannot serve Prometheus at " + endpoint_text(options_.host, options_.port), error,
          error == EADDRINUSE ? "another program may have the port; port 0 takes a free one" : "");
    }
    exposer_->RegisterCollectable(registry_);
    const auto port = static_cast<uint16_t>(exposer_->GetListeningPorts().at(0));
    char own_name[HOST_NAME_MAX + 1] = {};
    ::gethostname(own_name, HOST_NAME_MAX);
    const bool is_any = options_.host == "*" || options_.host == "0.0.0.0";
    // Also with --quiet: nothing else says where it is.
    lockstep::log(LogLevel::quiet, "prometheus: http://" +
                                       endpoint_text(is_any ? own_name : options_.host, port) +
                                       "/metrics");
  }

  void log(int64_t step, const MetricValues& values, const std::string& split) override {
    const prometheus::Labels labels =
        split.empty() ? prometheus::Labels()
                      : prometheus::Labels{{"split", detail::valid_utf8(split)}};
    set("step", labels, static_cast<double>(step));
    for (const auto& [name, value] : values) set(name, labels, value);
  }

  void log_ranks(int64_t step, const std::vector<MetricValues>& ranks) override {
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      for (const auto& [name, value] : ranks[rank])
        set(name, {{"rank", std::to_string(rank)}}, value);
  }

  void close(const std::string& failure) noexcept override {
    if (exposer_) set("failed", {}, failure.empty() ? 0 : 1);
  }

 private:
  void set(const std::string& name, const prometheus::Labels& labels, double value) {
    if (!exposer_) Logger::begin();
    // The same name gives the same family, and the same labels the same gauge.
    prometheus::BuildGauge().Name(name_of(name)).Register(*registry_).Add(labels).Set(value);
  }

  PrometheusOptions options_;
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  std::optional<prometheus::Exposer> exposer_;
};

}  // namespace

std::shared_ptr<Logger> prometheus_logger(PrometheusOptions options) {
  return std::make_shared<Prometheus>(std::move(options));
}

}  // namespace lockstep
