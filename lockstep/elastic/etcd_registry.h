#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/elastic/registry.h"

namespace lockstep::elastic {

struct EtcdRegistryOptions {
  /// "http://10.0.0.1:2379" or "https://...", of all members; also of an embedded registry.
  std::vector<std::string> endpoints{};
  /// What signs the servers' certificates; empty: the system's authorities.
  std::filesystem::path ca_file{};
  /// This client's certificate and its key (PEM), where the servers ask for one.
  std::filesystem::path certificate{};
  std::filesystem::path key{};
  /// Of etcd's own users; empty: none.
  std::string user{};
  std::string password{};
  /// The endpoint is an embedded registry's: what else answers there is told, and ends it all.
  bool embedded = false;
  /// Of an embedded registry (read_token); empty: none.
  std::string token{};
  /// How long a request is tried: an election of etcd's takes some 1.5 s.
  std::chrono::milliseconds request_timeout = std::chrono::seconds(10);
  /// How long one server has for its answer before another is asked.
  std::chrono::milliseconds try_timeout = std::chrono::milliseconds(1500);
  /// Between rounds over all servers: short beside the time to live of a lease.
  std::chrono::milliseconds retry_pause = std::chrono::milliseconds(100);
  /// A connection ends once its server has been silent so long (1 s or more), as its host is gone.
  std::chrono::milliseconds silence_limit = std::chrono::seconds(5);
};

/// The registry in etcd (3.4 or later, by its JSON gateway) or in an embedded one. One thread of
/// its own carries out all requests and one stream of all watches. All talk to one server; when
/// that fails, to the next. No proxy is used. Connects to nothing yet. The destructor drops what is
/// under way, without replies, and joins the thread. Throws UsageError for an endpoint that is no
/// URL of the two kinds, or a certificate without a key.
std::unique_ptr<Registry> connect_registry(EtcdRegistryOptions options);

}  // namespace lockstep::elastic
