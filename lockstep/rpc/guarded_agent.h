#pragma once

#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>

#include "lockstep/rpc/reference_holders.h"
#include "lockstep/rpc/seal.h"
#include "lockstep/rpc/transport.h"

namespace lockstep::rpc::detail {

class CallRunner;
class HandlerThreads;

/// What guards a worker's messages, shared by what sends and what receives them.
struct Guard {
  Guard(int self, const std::string& secret, const std::string& job)
      : seal(self, secret, job), holders(self) {}

  Seal seal;
  ReferenceHolders holders;
};

/// LibTorch's references and autograd send by this agent, and so do our calls. It passes messages
/// on to TensorPipe's: seals requests, opens what comes back, notes who gets references. It knows
/// the workers by name, and they may change: LibTorch's own list is made once. There each is known
/// by its number, which is never used twice. Any thread.
class GuardedAgent final : public torch::distributed::rpc::RpcAgent {
 public:
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;
  using Message = torch::distributed::rpc::Message;
  using DeviceMap = torch::distributed::rpc::DeviceMap;
  using Answer = c10::intrusive_ptr<torch::distributed::rpc::JitFuture>;

  GuardedAgent(const WorkerSetup& setup, std::shared_ptr<Guard> guard,
               std::unique_ptr<torch::distributed::rpc::RequestCallback> callback);
  ~GuardedAgent() override;

  /// Where others find it, once it has been started.
  std::string address() const;
  /// Known from now on. Of several of one name the one with the highest number is
  /// found by it.
  void add_worker(int id, const std::string& name, const std::string& address);

  Answer send(const WorkerInfo& to, c10::intrusive_ptr<Message> message, float timeout_s,
              const DeviceMap& devices) override;
  const WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const WorkerInfo& getWorkerInfo(torch::distributed::rpc::worker_id_t id) const override;
  std::vector<WorkerInfo> getWorkerInfos() const override;

  void startImpl() override;
  void shutdownImpl() override;
  // Of Python's shutdown.
  void join(bool, float) override {}
  void sync() override {}
  std::unordered_map<std::string, std::string> getMetrics() override { return {}; }

 private:
  Answer send_sealed(const WorkerInfo& to, const c10::intrusive_ptr<Message>& message,
                     float timeout_s, const DeviceMap& devices);
  void add(int id, const std::string& name);
  void addGilWaitTime(std::chrono::microseconds) override {}

  const std::shared_ptr<Guard> guard_;
  const c10::intrusive_ptr<c10d::Store> addresses_;  ///< Of this process alone.
  const std::shared_ptr<torch::distributed::rpc::TensorPipeAgent> inner_;
  mutable std::shared_mutex mutex_;
  std::map<int, WorkerInfo> by_id_;  ///< Never removed: LibTorch keeps references to these.
  std::map<std::string, int> by_name_;
};

/// Answers what other workers ask: runs registered functions, and lets LibTorch do its own part for
/// references and autograd. Requests run on the transport's own threads, which saves a change of
/// threads, up to `on_transport`; the others on `threads`, which must outlive the result. What
/// cannot be read, or is not sealed, fails the request.
std::unique_ptr<torch::distributed::rpc::RequestCallback> make_request_handler(
    std::shared_ptr<const CallRunner> runner, std::shared_ptr<Guard> guard, HandlerThreads& threads,
    int on_transport);

}  // namespace lockstep::rpc::detail
