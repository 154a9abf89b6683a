// Who does the work of Messages when, and what ends a message that does not come to its end.
#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/futex.h"
#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {
namespace {

/// How often the thread looks whether the waits have left work to it, and how many times in vain
/// before it sleeps until it is woken: a program that waits all the time need not wake it.
constexpr std::chrono::microseconds kTick{200};
constexpr int kTicks = 25;
/// For answers that do not fit into a ring when the group closes.
constexpr std::chrono::milliseconds kLastAnswers{100};

}  // namespace

void Message::wait(std::chrono::milliseconds timeout) {
  if (!settled()) engine_->wait(*this, timeout);
  if (error_) std::rethrow_exception(error_);
}

// The thread sets `parked_`, then looks at `drivers_`: one sees the other.
void Messages::stop_driving() {
  if (drivers_.fetch_sub(1, std::memory_order_seq_cst) > 1) return;
  if (!parked_.load(std::memory_order_seq_cst)) return;
  const std::lock_guard lock(mutex_);
  start_or_wake_thread();
}

void Messages::settle(const std::vector<MessagePtr>& finished) {
  for (const MessagePtr& message : finished) {
    if (message->call_.finished) message->call_.finished(message->error_);
    message->call_.call.reset();
    message->settled_.store(true, std::memory_order_seq_cst);
  }
  mailbox_->ring();
}

template <class Enough>
void Messages::doze(const Enough& enough, std::chrono::nanoseconds limit) {
  mailbox_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = mailbox_->doorbell.load(std::memory_order_seq_cst);
  if (!enough() && !look()) sleep_on(mailbox_->doorbell, seen, limit);
  mailbox_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Messages::wait(Message& message, std::chrono::milliseconds timeout) {
  /// While a thread is in here, Messages' own thread has nothing to do.
  struct Driver {
    explicit Driver(Messages& its) : messages(its) { ++messages.inside_, ++messages.drivers_; }
    ~Driver() {
      messages.stop_driving();
      --messages.inside_;
    }
    Messages& messages;
  };
  const Driver driver(*this);
  const auto begin = Clock::now();
  drive(message, timeout);
  caller_spin_.learn(Clock::now() - begin);
}

void Messages::drive(Message& message, std::chrono::milliseconds timeout) {
  constexpr int kLooksPerTime = 32;
  const auto begin = Clock::now();
  const auto deadline = begin + timeout;
  auto spin_until = begin + group_.spin(caller_spin_);
  int looks = 0;
  while (!message.settled()) {
    bool progressed = false;
    if (look()) {
      const Lock lock(*this, std::try_to_lock);
      progressed = lock && progress();
    }
    if (message.settled()) return;
    if (!progressed && ++looks % kLooksPerTime != 0) {
      spin_pause();
      continue;
    }
    const auto now = Clock::now();
    if (progressed) spin_until = now + group_.spin(caller_spin_);
    if (now >= deadline && !message.done()) {
      const Lock lock(*this);
      expire(message.shared_from_this(), timeout);
      continue;
    }
    if (now >= spin_until)
      doze([&] { return message.settled(); },
           message.done() ? kSlice
                          : std::clamp<std::chrono::nanoseconds>(
                                deadline - now, std::chrono::microseconds(100), kSlice));
    const Lock lock(*this, std::try_to_lock);
    if (lock) attend(now);
  }
}

void Messages::start_or_wake_thread() {
  if (stop_ || !busy()) return;
  if (!thread_.joinable()) {
    parked_.store(false, std::memory_order_seq_cst);
    thread_ = std::thread([this] { run(); });
  } else if (parked_.load(std::memory_order_seq_cst) && needed()) {
    changed_.notify_all();
  }
}

bool Messages::await_work() {
  std::unique_lock lock(mutex_);
  for (int ticks = 0; !stop_ && !needed();) {
    if (++ticks <= kTicks) {
      changed_.wait_for(lock, kTick);
      continue;
    }
    parked_.store(true, std::memory_order_seq_cst);
    changed_.wait(lock, [this] { return stop_ || needed(); });
    parked_.store(false, std::memory_order_seq_cst);
  }
  return !stop_;
}

void Messages::run() {
  while (await_work()) {
    if (!look()) doze([this] { return stop_ || drivers_ > 0; }, kSlice);
    const Lock lock(*this);
    progress();
    attend(Clock::now());
  }
}

void Messages::attend(Clock::time_point now) {
  if (now < next_attention_) return;
  next_attention_ = now + kSlice;
  if (group_.failed()) fail_all([this](const Message& message) { return group_error(message); });
  const std::vector<MessagePtr> all = live_;
  const bool from_any = std::any_of(
      all.begin(), all.end(), [](const MessagePtr& message) { return message->peer_ == kAnyRank; });
  for (int rank = 0; rank < size_; ++rank) {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    if (rank == rank_ || peer.lost) continue;
    const bool waited_for = peer.live > 0 || !peer.sends.empty() || !peer.answers.empty() ||
                            !peer.sending.empty() || from_any;
    if (waited_for && group_.gone(rank)) lose(rank);
  }
  for (const MessagePtr& message : all) {
    if (!message->done() && now >= message->deadline_) expire(message, message->call_.timeout);
  }
}

void Messages::lose(int rank) {
  // First what it left behind; it writes no more.
  while (drain(rank)) {
  }
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.lost = true;
  const std::vector<MessagePtr> all = live_;
  for (const MessagePtr& message : all) {
    if (message->peer_ == rank) {
      finish(message, lost_error(*message));
    } else if (message->peer_ == kAnyRank && all_others_lost()) {
      finish(message, lost_error(*message));
    }
  }
  owed_ -= peer.answers.size() + peer.sending.size();
  unanswered_ -= peer.sends.size();
  peer.answers.clear();
  peer.announcing.clear();
  peer.sending.clear();
  peer.sends.clear();
  if (!peer.out.waiting()) return;
  peer.out.unblock();
  blocked_.fetch_sub(1, std::memory_order_seq_cst);
}

bool Messages::all_others_lost() const {
  if (size_ == 1) return false;  // A send to oneself may come.
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_ && !peers_[static_cast<size_t>(rank)].lost) return false;
  return true;
}

void Messages::fail_all(const std::function<std::exception_ptr(const Message&)>& error) {
  const std::vector<MessagePtr> all = live_;
  for (const MessagePtr& message : all) finish(message, error(*message));
}

void Messages::expire(const MessagePtr& message, std::chrono::milliseconds timeout) {
  if (message->done()) return;
  const bool never = message->peer_ == kAnyRank;
  const std::string who = never ? "no rank" : group_.name(message->peer_);
  const char* call = message->send_ ? "the receive" : "the send";
  const std::string what = message->moving_ ? who + " has called " + call + " but does not go on"
                                            : who + (never ? " called " : " did not call ") + call;
  const std::string how = " did not finish within " + seconds_text(timeout) + ": " + what;
  late_ = message->call_.call->text() + how;
  late_at_ = Clock::now();
  Failure failure{.kind = Failure::Kind::late, .waited_ms = timeout.count()};
  if (!never) failure.ranks = {group_.member(message->peer_, failure.kind)};
  finish(message,
         std::make_exception_ptr(TimeoutError(
             text_of(*message) + how,
             "do both sides use the same ranks and tag? Else give a longer time-out", failure)));
}

void Messages::close() {
  {
    const Lock lock(*this);
    closed_ = true;
    fail_all([this](const Message& message) {
      return std::make_exception_ptr(
          CommError(text_of(message) + " had not finished when the group was closed"));
    });
    for (int rank = 0; rank < size_; ++rank) flush(rank);
  }
  for (const auto end = Clock::now() + kLastAnswers; Clock::now() < end;) {
    {
      const Lock lock(*this);
      if (owed_ == 0) break;
      progress();
      attend(Clock::now());
    }
    doze([] { return false; }, std::chrono::milliseconds(1));
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  mailbox_->ring();
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
  // Everything is done: waits return at once.
  while (inside_.load(std::memory_order_seq_cst) > 0) {
    mailbox_->ring();
    std::this_thread::yield();
  }
}

std::string Messages::text_of(const Message& message) const {
  return "rank " + std::to_string(group_.names()[static_cast<size_t>(rank_)]) + ": " +
         message.call_.call->text();
}

std::exception_ptr Messages::group_error(const Message& message) const {
  try {
    group_.throw_if_failed(message.call_.call->text());
  } catch (...) {
    return std::current_exception();
  }
  return std::make_exception_ptr(CommError(text_of(message) + " failed"));
}

std::exception_ptr Messages::lost_error(const Message& message) const {
  Failure lost;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_ || (message.peer_ != kAnyRank && message.peer_ != rank)) continue;
    lost.add(group_.end_of(rank));
  }
  group_.note_cause(lost);
  return failure_error(text_of(message) + " cannot finish: " + describe(lost), lost);
}

std::exception_ptr Messages::mismatch(const Disagreement& met) const {
  return std::make_exception_ptr(MismatchError(judge_(met)));
}

}  // namespace lockstep::shm
