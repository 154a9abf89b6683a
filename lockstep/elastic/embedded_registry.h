#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/elastic/embedded_store.h"

namespace lockstep::elastic {

struct EmbeddedRegistryOptions {
  std::string host{};   ///< Where it listens; empty: on all interfaces, as all hosts must reach it.
  uint16_t port = 0;    ///< 0: any free one.
  std::string token{};  ///< Clients must prove that they know it; empty: everyone may come.
  /// One thread each. A client holds one for its watches, and one for each request under way.
  size_t most_connections = 1024;
  /// Of a request: a record of a thousand hosts takes some 100 KB. All connections may send as
  /// much.
  size_t most_bytes = 256 * 1024;
  /// The number of changes that a watch can go back. Where a client was away for longer, it lists.
  size_t history = 4096;
  /// A request must be there, and what is sent must be taken, within this time: a client is a
  /// program on a nearby host.
  std::chrono::milliseconds idle_limit = std::chrono::seconds(10);
};

/// A server for EtcdRegistry clients where there is no etcd.
struct EmbeddedRegistry {
  std::shared_ptr<void> server;
  uint16_t port = 0;
};

/// All is in memory: when it goes, all is gone. It listens when this returns, and serves from its
/// own threads until the last copy of `server` is gone. That closes all connections, also those on
/// which clients wait, and joins the threads. Throws as listen_on where it cannot listen.
EmbeddedRegistry serve_registry(EmbeddedRegistryOptions options = {});

}  // namespace lockstep::elastic
