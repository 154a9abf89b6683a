#include "lockstep/rpc/worker.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>

#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/rpc/request_handler.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using std::chrono::milliseconds;

std::mutex& worker_mutex() {
  static std::mutex mutex;
  return mutex;
}
/// Weak: the Agent owns it.
std::weak_ptr<Worker> current_worker;
bool ever_started = false;

// References name their types in messages.
c10::StrongTypePtr type_of(const c10::QualifiedName& name) {
  return {nullptr, torch::jit::ScriptTypeParser().parseType(name.qualifiedName())};
}

}  // namespace

Worker::Worker(const Setup& setup) : name_(setup.name) {
  TransportSetup transport;
  transport.store = setup.store;
  transport.name = setup.name;
  transport.rank = setup.rank;
  transport.size = setup.size;
  transport.threads = setup.threads;
  transport.timeout = setup.timeout;
  transport.one_host = setup.one_host;
  // Half of the transport's threads stay free for answers, which complete on them as well.
  transport.callback = make_request_handler(setup.name, threads_, setup.threads / 2);
  transport_ = make_tensorpipe_transport(std::move(transport));
}

std::shared_ptr<Worker> Worker::start(const Setup& setup) {
  const std::lock_guard lock(worker_mutex());
  if (ever_started) {
    throw UsageError("rpc::init: this process is or was a worker already",
                     "LibTorch keeps the references of the first one: start another process");
  }
  return translated([&] {
    torch::distributed::autograd::DistAutogradContainer::init(setup.rank);
    std::shared_ptr<Worker> worker(new Worker(setup));
    const auto& agent = worker->transport_->agent();
    native::RpcAgent::setCurrentRpcAgent(agent);
    agent->setTypeResolver(std::make_shared<native::TypeResolver>(type_of));
    worker->transport_->start();
    ever_started = true;
    current_worker = worker;
    return worker;
  });
}

Worker::~Worker() {
  leave_now();
}

std::vector<std::string> Worker::workers() const {
  std::vector<std::pair<int, std::string>> numbered;
  for (const auto& info : transport_->agent()->getWorkerInfos()) {
    numbered.emplace_back(info.id_, info.name_);
  }
  std::sort(numbered.begin(), numbered.end());
  std::vector<std::string> names;
  for (auto& [rank, name] : numbered) names.push_back(std::move(name));
  return names;
}

void Worker::leave_together(milliseconds limit) {
  if (left_) return;
  try {
    translated([&] {
      transport_->wait_for_all(limit);
      native::RRefContext::getInstance().delAllUsersAndUnforkedOwners(limit);
      transport_->wait_for_all(limit);
    });
  } catch (...) {
    leave_now();
    throw;
  }
  leave_now();
}

void Worker::leave_now() noexcept {
  if (left_) return;
  left_ = true;
  try {
    native::RRefContext::destroyInstance(true);
    transport_->stop();
  } catch (const std::exception& error) {
    log_warning("rpc: while leaving: " + failure_text(std::current_exception()));
  }
  if (native::RpcAgent::isCurrentRpcAgentSet()) native::RpcAgent::setCurrentRpcAgent(nullptr);
}

std::shared_ptr<Worker> this_worker(const char* what) {
  const std::lock_guard lock(worker_mutex());
  auto worker = current_worker.lock();
  if (!worker) {
    throw UsageError(std::string(what) + ": this process is no worker",
                     "make it one by rpc::init, and keep the agent that it returns");
  }
  return worker;
}

}  // namespace lockstep::rpc::detail
