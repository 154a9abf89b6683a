#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/message_ring.h"
#include "lockstep/comm/shared_memory/shared_group.h"

namespace lockstep::shm {

class Messages;

/// What a send or a receive needs beside its peer.
struct MessageCall {
  int tag = 0;
  void* data = nullptr;  ///< Contiguous; must live until the message is done: let `call` own it.
  size_t bytes = 0;
  /// `hash` is equal for a send and a receive that fit. `text` is for errors: "send(to rank 1) of
  /// float32 [4] with tag 5 of group '0'". Let go of when the message is done.
  std::shared_ptr<const Call> call;
  std::chrono::milliseconds timeout{120'000};  ///< Until it is done; then it fails.
  /// Called once, when it is done, with its error or null: by the thread that finishes it, no lock
  /// held, perhaps before `post_send` or `post_recv` returns. May not throw, nor wait for a
  /// message.
  std::function<void(const std::exception_ptr& error)> finished = {};
};

/// A send or a receive under way. Any thread.
class Message : public std::enable_shared_from_this<Message> {
 public:
  /// Whether it has ended, well or not: its memory is no longer touched.
  bool done() const { return done_.load(std::memory_order_seq_cst); }
  /// Why it failed: a CommError. Null when it did not fail, or is not done.
  std::exception_ptr error() const { return done() ? error_ : nullptr; }
  /// The rank that sent or sends. For a receive from any, -1 until it has met a send.
  int source() const { return source_.load(std::memory_order_acquire); }
  /// Blocks until it is done and its `finished` has run. Throws the error it failed with. Throws a
  /// TimeoutError after `timeout`, which ends it.
  void wait(std::chrono::milliseconds timeout);

 private:
  friend class Messages;
  using Clock = std::chrono::steady_clock;
  bool settled() const { return settled_.load(std::memory_order_seq_cst); }
  std::byte* data() const { return static_cast<std::byte*>(call_.data); }

  Messages* engine_ = nullptr;
  bool send_ = false;
  int peer_ = -1;  ///< -1: any.
  MessageCall call_;
  uint64_t hash_ = 0;
  size_t moved_ = 0;
  Clock::time_point deadline_;
  uint64_t id_ = 0;        ///< As the other side knows it. Of a send its number, from 1.
  uint64_t other_id_ = 0;  ///< send: the receive's.
  size_t live_ = 0;        ///< Where it is in Messages::live_.
  bool moving_ = false;    ///< The other side has called, and its data is under way.
  std::atomic<int> source_{-1};
  std::atomic<bool> done_{false};
  std::atomic<bool> settled_{false};  ///< done, and `finished` has run.
  std::exception_ptr error_;
};

using MessagePtr = std::shared_ptr<Message>;

/// A send and a receive that met and do not fit.
struct Disagreement {
  struct Side {
    uint64_t hash = 0;  ///< Call::hash.
    size_t bytes = 0;
  };
  Side send;
  Side recv;
  int sender = 0;  ///< Ranks of the group.
  int receiver = 0;
  int tag = 0;
  uint64_t number = 0;  ///< Of the message from the sender to the receiver, counted from 1.
};

/// Sends and receives of one rank. All methods from any thread.
///
/// Each ordered pair of ranks has a ring of its own (message_ring.h), also a rank and itself. The
/// receiver takes out all that comes, in order, so that nothing in it can stand in another's way:
///
///   sender                          receiver
///   announce(tag, size, data if small) ->
///                                <- ack: received                       (small)
///                                <- clear: a receive is there, go on    (large)
///   data, data, ... ->                                                  (large)
///                                <- refuse(my hash and size)            (another dtype or size)
///
/// - Order. Announcements of a pair come in the order of the sends. A receive meets the oldest
///   announcement of its tag, an announcement the oldest receive. A message that waits for its
///   receive lies in a list of the receiver and holds up no other.
/// - Bounds. Data of large messages comes only when its place is known. The receiver holds small
///   data that waits for its receive, however much is sent. A rank that calls nothing takes nothing
///   out: the ring fills and its senders wait.
/// - No deadlock. Taking out needs no room in the other direction: answers wait in a list, at most
///   one for each announcement. So a full ring is emptied by any rank that has something
///   under way. A rank that has nothing under way keeps others waiting only for its calls.
/// - A send is done when its receive has agreed and the data has been taken or lies in the ring. So
///   both sides always learn of a mismatch, and what was sent is received even if the sender ends.
/// - Death. Nothing is locked across processes, and what a writer has not published is not there. A
///   rank that waits checks every 20 ms that its peer lives. When the peer has ended, it takes out
///   what the peer left behind, and only then fails what is still unmet. The death of one rank
///   fails no message between others. The group's failure fails all.
/// - Waiting. A thread in `wait` does the work itself: it looks for as long as waits have been
///   worth it (see SpinBudget), then sleeps on the rank's Mailbox. When messages are under way and
///   no thread waits, a thread of this object does the work, always asleep when there is none. It
///   starts with the first message that cannot be finished at once. It takes over within some 200
///   us of the last wait.
class Messages {
 public:
  /// Makes the text of a MismatchError.
  using Judge = std::function<std::string(const Disagreement&)>;
  /// `group` must outlive it. One for each group and rank.
  Messages(SharedGroup& group, Judge judge);
  ~Messages() { close(); }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  static constexpr int kAnyRank = -1;
  /// Never block. Throw UsageError for wrong ranks, and std::system_error where no thread can be
  /// started. All else is the message's error.
  MessagePtr post_send(int dst, MessageCall call);
  MessagePtr post_recv(int src, MessageCall call);

  /// Fails what is under way with a CommError and ends the thread. Blocks for at most some 100 ms,
  /// while answers that others wait for do not fit into their rings. Idempotent.
  void close();

  /// The last message that ran into its time-out, and what it waited for. Empty when none did, or
  /// when one that began later has ended well.
  std::string late();

 private:
  friend class Message;
  friend struct MessagesProbe;  ///< Of tests.
  using Clock = std::chrono::steady_clock;
  class Lock;
  /// Messages that the other side knows by number.
  using Table = std::unordered_map<uint64_t, MessagePtr>;
  /// An announcement without a receive yet.
  struct Arrived {
    int from = 0;
    Frame frame{};
    std::vector<std::byte> payload;
  };
  struct Peer {
    RingWriter out;
    RingReader in;
    bool opened = false;  ///< `out` has been used.
    bool lost = false;
    size_t live = 0;      ///< Messages to or from it, those from any not counted.
    uint64_t number = 0;  ///< Of the last send.
    Table sends;          ///< Not answered.
    std::deque<Frame> answers;
    std::deque<MessagePtr> announcing;  ///< Not yet in the ring.
    std::deque<MessagePtr> sending;
  };
  static constexpr size_t kBuckets = 64;
  static size_t bucket(int tag) { return static_cast<uint32_t>(tag) % kBuckets; }

  // messages.cpp: what a call does. `mutex_` is held in all that follows unless said otherwise.
  MessagePtr make(bool send, int peer, MessageCall call);
  bool admit(const MessagePtr& message);
  static MessagePtr take(Table& table, uint64_t id);
  /// The send that an answer is for. Null when it is not known any more.
  MessagePtr take_answered(Peer& peer, uint64_t id);
  bool meet_earlier(const MessagePtr& recv);
  MessagePtr take_posted(int from, int tag);
  void meet(Message& recv, int from);
  void match(int from, const Frame& frame, const std::byte* payload, const MessagePtr& recv);
  void finish(const MessagePtr& message, std::exception_ptr error = nullptr);

  // message_traffic.cpp: what comes and goes through the rings.
  bool progress();
  bool drain(int rank);
  void handle(int rank, const Frame& frame, const std::byte* payload);
  void on_clear(int rank, const Frame& frame);
  void on_refuse(int rank, const Frame& frame);
  void on_data(const Frame& frame, const std::byte* payload);
  void answer(int rank, FrameKind kind, uint64_t id, uint64_t size = 0, uint64_t hash = 0);
  bool flush(int rank);
  bool flush_answers(Peer& peer);
  bool flush_announcements(Peer& peer);
  bool flush_data(int rank, Peer& peer);
  bool write_announcement(Peer& peer, const Message& message);
  void publish(int rank);
  void open(int rank);
  Mailbox& mailbox(int rank);

  // message_waits.cpp: which thread does the work when, and what ends it.
  void wait(Message& message, std::chrono::milliseconds timeout);
  void drive(Message& message, std::chrono::milliseconds timeout);
  /// Calls `visit` for each rank that has used its ring to this one, until it returns true.
  template <class Visit>
  bool any_opened(Visit visit);
  bool look();  ///< Without the mutex: whether `progress` has something to do.
  template <class Enough>
  void doze(const Enough& enough, std::chrono::nanoseconds limit);  ///< Without the mutex.
  void settle(const std::vector<MessagePtr>& finished);             ///< Without the mutex.
  void stop_driving();                                              ///< Without the mutex.
  void attend(Clock::time_point now);
  void lose(int rank);
  void fail_all(const std::function<std::exception_ptr(const Message&)>& error);
  std::exception_ptr group_error(const Message& message) const;
  bool all_others_lost() const;
  void expire(const MessagePtr& message, std::chrono::milliseconds timeout);
  std::exception_ptr lost_error(const Message& message) const;
  std::exception_ptr mismatch(const Disagreement& disagreement) const;
  /// "rank 0: send(to rank 1) of ...".
  std::string text_of(const Message& message) const;
  bool busy() const { return !live_.empty() || owed_ > 0 || unanswered_ > 0; }
  bool needed() const { return busy() && drivers_.load(std::memory_order_seq_cst) == 0; }
  void start_or_wake_thread();
  void run();
  bool await_work();  ///< Without the mutex. False when the thread shall end.

  SharedGroup& group_;
  const Judge judge_;
  const int rank_;
  const int size_;
  size_t eager_ = 0;  ///< Up to which size a message travels with its announcement.
  size_t chunk_ = 0;  ///< In what pieces larger ones travel.
  Mailbox* mailbox_ = nullptr;

  SpinBudget caller_spin_{SharedGroup::kSpin, SharedGroup::kCallerSpin};

  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::vector<MessagePtr> live_;
  std::string late_;
  Clock::time_point late_at_;
  std::array<std::list<MessagePtr>, kBuckets> posted_;  ///< Receives without a send.
  std::array<std::list<Arrived>, kBuckets> arrived_;
  Table receiving_;
  uint64_t received_ = 0;             ///< The last number in it.
  std::vector<MessagePtr> finished_;  ///< Done in this turn, to be settled.
  size_t owed_ = 0;              ///< Answers and sends under way that wait for room, of all peers.
  size_t unanswered_ = 0;        ///< Of all peers. Those given up are to be told to their receives.
  std::atomic<int> blocked_{0};  ///< Peers whose ring had no room.
  Clock::time_point next_attention_;
  bool closed_ = false;

  std::atomic<int> inside_{0};      ///< Threads that still need this object, counted in `wait`.
  std::atomic<int> drivers_{0};     ///< Those of them that do the work.
  std::atomic<bool> parked_{true};  ///< Its thread has not started or sleeps until it is needed.
  std::atomic<bool> stop_{false};
  std::condition_variable changed_;
  std::thread thread_;
};

/// Holds the mutex of Messages. At its end it lets go and tells of what has finished meanwhile.
class Messages::Lock {
 public:
  explicit Lock(Messages& messages) : messages_(messages), lock_(messages.mutex_) {}
  Lock(Messages& messages, std::try_to_lock_t how)
      : messages_(messages), lock_(messages.mutex_, how) {}
  ~Lock() {
    if (!lock_.owns_lock() || messages_.finished_.empty()) return;
    const std::vector<MessagePtr> finished = std::exchange(messages_.finished_, {});
    lock_.unlock();
    messages_.settle(finished);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

 private:
  Messages& messages_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace lockstep::shm
