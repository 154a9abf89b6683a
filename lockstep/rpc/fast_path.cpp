// Which thread takes messages out when.
#include "lockstep/rpc/fast_path.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/comm/shared_memory/futex.h"
#include "lockstep/rpc/remote_failure.h"

namespace lockstep::rpc::detail {
namespace {

/// How long a thread looks for a message before it sleeps, at least and at most. A small call takes
/// some 4 us where both ends look, 9 where both sleep and are woken. Looking for longer is of no
/// use, and where others want the processors it keeps the other end from its work: 200 us made a
/// call take 165.
constexpr std::chrono::microseconds kLeastSpin{1}, kMostSpin{10};
/// A sleep that a call's time-out does not end sooner.
constexpr std::chrono::hours kLongSleep{1};
/// The poller's: it looks unasked as well, so that a wake-up that goes astray costs time only.
constexpr std::chrono::seconds kPollerSleep{1};
/// A look at the clock costs as much as some at rings.
constexpr int kLooksPerTime = 16;

}  // namespace

FastPath::FastPath(std::shared_ptr<FastLink> link, std::shared_ptr<const CallRunner> runner,
                   std::shared_ptr<HandlerThreads> threads)
    : link_(std::move(link)),
      runner_(std::move(runner)),
      threads_(std::move(threads)),
      caller_budget_(kLeastSpin, kMostSpin),
      handler_budget_(kLeastSpin, kMostSpin) {}

FastPath::~FastPath() {
  stop();
}

void FastPath::start() {
  poller_ = std::thread([this] { run_poller(); });
}

void FastPath::stop() noexcept {
  stopped_ = true;
  for (const auto& call : take_pending_if([](const Pending&) { return true; })) {
    call.state->fail(lost_failure(call.what, "this worker has left"));
  }
  for (const auto waiter : {FastLink::caller, FastLink::handler, FastLink::poller})
    link_->wake(waiter);
  if (poller_.joinable()) poller_.join();
  link_->close();
}

void FastPath::take(bool is_handler) {
  FastCatch caught;
  link_->take(caught);
  for (auto& message : caught.messages) {
    if (static_cast<Kind>(message.head.kind) == Kind::request) requests_.push(std::move(message));
  }
  // A polling handler runs what has come itself. Before answers, whose callbacks may take a while.
  if (!is_handler) bring_helper();
  for (const auto& message : caught.messages) {
    if (static_cast<Kind>(message.head.kind) != Kind::request) on_answer(message);
  }
  for (const int id : caught.lost) fail_calls_to(id);
}

void FastPath::take_and_go() {
  if (!link_->look()) return;
  take();
  // More than a turn, or another thread was at it.
  if (link_->look()) link_->wake(FastLink::poller);
}

void FastPath::bring_helper() {
  if (stopped_ || requests_.empty()) return;
  if (has_handler_) {
    link_->wake(FastLink::handler);
  } else if (!helper_comes_.exchange(true)) {
    threads_->run([self = shared_from_this()] {
      self->helper_comes_ = false;
      self->serve();
    });
  }
}

// Takes out what comes until there is enough or it is late. Where a caller looks, a handler need
// not.
void FastPath::look_for(Clock::time_point end, const std::function<bool()>& enough,
                        bool is_handler) {
  for (int looks = 1; !enough(); ++looks) {
    if (looks % kLooksPerTime == 0 && Clock::now() >= end) return;
    if (link_->look()) {
      take(is_handler);
    } else {
      shm::spin_pause();
    }
    if (is_handler && callers_looking_ > 0) return;
  }
}

void FastPath::drive(const CallState& state, std::optional<Clock::time_point> end) {
  const auto begin = Clock::now();
  const auto latest = end.value_or(Clock::time_point::max());
  const auto done = [&] { return state.is_done(); };
  {
    Look look(*link_);
    look.begin();
    ++callers_looking_;
    look_for(std::min(begin + link_->spin(caller_budget_), latest), done, /*is_handler=*/false);
    --callers_looking_;
  }
  take_and_go();
  if (!done()) sleep_over(state, latest);
  if (done()) caller_budget_.learn(Clock::now() - begin);
}

// One thread at a time: the others wait for what it, or the poller, takes out.
void FastPath::sleep_over(const CallState& state, Clock::time_point end) {
  const CallState* nobody = nullptr;
  if (!sleeps_over_.compare_exchange_strong(nobody, &state)) return;
  const auto over = [&] { return state.is_done() || stopped_; };
  while (!over()) {
    const auto now = Clock::now();
    if (now >= end) break;
    link_->sleep(FastLink::caller, over, std::min<Clock::duration>(end - now, kLongSleep));
    if (link_->look()) take();
  }
  sleeps_over_ = nullptr;
  take_and_go();
}

void FastPath::finished(const CallState& state) noexcept {
  if (sleeps_over_ == &state) link_->wake(FastLink::caller);
}

namespace {

/// Run by a handler thread. Where there is none any more, by who lets go of them last.
struct Callbacks {
  const std::shared_ptr<CallState> state;  ///< They look at it, and own it not.
  std::vector<std::function<void()>> left;
  Callbacks(std::shared_ptr<CallState> its, std::vector<std::function<void()>> given)
      : state(std::move(its)), left(std::move(given)) {}
  ~Callbacks() { run(); }
  Callbacks(const Callbacks&) = delete;
  Callbacks& operator=(const Callbacks&) = delete;
  void run() {
    for (const auto& callback : std::exchange(left, {})) callback();
  }
};

}  // namespace

void FastPath::run_elsewhere(std::shared_ptr<CallState> state,
                             std::vector<std::function<void()>> callbacks) noexcept {
  auto kept = std::make_shared<Callbacks>(std::move(state), std::move(callbacks));
  threads_->run([kept] { kept->run(); });
}

void FastPath::run_poller() {
  const auto called = [this] { return stopped_ || poller_called_; };
  while (!stopped_) {
    poller_called_ = false;
    if (link_->look()) {
      take();
      if (link_->look()) std::this_thread::yield();  // Another thread is at it.
    }
    const auto next = expire();
    const auto now = Clock::now();
    if (next <= now) continue;
    link_->sleep(FastLink::poller, called, std::min<Clock::duration>(next - now, kPollerSleep));
  }
}

}  // namespace lockstep::rpc::detail
