#pragma once

#include <c10/util/intrusive_ptr.h>

// The C++ bindings are gone from the standard. Their header would only cost time.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::mpi {

class MpiWork;

/// Throws CommError with MPI's own text unless `code` is MPI_SUCCESS. `call`: the MPI function.
void check(int code, const char* call);

/// Throws UsageError where the program has started MPI with a lower level: the engine's thread is
/// none of the program's.
void expect_thread_multiple();

/// The ranks of one backend and their communicator.
struct Group {
  std::string name;
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;         ///< In Engine::world(), by rank of the group.
  std::vector<std::string> identities;  ///< See process_identity.h, by rank of the group.

  // Touched by the MPI thread alone:
  MPI_Comm communicator = MPI_COMM_NULL;
  std::string failure;  ///< Not empty: a collective has failed, so the ranks are out of step.
  /// The collectives whose operations are still to start: one entry for each. The ranks must start
  /// a communicator's operations in the same order.
  std::deque<c10::intrusive_ptr<MpiWork>> queue;
  size_t under_way = 0;  ///< Requests of collectives.
};

/// The thread that makes all calls of MPI in this process, from MPI_Init_thread to MPI_Finalize.
///
/// Why one thread and not MPI_THREAD_MULTIPLE: MPI has no call that waits with a time-out, so
/// something has to poll anyway. With one caller the order of collectives on a communicator is the
/// order of `submit`, on any MPI (MPI_THREAD_FUNNELED is enough). All that is started is
/// non-blocking, so groups never wait for one another, in whatever order they are called.
///
/// It polls eagerly while someone waits for a result, and in naps while nobody does. It ticks
/// slowly when nothing is under way: what MPI took as sent may still need its progress.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  /// The process's engine, started with the first call. Throws UsageError where this process is not
  /// rank `rank` of at least `size` ranks of one mpirun. Throws CommError where MPI does not start
  /// or has ended already.
  static std::shared_ptr<Engine> get(int rank, int size);
  /// The engine if it has been started and has not ended.
  static std::shared_ptr<Engine> running();
  /// The communicator of a program that runs MPI itself: engines started from now on take it in
  /// place of MPI_COMM_WORLD. MPI_COMM_NULL: none. Gives the former one.
  static MPI_Comm give(MPI_Comm communicator);
  static MPI_Comm given();

  Engine() = default;
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// All ranks of the job.
  MPI_Comm world() const { return world_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int largest_tag() const { return largest_tag_; }

  /// Runs `task` on the MPI thread and waits for its end. Rethrows what it throws. Throws
  /// TimeoutError when it takes longer. The task may then still run.
  void run(std::function<void()> task, std::chrono::milliseconds timeout, const std::string& what);
  /// Starts the work after all that were submitted before. Its time-out runs from now.
  void submit(c10::intrusive_ptr<MpiWork> work);
  /// Waits until all works of the group have ended, at most `patience`, and frees its communicator.
  /// `abort`: fails them. Nothing where MPI has ended already.
  void retire(const std::shared_ptr<Group>& group, bool abort, std::chrono::milliseconds patience);

  bool is_mpi_thread() const { return std::this_thread::get_id() == thread_id_; }
  /// On the MPI thread, for a callback that waits for another work: goes on working until then.
  void progress_until(const std::function<bool()>& done);

  /// Someone waits for a result, as long as it lives.
  class Waiter {
   public:
    explicit Waiter(Engine& engine) : engine_(engine) { ++engine_.waiters_; }
    ~Waiter() { --engine_.waiters_; }

   private:
    Engine& engine_;
  };

  /// Ends MPI: waits for the works under way and calls MPI_Finalize, unless `failing` or what has
  /// run into its time-out is still under way. Idempotent.
  void end(bool failing) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  using WorkPtr = c10::intrusive_ptr<MpiWork>;

  void start();
  /// `started`: when MPI has started, or failed to.
  void run_thread(std::promise<void>& started);
  void add_command(std::function<void()> command);
  void start_mpi();
  void end_mpi();
  void pass();
  bool take_command();
  void issue(const WorkPtr& work);
  void start_queued(Group& group);
  void poll_works();
  bool poll(const WorkPtr& work, Clock::time_point now);
  void look_for_dead();
  void fail_group(Group& group, const std::string& reason);
  void give_up(const WorkPtr& work, std::exception_ptr error);
  void pause();
  bool finished();

  MPI_Comm world_ = MPI_COMM_WORLD;
  int rank_ = 0;
  int size_ = 1;
  int largest_tag_ = 32767;
  bool owns_mpi_ = true;  ///< False: the program had started MPI itself.
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_{};
  std::atomic<int> waiters_{0};
  std::atomic<bool> give_up_{false};

  std::mutex mutex_;
  std::condition_variable changed_;  ///< Commands for the thread, or its end.
  std::deque<std::function<void()>> commands_;
  std::atomic<bool> has_commands_{false};
  bool stop_ = false;
  bool ended_ = false;  ///< The thread makes no more calls.

  // Of the MPI thread alone:
  std::vector<WorkPtr> active_;
  std::vector<WorkPtr> abandoned_;
  Clock::time_point last_event_;
  Clock::time_point next_look_;
};

}  // namespace lockstep::mpi
