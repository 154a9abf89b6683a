#include "lockstep/elastic/agent_runner.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/elastic/agent.h"
#include "lockstep/elastic/event_queue.h"

namespace lockstep::elastic {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = Request::Kind;
using launch::HostOrder;
using std::chrono::milliseconds;

/// How long the end of the job waits for the registry to take the lease back.
constexpr milliseconds kLetGo{1'000};

HostOrder order_of(const StartWorkers& start) {
  const GenerationRecord& record = *start.record;
  HostOrder order{HostOrder::Kind::run};
  order.generation = {.number = record.number,
                      .restarts = record.restarts,
                      .first_rank = record.members[start.index].first_rank,
                      .world_size = record.world_size(),
                      .node_rank = static_cast<int>(start.index),
                      .nodes = static_cast<int>(record.members.size()),
                      .master_addr = record.store_address,
                      .master_port = record.store_port};
  return order;
}

/// The agent's keys have no prefix.
std::vector<Record> without_prefix(std::vector<Record> records, size_t prefix) {
  for (auto& record : records) record.key.erase(0, prefix);
  return records;
}

class AgentRunner : public launch::HostAgent {
 public:
  AgentRunner(RunnerOptions options, std::unique_ptr<Registry> registry)
      : options_(std::move(options)),
        prefix_("lockstep/" + options_.run_id + "/"),
        registry_(std::move(registry)),
        agent_(options_.agent),
        thread_([this] { run(); }) {}

  ~AgentRunner() override {
    over_ = true;
    handed_in_.push(Tick{});
    thread_.join();
  }

  int event_fd() const override { return orders_.descriptor(); }

  HostOrder order() override {
    while (auto next = orders_.take(milliseconds(0))) order_ = std::move(*next);
    return order_;
  }

  void ended(int64_t generation, const launch::HostEnd& end) override {
    WorkersEnded ended{generation, end};
    ended.end.text = "on host " + where_ + ": " + end.text;
    handed_in_.push(std::move(ended));
  }

  void leave() override { handed_in_.push(Leave{}); }

 private:
  /// The agent's thread.
  void run() {
    try {
      perform(agent_.start(Clock::now()));
      while (!agent_.finished() && !over_) step();
    } catch (const std::exception& error) {
      orders_.push({.kind = HostOrder::Kind::lost,
                    .exit_code = exit_code_of(error),
                    .text = std::string("the host's part in the job has failed: ") + error.what()});
    }
  }

  void step() {
    pollfd fds[] = {{registry_->descriptor(), POLLIN, 0}, {handed_in_.descriptor(), POLLIN, 0}};
    ::poll(fds, 2, wait_ms());
    while (const auto event = handed_in_.take(milliseconds(0))) take(*event);
    while (auto event = registry_->next_event(milliseconds(0))) {
      std::visit([this](auto& one) { arrived(one); }, *event);
      if (agent_.finished()) return;
    }
    const auto now = Clock::now();
    if (agent_.deadline() && now >= *agent_.deadline()) take(Tick{});
    keep_lease(now);
  }

  int wait_ms() const {
    auto next = agent_.deadline();
    if (keep_at_ && (!next || *keep_at_ < *next)) next = keep_at_;
    if (!next) return -1;
    const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
  }

  void take(const Event& event) { perform(agent_.take(event, Clock::now())); }

  // ---- From the registry

  void ask(Request request, std::function<void(const Reply&)> then) {
    requests_[registry_->submit(std::move(request))] = std::move(then);
  }

  void arrived(const Reply& reply) {
    if (reply.error && reply.error->kind() != RegistryError::Kind::unreachable) throw *reply.error;
    if (const auto request = requests_.extract(reply.request)) request.mapped()(reply);
  }

  void take_answer(uint64_t request, const Reply& reply) {
    const auto entries = without_prefix(reply.records, prefix_.size());
    take(Answered{.request = request,
                  .outcome = reply.outcome,
                  .entry = entries.empty() ? std::nullopt : std::optional(entries.front()),
                  .revision = reply.revision});
  }

  void arrived(const Change& change) {
    const auto watch = watches_.find(change.watch);
    if (watch == watches_.end()) return;
    if (change.error) throw *change.error;
    Changed changed{.prefix = watch->second,
                    .written = without_prefix(change.written, prefix_.size()),
                    .revision = change.revision,
                    .whole = change.whole};
    for (const auto& key : change.erased) changed.erased.push_back(key.substr(prefix_.size()));
    take(changed);
  }

  // ---- The lease

  void take_lease(const Reply& reply) {
    if (reply.outcome != Reply::Outcome::done) return take(LeaseLost{});
    lease_ = reply.lease;
    keep_at_ = Clock::now() + options_.agent.keep_alive / 3;
    take(LeaseGranted{});
  }

  void keep_lease(Time now) {
    if (!keep_at_ || now < *keep_at_) return;
    keep_at_ = now + options_.agent.keep_alive / 3;
    ask({.kind = Kind::keep_lease, .lease = lease_, .timeout = options_.agent.keep_alive},
        [this, lease = lease_, now](const Reply& reply) { take_kept(lease, now, reply); });
  }

  void take_kept(int64_t lease, Time sent, const Reply& reply) {
    if (lease != lease_) return;
    if (reply.outcome == Reply::Outcome::done) return take(LeaseKept{sent});
    if (reply.outcome != Reply::Outcome::lease_gone) return;
    lease_ = 0;
    keep_at_.reset();
    take(LeaseLost{});
  }

  // ---- What the agent wants

  void perform(const std::vector<Action>& actions) {
    for (const auto& action : actions) std::visit([this](const auto& one) { on(one); }, action);
  }

  void on(const CompareAndSet& action) {
    ask({.kind = Kind::put,
         .key = prefix_ + action.key,
         .value = action.value,
         .expected = action.expected,
         .lease = action.with_lease ? lease_ : 0},
        [this, number = action.request](const Reply& reply) { take_answer(number, reply); });
  }
  void on(const Watch& action) {
    watches_[registry_->watch(prefix_ + action.prefix)] = action.prefix;
  }
  void on(const Unwatch& action) {
    std::erase_if(watches_, [&](const auto& watch) {
      if (watch.second == action.prefix) registry_->unwatch(watch.first);
      return watch.second == action.prefix;
    });
  }
  void on(const GrantLease&) {
    lease_ = 0;
    keep_at_.reset();
    const auto ttl = std::chrono::ceil<std::chrono::seconds>(options_.agent.keep_alive);
    ask({.kind = Kind::grant_lease, .ttl = std::max(ttl, std::chrono::seconds(1))},
        [this](const Reply& reply) { take_lease(reply); });
  }
  void on(const LetGoLease&) {
    keep_at_.reset();
    if (lease_ == 0) return;
    const uint64_t sent = registry_->submit(
        {.kind = Kind::revoke_lease, .lease = std::exchange(lease_, 0), .timeout = kLetGo});
    while (const auto event = registry_->next_event(2 * kLetGo)) {  // Without a reply it expires.
      const auto* reply = std::get_if<Reply>(&*event);
      if (reply && reply->request == sent) return;
    }
  }
  void on(const OpenStore& action) {
    earlier_store_ = std::exchange(store_, {});  // Workers may still leave its generation.
    try {
      store_ = options_.serve_store();
      handed_in_.push(StoreOpened{action.generation, store_.address, store_.port});
    } catch (const std::exception& error) {
      handed_in_.push(StoreOpened{.generation = action.generation, .error = error.what()});
    }
  }
  void on(const StartWorkers& action) { orders_.push(started_ = order_of(action)); }
  void on(const StopWorkers& action) {
    orders_.push({.kind = HostOrder::Kind::wait,
                  .generation = started_.generation,
                  .interrupted = action.interrupted});
  }
  void on(const Finish& action) { orders_.push(action); }
  void on(const Say& action) { options_.say(action.text); }

  const RunnerOptions options_;
  const std::string prefix_;
  /// For messages: its number, where it has one.
  const std::string where_ =
      options_.agent.node_rank ? std::to_string(*options_.agent.node_rank) : options_.agent.host;
  const std::unique_ptr<Registry> registry_;
  EventQueue<Event> handed_in_;
  EventQueue<HostOrder> orders_;
  HostOrder order_;  ///< Of the launcher's thread.
  std::atomic<bool> over_{false};

  // Of the agent's thread.
  Agent agent_;
  int64_t lease_ = 0;  ///< 0: none.
  std::optional<Time> keep_at_;
  std::map<uint64_t, std::function<void(const Reply&)>> requests_;  ///< What takes their replies.
  std::map<uint64_t, std::string> watches_;
  ServedStore store_, earlier_store_;
  HostOrder started_;  ///< The last one to run workers.
  std::thread thread_;
};

}  // namespace

std::unique_ptr<launch::HostAgent> run_agent(RunnerOptions options,
                                             std::unique_ptr<Registry> registry) {
  return std::make_unique<AgentRunner>(std::move(options), std::move(registry));
}

}  // namespace lockstep::elastic
