#include "hosts_board.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/store.h"

namespace lockstep::tool {
namespace {

using Clock = std::chrono::steady_clock;
using launch::FailureElsewhere;
using std::chrono::milliseconds;

constexpr const char* kFailure = "lockstep/launcher/failure";
/// Which job's store it is: one that starts at the same address afterwards is not ours.
constexpr const char* kJob = "lockstep/launcher/job";
/// With the host's number: set once or again, as a request may be repeated.
constexpr const char* kJoined = "lockstep/launcher/hosts/";
constexpr const char* kInformed = "lockstep/launcher/informed_hosts/";
constexpr const char* kEnded = "lockstep/launcher/ended_hosts/";

/// Between two looks at the store; with many hosts longer, as one host answers all.
constexpr milliseconds kInterval{100};
constexpr int kHostsAnInterval = 50;
constexpr milliseconds kConnect{1'000};
constexpr milliseconds kAnswer{5'000};
/// A store that answered before and is no longer there.
constexpr milliseconds kReconnect{300};
/// How long the end of a job that failed is held up for the others to hear of it.
constexpr milliseconds kTellLimit{1'000};
/// The same on host 0 while the launchers of other hosts have not come yet: hosts start within
/// seconds of each other.
constexpr milliseconds kJoinLimit{3'000};
/// The same where the launcher of host 0 is not up yet.
constexpr milliseconds kFirstTellLimit{30'000};
constexpr milliseconds kEndLimit{5'000};
/// How long host 0 keeps the store for hosts whose workers have not ended; torchrun's limit.
constexpr milliseconds kLastHostLimit{300'000};

struct Board {
  explicit Board(const HostsMeeting& where) : meeting(where) {}

  const HostsMeeting meeting;
  std::mutex mutex;
  std::condition_variable changed;
  // Wishes of the launcher,
  std::optional<FailureElsewhere> own;
  std::optional<Clock::time_point> ended;
  bool stop = false;
  // and what the thread has found.
  std::optional<FailureElsewhere> elsewhere;
  bool own_is_told = false;
  bool end_is_told = false;
  bool all_joined = false;
  bool all_informed = false;
  bool all_ended = false;
  std::optional<Clock::time_point> connected;  // For the first time.
  bool lost = false;
  bool done = false;

  bool has_news() const { return stop || (own && !own_is_told) || (ended && !end_is_told); }
};

std::string encoded(const HostsMeeting& meeting, const FailureElsewhere& failure) {
  return std::to_string(meeting.host) + "\n" + std::to_string(failure.exit_code) + "\n" +
         failure.text;
}

FailureElsewhere decoded(const std::string& text) {
  const size_t first = text.find('\n'), second = text.find('\n', first + 1);
  if (second == std::string::npos) return {1, "another host failed"};
  const auto code = parse_int(text.substr(first + 1, second - first - 1));
  return {static_cast<int>(code.value_or(1)),
          "on host " + text.substr(0, first) + ": " + text.substr(second + 1)};
}

std::string key_of(const char* name, int host) {
  return name + std::to_string(host);
}

std::string own_job() {
  return std::to_string(::getpid()) + "-" +
         std::to_string(std::chrono::system_clock::now().time_since_epoch().count());
}

/// One connection to the store.
class Visit {
 public:
  /// `job`: whose store it is; empty as long as nobody knows.
  Visit(Board& board, std::string& job) : board_(board) {
    TcpStoreOptions options;
    options.host = board.meeting.address;
    options.port = board.meeting.port;
    options.timeout = kAnswer;
    store_ = tcp_store(options);
    const std::string found = board.meeting.host == 0
                                  ? store_.compare_set(kJob, "", job.empty() ? own_job() : job)
                                  : store_.get(kJob);
    if (job.empty()) job = found;
    ours_ = job == found;
    if (!ours_) return;
    store_.set(key_of(kJoined, board.meeting.host), "1");
    const std::lock_guard lock(board.mutex);
    if (!board.connected) board.connected = Clock::now();
    log_debug("lockstep run: connected to the store of the hosts");
    board.lost = false;
  }

  /// Returns when the launcher leaves, or at once from another job's store.
  void stay() {
    if (!ours_) return;
    while (true) {
      tell();
      std::unique_lock lock(board_.mutex);
      if (board_.stop) return;
      lock.unlock();
      look();
      lock.lock();
      const int factor = 1 + board_.meeting.hosts / kHostsAnInterval;
      board_.changed.wait_for(lock, board_.ended ? kInterval / 2 : kInterval * factor,
                              [&] { return board_.has_news(); });
    }
  }

 private:
  void tell() {
    std::optional<FailureElsewhere> own;
    bool ended = false;
    {
      const std::lock_guard lock(board_.mutex);
      if (!board_.own_is_told) own = board_.own;
      ended = board_.ended && !board_.end_is_told;
    }
    if (own) store_.compare_set(kFailure, "", encoded(board_.meeting, *own));
    if (ended) store_.set(key_of(kEnded, board_.meeting.host), "1");
    const std::lock_guard lock(board_.mutex);
    board_.own_is_told |= own.has_value();
    board_.end_is_told |= ended;
  }

  void look() {
    if (!knows_failure_ && store_.check({kFailure})) take_failure(store_.get(kFailure));
    if (board_.meeting.host != 0) return;
    {
      const std::lock_guard lock(board_.mutex);
      if (!board_.ended) return;
    }
    const bool joined = all_have(kJoined), informed = all_have(kInformed), ended = all_have(kEnded);
    const std::lock_guard lock(board_.mutex);
    board_.all_joined = joined;
    board_.all_informed = informed;
    board_.all_ended = ended;
  }

  bool all_have(const char* name) {
    std::vector<std::string> keys;
    for (int host = 0; host < board_.meeting.hosts; ++host) keys.push_back(key_of(name, host));
    return store_.check(keys);
  }

  void take_failure(const std::string& text) {
    knows_failure_ = true;
    store_.set(key_of(kInformed, board_.meeting.host), "1");
    if (text.substr(0, text.find('\n')) == std::to_string(board_.meeting.host)) return;
    const std::lock_guard lock(board_.mutex);
    board_.elsewhere = decoded(text);
  }

  Board& board_;
  Store store_;
  bool ours_ = false;
  bool knows_failure_ = false;
};

bool is_there(const HostsMeeting& meeting, milliseconds limit) {
  try {
    wait_until_listening(meeting.address, meeting.port, limit);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

/// Whether the launcher leaves; else after a short pause.
bool stops(Board& board) {
  std::unique_lock lock(board.mutex);
  return board.changed.wait_for(lock, kInterval / 2, [&] { return board.stop; });
}

bool was_there(Board& board) {
  const std::lock_guard lock(board.mutex);
  return board.connected.has_value();
}

/// Comes again until the launcher leaves: a store that does not answer may be a network's pause.
void visit_store(Board& board) {
  std::string job;
  do {
    const bool known = was_there(board);
    if (!is_there(board.meeting, known ? kReconnect : kConnect)) {
      if (known) log_debug("lockstep run: the store of the hosts is out of reach; trying again");
      const std::lock_guard lock(board.mutex);
      board.lost = known;
      continue;
    }
    try {
      Visit(board, job).stay();
      return;
    } catch (const std::exception& error) {
      log_debug(std::string("lockstep run: the store of the hosts: ") + error.what());
    }
  } while (!stops(board));
}

class HostsBoard : public launch::OtherHosts {
 public:
  explicit HostsBoard(const HostsMeeting& meeting)
      : board_(std::make_shared<Board>(meeting)), thread_([board = board_] {
          visit_store(*board);
          const std::lock_guard lock(board->mutex);
          board->lost = board->done = true;
          board->changed.notify_all();
        }) {}

  ~HostsBoard() override {
    std::unique_lock lock(board_->mutex);
    board_->stop = true;
    board_->changed.notify_all();
    // A request to a host that was cut off may take longer; the thread is then left to itself.
    const bool done = board_->changed.wait_for(lock, kConnect * 2, [&] { return board_->done; });
    lock.unlock();
    if (done) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  std::optional<FailureElsewhere> failure() override {
    const std::lock_guard lock(board_->mutex);
    return board_->elsewhere;
  }

  void tell(const FailureElsewhere& failure) override {
    const std::lock_guard lock(board_->mutex);
    board_->own = failure;
    board_->changed.notify_all();
  }

  bool may_leave(bool succeeded) override {
    const std::lock_guard lock(board_->mutex);
    if (!board_->ended) {
      board_->ended = Clock::now();
      board_->changed.notify_all();
    }
    if (board_->done) return true;
    const auto now = Clock::now();
    const auto waited = now - *board_->ended;
    if (!succeeded) return failure_is_known() || tell_limit_is_over(now);
    if (board_->meeting.host != 0) return board_->end_is_told || waited > kEndLimit;
    if (board_->lost) return true;
    if (board_->all_ended || waited <= kLastHostLimit) return board_->all_ended;
    log_warning(
        "lockstep run: not all hosts said that their ranks have ended; the store is closed all "
        "the same");
    return true;
  }

 private:
  bool failure_is_known() const {
    if (!board_->end_is_told || (board_->own && !board_->own_is_told)) return false;
    return board_->meeting.host != 0 || board_->all_informed;
  }

  /// From the first connection on, if that came later than the end.
  bool tell_limit_is_over(Clock::time_point now) {
    if (board_->lost && board_->elsewhere) return true;
    if (board_->connected) {
      const bool waits_for_others = board_->meeting.host == 0 && !board_->all_joined;
      return now - std::max(*board_->ended, *board_->connected) >
             (waits_for_others ? kJoinLimit : kTellLimit);
    }
    if (board_->meeting.host == 0) return now - *board_->ended > kTellLimit;
    if (!says_that_it_waits_ && now - *board_->ended > kTellLimit) {
      says_that_it_waits_ = true;
      log_info(
          "lockstep run: waiting up to 30 s for the launcher of host 0, to tell it of the "
          "failure; Ctrl-C ends the wait");
    }
    return now - *board_->ended > kFirstTellLimit;
  }

  std::shared_ptr<Board> board_;
  std::thread thread_;
  bool says_that_it_waits_ = false;
};

}  // namespace

std::unique_ptr<launch::OtherHosts> make_hosts_board(const HostsMeeting& meeting) {
  return std::make_unique<HostsBoard>(meeting);
}

}  // namespace lockstep::tool
