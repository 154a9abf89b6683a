// Who does the work of Messages when, and what ends a message that does not come to its end.
#include <algorithm>
#include <system_error>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/shared_memory/callback_scope.h"
#include "lockstep/comm/shared_memory/futex.h"
#include "lockstep/comm/shared_memory/messages.h"
#include "lockstep/comm/shared_memory/messages_lock.h"

namespace lockstep::shm {
namespace {

/// How long a wait sleeps before it looks who is alive: a look reads a file of /proc a rank.
constexpr std::chrono::milliseconds kSlice{20};
/// How often the thread looks whether the waits have left work to it, and how many times in vain
/// before it sleeps until it is woken: a program that waits all the time need not wake it.
constexpr std::chrono::microseconds kTick{200};
constexpr int kTicks = 25;
/// For answers that do not fit into a ring when the group closes.
constexpr std::chrono::milliseconds kLastAnswers{100};

}  // namespace

/// A thread in `wait`: while there is one, Messages' own thread has nothing to do.
class Messages::Driver {
 public:
  explicit Driver(Messages& messages) : messages_(messages) {
    messages_.inside_.fetch_add(1, std::memory_order_seq_cst);
    messages_.drivers_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Driver() {
    messages_.stop_driving();
    messages_.inside_.fetch_sub(1, std::memory_order_seq_cst);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

 private:
  Messages& messages_;
};

void Message::wait(std::chrono::milliseconds timeout) {
  if (!settled()) engine_->wait(*this, timeout);
  if (error_) std::rethrow_exception(error_);
}

void Message::then(std::function<bool()> finished, std::function<void()> callbacks) {
  if (!done()) {
    const std::lock_guard lock(engine_->mutex_);
    if (!done()) {
      finished_ = std::move(finished);
      callbacks_ = std::move(callbacks);
      return;
    }
  }
  if (finished() && callbacks) callbacks();
}

// The thread sets `parked_` or clears `at_hand_`, then looks at `drivers_`: one sees the other.
void Messages::stop_driving() {
  if (drivers_.fetch_sub(1, std::memory_order_seq_cst) > 1) return;
  if (at_hand_.load(std::memory_order_seq_cst) && !parked_.load(std::memory_order_seq_cst)) return;
  const std::lock_guard lock(mutex_);
  start_or_wake_thread();
}

void Messages::settle(const std::vector<MessagePtr>& finished, const Message* waited) {
  std::vector<MessagePtr> to_call;
  for (const MessagePtr& message : finished) {
    const auto on_end = std::exchange(message->finished_, nullptr);
    if (on_end && on_end() && message->callbacks_) {
      to_call.push_back(message);
    } else {
      message->callbacks_ = nullptr;
      message->settled_.store(true, std::memory_order_seq_cst);
    }
  }
  mailbox_->ring();
  for (const MessagePtr& message : to_call) {
    if (message.get() != waited) call_back_later(message);
  }
  for (const MessagePtr& message : to_call) {
    if (message.get() != waited) continue;
    stop_driving();
    call_back(*message);
    drivers_.fetch_add(1, std::memory_order_seq_cst);
  }
}

void Messages::call_back_later(const MessagePtr& message) {
  bool helped = false;
  {
    const std::lock_guard lock(mutex_);
    to_call_.push_back(message);
    uncalled_.fetch_add(1, std::memory_order_seq_cst);
    helped = !stop_ && start_or_wake_thread();
    if (!helped) {
      to_call_.pop_back();
      uncalled_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  if (helped) {
    mailbox_->ring();  // It may sleep there.
  } else {
    call_back(*message);
  }
}

void Messages::call_back(Message& message) {
  {
    const CallbackScope scope;
    std::exchange(message.callbacks_, nullptr)();
  }
  message.settled_.store(true, std::memory_order_seq_cst);
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
      const Lock lock(*this, std::try_to_lock, &message);
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
      const Lock lock(*this, &message);
      expire(message.shared_from_this(), timeout);
      continue;
    }
    if (now >= spin_until)
      doze([&] { return message.settled(); },
           message.done() ? kSlice
                          : std::clamp<std::chrono::nanoseconds>(
                                deadline - now, std::chrono::microseconds(100), kSlice));
    const Lock lock(*this, std::try_to_lock, &message);
    if (lock) attend(now);
  }
}

bool Messages::start_or_wake_thread() {
  if (to_call_.empty() && (stop_ || !busy())) return true;
  if (at_hand_.load(std::memory_order_seq_cst)) {
    const bool hurries = parked_.load(std::memory_order_seq_cst) || !to_call_.empty();
    if (hurries && needed()) changed_.notify_all();
    return true;
  }
  Worker& worker = workers_.emplace_back();
  try {
    worker.thread = std::thread([this, &worker] { run(worker); });
  } catch (const std::system_error&) {  // Those who wait do the work.
    workers_.pop_back();
    return false;
  }
  at_hand_.store(true, std::memory_order_seq_cst);
  return true;
}

Messages::Task Messages::next_task() {
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
  Task task;
  if (to_call_.empty()) {
    task.over = stop_;
    return task;
  }
  task.to_call = std::move(to_call_.front());
  to_call_.pop_front();
  uncalled_.fetch_sub(1, std::memory_order_seq_cst);
  at_hand_.store(false, std::memory_order_seq_cst);
  start_or_wake_thread();
  return task;
}

void Messages::run(Worker& self) {
  while (true) {
    const Task task = next_task();
    if (task.to_call) {
      join_threads(/*all=*/false);
      call_back(*task.to_call);
      const std::lock_guard lock(mutex_);
      if (at_hand_.exchange(true, std::memory_order_seq_cst)) break;  // Another took its place.
      continue;
    }
    if (task.over) break;
    if (!look()) doze([this] { return stop_ || drivers_ > 0 || uncalled_ > 0; }, kSlice);
    const Lock lock(*this);
    progress();
    attend(Clock::now());
  }
  const std::lock_guard lock(mutex_);
  self.ended = true;
}

// The last thing that an ended one does is to let go of the mutex.
void Messages::join_threads(bool all) {
  while (true) {
    std::list<Worker> one;
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::find_if(workers_.begin(), workers_.end(),
                                      [&](const Worker& worker) { return all || worker.ended; });
      if (found == workers_.end()) return;
      one.splice(one.begin(), workers_, found);
    }
    one.front().thread.join();
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
    const bool waited_for = peer.live > 0 || peer.unanswered > 0 || !peer.answers.empty() ||
                            !peer.sending.empty() || from_any;
    if (waited_for && group_.gone(rank)) lose(rank);
  }
  for (const MessagePtr& message : all) {
    if (!message->done() && now >= message->deadline_) expire(message, message->timeout_);
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
      finish(message, message->stage_ == Message::Stage::disputed ? untold_mismatch(*message)
                                                                  : lost_error(*message));
    } else if (message->peer_ == kAnyRank && all_others_lost()) {
      finish(message, lost_error(*message));
    }
  }
  owed_ -= peer.answers.size() + peer.sending.size();
  unanswered_ -= static_cast<size_t>(peer.unanswered);
  peer.unanswered = 0;
  peer.unanswered_of.clear();
  peer.answers.clear();
  peer.announcing.clear();
  peer.sending.clear();
  peer.withheld.clear();
  peer.sends = Table();
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
  if (message->stage_ == Message::Stage::disputed) {
    finish(message, untold_mismatch(*message));
    return;
  }
  const bool never = message->peer_ == kAnyRank;
  const std::string who = never ? "no rank" : group_.name(message->peer_);
  const char* call = message->send_ ? "the receive" : "the send";
  const std::string what = message->stage_ == Message::Stage::waiting
                               ? who + (never ? " called " : " did not call ") + call
                               : who + " has called " + call + " but does not go on";
  const std::string how = " did not finish within " + seconds_text(timeout) + ": " + what;
  late_ = message->call_->text() + how;
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
  if (!CallbackScope::active()) end_threads();
}

void Messages::end_threads() {
  join_threads(/*all=*/true);
  // Everything is done: waits return at once.
  while (inside_.load(std::memory_order_seq_cst) > 0) {
    mailbox_->ring();
    std::this_thread::yield();
  }
}

Messages::~Messages() {
  close();
  end_threads();
}

std::string Messages::text_of(const Message& message) const {
  return "rank " + std::to_string(group_.names()[static_cast<size_t>(rank_)]) + ": " +
         message.call_->text();
}

std::exception_ptr Messages::group_error(const Message& message) const {
  try {
    std::vector<int> awaited;
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_ && message.peer_ == kAnyRank) awaited.push_back(rank);
    group_.throw_if_failed(message.call_->text(), group_.members(awaited, Failure::Kind::late));
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

std::string Messages::encoded(const Message& message) {
  try {
    return message.call_->encoded();
  } catch (const std::exception&) {
    return {};
  }
}

std::exception_ptr Messages::mismatch(const Disagreement& disagreement) const {
  std::string text;
  try {
    if (options_.judge && !disagreement.send.empty() && !disagreement.recv.empty())
      text = options_.judge(disagreement);
  } catch (const std::exception&) {  // What the other side told cannot be read.
  }
  if (text.empty())
    text = "message " + std::to_string(disagreement.number) + " with tag " +
           std::to_string(disagreement.tag) + " from " + group_.name(disagreement.sender) + " to " +
           group_.name(disagreement.receiver) +
           ": the send and the receive differ in size or dtype";
  return std::make_exception_ptr(MismatchError(text));
}

std::exception_ptr Messages::untold_mismatch(const Message& recv) const {
  return std::make_exception_ptr(
      MismatchError(text_of(recv) + " has met a send of another size or dtype; " +
                    group_.name(recv.peer_) + " did not tell of which before it ended"));
}

}  // namespace lockstep::shm
