#pragma once

#include <deque>
#include <memory>
#include <utility>

#include "lockstep/elastic/etcd_registry.h"

namespace lockstep::elastic {

/// For tests: a registry that is asked, and waited for. Other events stay for `next_event`.
class CallingRegistry : public Registry {
 public:
  explicit CallingRegistry(const EtcdRegistryOptions& options)
      : timeout_(options.request_timeout), registry_(connect_registry(options)) {}
  uint64_t submit(Request request) override { return registry_->submit(std::move(request)); }
  uint64_t watch(const std::string& prefix) override { return registry_->watch(prefix); }
  void unwatch(uint64_t watch) override { registry_->unwatch(watch); }
  int descriptor() const override { return registry_->descriptor(); }
  std::optional<RegistryEvent> next_event(std::chrono::milliseconds timeout) override {
    if (kept_.empty()) return registry_->next_event(timeout);
    RegistryEvent event = std::move(kept_.front());
    kept_.pop_front();
    return event;
  }
  /// Throws RegistryError where the request failed.
  Reply call(Request request) {
    const auto limit = request.timeout.count() > 0 ? request.timeout : timeout_;
    const uint64_t sent = submit(std::move(request));
    while (auto event = registry_->next_event(limit + std::chrono::seconds(5))) {
      auto* reply = std::get_if<Reply>(&*event);
      if (reply && reply->request == sent) {
        if (reply->error) throw *reply->error;
        return std::move(*reply);
      }
      kept_.push_back(std::move(*event));
    }
    throw RegistryError(RegistryError::Kind::unreachable, "no reply has come");
  }

 private:
  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<Registry> registry_;
  std::deque<RegistryEvent> kept_;
};

inline std::unique_ptr<CallingRegistry> call_registry(const EtcdRegistryOptions& options) {
  return std::make_unique<CallingRegistry>(options);
}

}  // namespace lockstep::elastic
