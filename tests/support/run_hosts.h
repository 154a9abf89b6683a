#pragma once

// For tests: the backend that joins hosts. Ranks are threads, and hosts are declared by hand.

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "lockstep/comm/backends/hierarchical/hierarchical.h"
#include "tests/support/run_backends.h"

namespace lockstep::hierarchical {

/// The host of each rank: "aabb" are four ranks on two hosts.
inline BackendOptions options_of(const test::StorePtr& store, const std::string& hosts, int rank,
                                 std::chrono::milliseconds timeout) {
  BackendOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>("hierarchical", store);
  options.rank = rank;
  options.size = static_cast<int>(hosts.size());
  options.timeout = timeout;
  options.host = hosts.substr(static_cast<size_t>(rank), 1);
  for (int i = 0; i < options.size; ++i) options.global_ranks.push_back(i);
  return options;
}

using Part = std::function<void(int rank, c10d::Backend& backend, const test::StorePtr& store)>;

inline std::vector<test::Outcome> run(
    const std::string& hosts, const Part& part, int milliseconds = 20'000,
    const test::StorePtr& store = c10::make_intrusive<c10d::HashStore>()) {
  std::vector<test::BackendPtr> backends(hosts.size());
  const auto outcomes = test::run_ranks(static_cast<int>(hosts.size()), [&](int rank) {
    auto& backend = backends[static_cast<size_t>(rank)];
    backend = make(options_of(store, hosts, rank, std::chrono::milliseconds(milliseconds))).backend;
    part(rank, *backend, store);
  });
  // In any order, as processes end.
  for (auto& backend : backends)
    if (backend) backend->shutdown();
  return outcomes;
}

inline void all_reduce(c10d::Backend& backend, at::Tensor tensor,
                       c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  backend.allreduce(tensors, options)->wait();
}

inline void broadcast(c10d::Backend& backend, at::Tensor tensor, int root) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  backend.broadcast(tensors, options)->wait();
}

inline void reduce(c10d::Backend& backend, at::Tensor tensor, int root = 0,
                   c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::ReduceOptions options;
  options.rootRank = root;
  options.reduceOp = op;
  backend.reduce(tensors, options)->wait();
}

}  // namespace lockstep::hierarchical
