#include "lockstep/rpc/guarded_agent.h"

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/rpc/sent_tensors.h"

namespace lockstep::rpc::detail {

namespace native = torch::distributed::rpc;

GuardedAgent::GuardedAgent(const WorkerSetup& setup, std::shared_ptr<Guard> guard,
                           std::unique_ptr<native::RequestCallback> callback)
    : RpcAgent(WorkerInfo(setup.name, static_cast<native::worker_id_t>(setup.id)), nullptr,
               setup.options.timeout),
      guard_(std::move(guard)),
      addresses_(c10::make_intrusive<c10d::HashStore>()),
      inner_(make_tensorpipe_agent(setup, std::move(callback), addresses_)) {
  add(setup.id, setup.name);
}

GuardedAgent::~GuardedAgent() {
  if (rpcAgentRunning_) shutdown();
}

std::string GuardedAgent::address() const {
  const auto bytes = addresses_->get(address_key(workerInfo_.id_));
  return {bytes.begin(), bytes.end()};
}

void GuardedAgent::add_worker(int id, const std::string& name, const std::string& address) {
  if (id != workerInfo_.id_) {
    addresses_->set(address_key(id), std::vector<uint8_t>(address.begin(), address.end()));
    const native::WorkerInfo inner(inner_name(id), static_cast<native::worker_id_t>(id));
    inner_->updateGroupMembership(inner, {}, {}, /*isJoin=*/true);
  }
  add(id, name);
}

void GuardedAgent::add(int id, const std::string& name) {
  const std::unique_lock lock(mutex_);
  by_id_.try_emplace(id, name, static_cast<native::worker_id_t>(id));
  // Of one name the latest counts.
  const auto [place, added] = by_name_.try_emplace(name, id);
  if (!added) place->second = std::max(place->second, id);
}

GuardedAgent::Answer GuardedAgent::send(const WorkerInfo& to, c10::intrusive_ptr<Message> message,
                                        float timeout_s, const DeviceMap& devices) {
  try {
    return send_sealed(to, message, timeout_s, devices);
  } catch (...) {
    guard_->holders.take_back(references_in(*message));
    throw;
  }
}

GuardedAgent::Answer GuardedAgent::send_sealed(const WorkerInfo& to,
                                               const c10::intrusive_ptr<Message>& message,
                                               float timeout_s, const DeviceMap& devices) {
  make_readable(message->tensors());
  guard_->holders.add(to.id_, references_in(*message));
  const uint64_t number = guard_->seal.next_number();
  return inner_
      ->send(inner_->getWorkerInfo(inner_name(to.id_)), guard_->seal.close(message, to.id_, number),
             timeout_s, devices)
      ->then(
          [guard = guard_, sender = int{to.id_}, number](native::JitFuture& done) {
            auto answer = done.value().toCustomClass<Message>();
            guard->seal.open_answer(*answer, sender, number);
            return native::withStorages(std::move(answer));
          },
          c10::getCustomClassType<c10::intrusive_ptr<Message>>());
}

const GuardedAgent::WorkerInfo& GuardedAgent::getWorkerInfo(const std::string& name) const {
  const std::shared_lock lock(mutex_);
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw UsageError("rpc: no worker '" + name + "'");
  return by_id_.at(found->second);
}

const GuardedAgent::WorkerInfo& GuardedAgent::getWorkerInfo(native::worker_id_t id) const {
  const std::shared_lock lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end())
    throw UsageError("rpc: no worker of the number " + std::to_string(id),
                     "it has never joined here, or the number is no worker's: ask by its name");
  return found->second;
}

std::vector<GuardedAgent::WorkerInfo> GuardedAgent::getWorkerInfos() const {
  const std::shared_lock lock(mutex_);
  std::vector<WorkerInfo> all;
  all.reserve(by_name_.size());
  for (const auto& [name, id] : by_name_) all.push_back(by_id_.at(id));
  return all;
}

void GuardedAgent::startImpl() {
  inner_->start();
}
void GuardedAgent::shutdownImpl() {
  inner_->shutdown();
}

}  // namespace lockstep::rpc::detail
