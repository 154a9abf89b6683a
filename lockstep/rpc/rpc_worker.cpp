#include "lockstep/rpc/rpc_worker.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>

#include <mutex>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/fast_meeting.h"
#include "lockstep/rpc/guarded_agent.h"

namespace lockstep::rpc::detail {
namespace {

namespace native = torch::distributed::rpc;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPatienceWithLost{200};
constexpr milliseconds kTimeoutWithoutWorker{60'000};
/// How long connecting may take, where calls have less: all workers do so at once.
constexpr milliseconds kLeastToStart{60'000};

std::mutex& worker_mutex() {
  static std::mutex mutex;
  return mutex;
}
/// Weak: the Agent owns it.
std::weak_ptr<Worker> current_worker;
bool ever_started = false;

/// What a function that does not end may still use.
void keep_forever(std::shared_ptr<void> kept) {
  static auto* const all = new std::vector<std::shared_ptr<void>>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  all->push_back(std::move(kept));
}

/// Stopping waits for functions on the agent's threads. False: they did not end in time.
bool stop_within(const std::shared_ptr<GuardedAgent>& agent, milliseconds limit) {
  const auto stopped = std::make_shared<CallState>(CallState::Ends::perhaps_not);
  std::thread stops(
      [agent, stopped] { complete_with<void>(*stopped, [&] { agent->shutdown(); }); });
  try {
    stopped->value(limit);
  } catch (const TimeoutError&) {
    stops.detach();
    return false;
  } catch (const std::exception&) {
    log_warning("rpc: while leaving: " + failure_text(std::current_exception()));
  }
  stops.join();
  return true;
}

std::string packed_address(const std::string& name, const std::string& address) {
  return name + "\n" + address;
}
std::pair<std::string, std::string> unpacked_address(const std::string& text) {
  const size_t end = text.find('\n');
  if (end == std::string::npos) throw DataError("rpc: no worker's address: " + text);
  return {text.substr(0, end), text.substr(end + 1)};
}

const Function<bool(int, std::string, std::string)> joined = function(
    "lockstep.rpc.joined", [](int id, const std::string& name, const std::string& address) {
      return this_worker("rpc: a worker joins")->add_joined(id, name, address);
    });
const auto greeted = function("lockstep.rpc.greeted", [] {});

// References name their types in messages.
c10::StrongTypePtr type_of(const c10::QualifiedName& name) {
  return {nullptr, torch::jit::ScriptTypeParser().parseType(name.qualifiedName())};
}

}  // namespace

Worker::Worker(const WorkerSetup& setup)
    : options_(setup.options),
      names_(setup.names),
      name_(setup.name),
      address_(setup.address),
      id_(setup.id),
      guard_(std::make_shared<Guard>(setup.id, options_.secret, setup.job)),
      calls_(options_.max_pending),
      threads_(std::make_shared<HandlerThreads>(options_.threads)),
      runner_(std::make_shared<CallRunner>(setup.name)),
      fast_path_(setup.link ? std::make_shared<FastPath>(setup.link, runner_, threads_) : nullptr),
      peers_(setup.store.clone(), setup.names, setup.id,
             [guard = guard_, fast = std::weak_ptr(fast_path_)](int id) {
               guard->holders.release(id);
               if (const auto path = fast.lock()) path->lose(id);
             }),
      // Half of the transport's threads stay free for answers, which complete on them as well.
      agent_(std::make_shared<GuardedAgent>(
          setup, guard_, make_request_handler(runner_, guard_, *threads_, options_.threads / 2))) {}

std::shared_ptr<Worker> Worker::start(const WorkerSetup& setup) {
  std::unique_lock lock(worker_mutex());
  if (ever_started) {
    throw UsageError("rpc::init: this process is or was a worker already",
                     "LibTorch keeps the references of the first one: start another process");
  }
  return translated([&] {
    torch::distributed::autograd::DistAutogradContainer::init(setup.id);
    std::shared_ptr<Worker> worker(new Worker(setup));
    const auto& agent = worker->agent_;
    native::RpcAgent::setCurrentRpcAgent(agent);
    agent->setTypeResolver(std::make_shared<native::TypeResolver>(type_of));
    current_worker = worker;
    ever_started = true;
    agent->start();
    if (worker->fast_path_) worker->fast_path_->start();
    lock.unlock();  // Others call this worker from now on.
    if (setup.names.empty()) {
      worker->join_others(setup.store);
    } else {
      worker->meet(setup.store);
    }
    return worker;
  });
}

void Worker::meet(Store store) {
  const auto size = static_cast<int>(names_.size());
  const auto all = exchange(store, "address", id_, size, packed_address(name_, agent_->address()));
  for (int id = 0; id < size; ++id) {
    const auto [name, address] = unpacked_address(all[static_cast<size_t>(id)]);
    agent_->add_worker(id, name, address);
  }
  // Nobody calls before all know all.
  exchange(store, "ready", id_, size, "");
  for (int id = 0; id < size; ++id) {
    if (id != id_) peers_.watch(id, names_[static_cast<size_t>(id)]);
  }
  greet_others();
}

// A process that dies while it connects to a worker leaves that one deaf: TensorPipe listens no
// more. So all connections of all are complete before any program goes on.
void Worker::greet_others() {
  const milliseconds limit = std::max(options_.timeout, kLeastToStart);
  const auto deadline = Clock::now() + limit;
  std::vector<std::shared_ptr<CallState>> greetings;
  for (int id = 0; id < static_cast<int>(names_.size()); ++id) {
    if (id != id_) greetings.push_back(send_call_to(id, greeted.signature(), {}, limit));
  }
  for (const auto& greeting : greetings) {
    try {
      greeting->value({});
    } catch (const TimeoutError&) {
      throw;
    } catch (const RemoteError&) {  // It has answered: it is connected.
    } catch (const CommError&) {    // It was lost, of which its liveness call tells.
    }
  }
  peers_.meet("greeted", "", deadline, "start");
}

void Worker::join_others(Store store) {
  store.set("address/" + std::to_string(id_), packed_address(name_, agent_->address()));
  agent_->add_worker(id_, name_, agent_->address());
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  int found = 0;
  // Those with higher numbers come later, and tell this one.
  for (int id = 0; id < id_; ++id) {
    const std::string key = "address/" + std::to_string(id);
    try {
      store.wait({key}, std::max(time_left(deadline), kPatienceWithLost));
    } catch (const TimeoutError&) {
      continue;  // It died while it joined.
    }
    const auto [name, address] = unpacked_address(store.get(key));
    agent_->add_worker(id, name, address);
    bool taken = false;
    try {
      const auto told = send_call_to(id, joined.signature(),
                                     joined.pack(id_, name_, agent_->address()), options_.timeout);
      taken = !Value<bool>::from(told->value({}));
    } catch (const CommError&) {  // It was lost, or nobody is at its address.
      continue;
    }
    if (taken) throw UsageError("rpc::join: the name '" + name_ + "' is another worker's");
    peers_.watch(id, name);
    ++found;
  }
  if (found == 0) throw PeerLostError("rpc::join: no worker of the group is there any more");
}

bool Worker::add_joined(int id, const std::string& name, const std::string& address) {
  if (name == name_) return false;
  agent_->add_worker(id, name, address);
  peers_.watch(id, name);
  return true;
}

Worker::~Worker() {
  leave_now();
}

void Worker::throw_unanswered() const {
  throw TimeoutError("rpc: shutdown of worker '" + name_ + "' timed out: " +
                     std::to_string(calls_.pending()) + " of its calls are not answered");
}

void Worker::wait_until_quiet(Clock::time_point deadline) {
  // A call counts where it was made, until it is answered. So when all workers had none, and none
  // has made another since, there is none.
  int64_t before = -1;
  for (int round = 0;; ++round) {
    if (!calls_.wait_for_none(deadline)) throw_unanswered();
    int64_t begun = 0;
    for (const auto& [rank, count] :
         peers_.meet("round" + std::to_string(round), std::to_string(calls_.begun()), deadline)) {
      begun += parse_int(count).value_or(0);
    }
    if (begun == before) return;
    before = begun;
  }
}

void Worker::leave_together() {
  if (left_) return;
  const auto deadline = Clock::now() + options_.shutdown_timeout;
  std::vector<std::string> lost;
  try {
    translated([&] {
      if (has_joined()) {
        if (!calls_.wait_for_none(deadline)) throw_unanswered();
      } else {
        peers_.meet("leaves", "", deadline);
        peers_.wait_for_joined(deadline);
        wait_until_quiet(deadline);
      }
      // What a lost worker should confirm never comes.
      const auto patience = peers_.lost().empty() ? time_left(deadline) : kPatienceWithLost;
      native::RRefContext::getInstance().delAllUsersAndUnforkedOwners(patience);
      lost = peers_.lost();  // Later on those that leave may count as such.
      peers_.let_go();
      if (!has_joined()) peers_.meet("left", "", deadline);
    });
  } catch (...) {
    leave_now();
    throw;
  }
  if (!lost.empty()) {
    log_warning("rpc: worker '" + name_ + "' left without '" + lockstep::join(lost, "', '") +
                "', which it had lost");
  }
  if (const auto behind = leave(); !behind.empty()) throw TimeoutError(behind);
}

void Worker::leave_now() noexcept {
  if (const auto behind = leave(); !behind.empty()) log_error(behind);
}

std::string Worker::leave() noexcept {
  if (left_) return {};
  left_ = true;
  const auto deadline = Clock::now() + options_.stop_timeout;
  try {
    if (fast_path_) fast_path_->stop();
    native::RRefContext::destroyInstance(true);
    // Both, as functions run on threads of the transport as well.
    const bool stopped = stop_within(agent_, options_.stop_timeout);
    const bool ended = threads_->end(time_left(deadline));
    if (native::RpcAgent::isCurrentRpcAgentSet()) native::RpcAgent::setCurrentRpcAgent(nullptr);
    if (stopped && ended) return {};
    keep_forever(agent_);
    keep_forever(threads_);
    keep_forever(fast_path_);
    const auto names = runner_->running();
    return "rpc: worker '" + name_ + "' left while " +
           (names.empty() ? std::string("an answer") : "'" + lockstep::join(names, "', '") + "'") +
           " still ran there after " + seconds_text(options_.stop_timeout) +
           " (Options::stop_timeout): its thread was left behind";
  } catch (const std::exception&) {
    log_warning("rpc: while leaving: " + failure_text(std::current_exception()));
    return {};
  }
}

milliseconds default_timeout() {
  const std::lock_guard lock(worker_mutex());
  const auto worker = current_worker.lock();
  return worker ? worker->timeout() : kTimeoutWithoutWorker;
}

void run_later(milliseconds delay, std::function<void()> task) {
  this_worker("rpc::batched")->threads().run_later(delay, std::move(task));
}

void check_batch_options(const std::string& name, const BatchOptions& options) {
  if (options.size >= 1 && options.delay >= milliseconds(0)) return;
  throw UsageError("rpc::batched: '" + name + "': size " + std::to_string(options.size) +
                   " and delay " + std::to_string(options.delay.count()) +
                   " ms; expected at least 1 and 0");
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
