#include "lockstep/comm/backends/mpi/mpi_engine.h"

#include <dlfcn.h>
#include <sys/prctl.h>

#include <cstdlib>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/backends/mpi/mpi_work.h"

namespace lockstep::mpi {
namespace {

/// How long a rank that has failed waits for the thread, which may be within a call of MPI.
constexpr std::chrono::milliseconds kAbortPatience{300};

/// MPI starts once in a process, so what knows of it is the process's too. Never destroyed: at the
/// end of the process nobody may wait for other ranks any more.
struct Slot {
  std::mutex mutex;
  std::shared_ptr<Engine> engine;
  bool used = false;  ///< MPI has been started here.
  MPI_Comm given = MPI_COMM_NULL;
};
Slot& slot() {
  static auto* const only = new Slot;
  return *only;
}

bool started_by_a_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
    if (env_string(name)) return true;
  }
  return false;
}

[[noreturn]] void throw_elsewhere(int rank, int size, int mpi_rank, int mpi_size) {
  throw UsageError("MPI says that this process is rank " + std::to_string(mpi_rank) + " of " +
                       std::to_string(mpi_size) + ", but its launcher's variables say rank " +
                       std::to_string(rank) + " of " + std::to_string(size),
                   "mpirun must be that of the MPI that Lockstep is linked with (" + version() +
                       "), and start the ranks itself, not by another launcher. Without MPI: set "
                       "MASTER_ADDR and MASTER_PORT and use another backend");
}

/// Before MPI starts, which would hang or end a process that is not a rank of mpirun's.
void check_launcher(int rank, int size) {
  if (size > 1 && !started_by_a_launcher()) {
    throw UsageError("MPI: this process, rank " + std::to_string(rank) + " of " +
                         std::to_string(size) + ", was not started by mpirun",
                     "mpirun -np " + std::to_string(size) +
                         " PROGRAM ... (in place of `lockstep run`, torchrun or --devices), or "
                         "another backend: --backend auto");
  }
  const auto mpi_rank = env_int("OMPI_COMM_WORLD_RANK"), mpi_size = env_int("OMPI_COMM_WORLD_SIZE");
  if (mpi_rank && mpi_size && (*mpi_rank != rank || *mpi_size < size)) {
    throw_elsewhere(rank, size, static_cast<int>(*mpi_rank), static_cast<int>(*mpi_size));
  }
}

/// Open MPI opens components of its own, some of which take its symbols from the global scope. They
/// are not there where a program has loaded us by dlopen(RTLD_LOCAL).
void make_symbols_global() {
  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &library) == 0 || !library.dli_fname)
    return;
  dlopen(library.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  throw CommError(std::string(call) + ": " +
                  (length > 0 ? std::string(text, static_cast<size_t>(length))
                              : "MPI's error " + std::to_string(code)));
}

std::string version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "an MPI of unknown version";
  // "Open MPI v4.1.4, package: ...", and with others a first line.
  std::string all(text, static_cast<size_t>(length));
  all = all.substr(0, all.find_first_of(",\n"));
  const auto v = all.find(" v");
  if (v != std::string::npos) all.erase(v + 1, 1);
  return all;
}

std::shared_ptr<Engine> Engine::get(int rank, int size) {
  Slot& own = slot();
  const std::lock_guard lock(own.mutex);
  if (!own.engine) {
    const bool given = own.given != MPI_COMM_NULL;
    if (own.used && !given) {
      throw CommError("MPI has ended in this process and cannot start again",
                      "keep the World that uses it until the last communication");
    }
    if (!given) check_launcher(rank, size);
    auto engine = std::make_shared<Engine>();
    if (given) engine->world_ = own.given;
    own.used = own.used || !given;
    engine->start();
    own.engine = std::move(engine);
  }
  const int mpi_rank = own.engine->rank(), mpi_size = own.engine->size();
  if (rank != mpi_rank || size > mpi_size) throw_elsewhere(rank, size, mpi_rank, mpi_size);
  return own.engine;
}

MPI_Comm Engine::give(MPI_Comm communicator) {
  const std::lock_guard lock(slot().mutex);
  return std::exchange(slot().given, communicator);
}

MPI_Comm Engine::given() {
  const std::lock_guard lock(slot().mutex);
  return slot().given;
}

std::shared_ptr<Engine> Engine::running() {
  const std::lock_guard lock(slot().mutex);
  return slot().engine;
}

Engine::~Engine() {
  if (thread_.joinable()) thread_.detach();
}

void Engine::start() {
  make_symbols_global();
  // A process of its own needs no daemon beside it.
  if (!started_by_a_launcher()) ::setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
  std::promise<void> started;
  auto outcome = started.get_future();
  thread_ = std::thread([self = shared_from_this(), started = std::move(started)]() mutable {
    self->run_thread(started);
  });
  outcome.get();
}

void Engine::run_thread(std::promise<void>& started) {
  thread_id_ = std::this_thread::get_id();
  ::prctl(PR_SET_NAME, "lockstep-mpi");
  ::prctl(PR_SET_TIMERSLACK, 1);  // Its naps are short.
  try {
    start_mpi();
  } catch (...) {
    return started.set_exception(std::current_exception());
  }
  started.set_value();
  last_event_ = next_look_ = Clock::now();
  while (!finished()) {
    pass();
    pause();
  }
  end_mpi();
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
}

void expect_thread_multiple() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Query_thread(&level), "MPI_Query_thread");
  if (level >= MPI_THREAD_MULTIPLE) return;
  throw UsageError("the program has started MPI without MPI_THREAD_MULTIPLE",
                   "leave the start of MPI to Lockstep, or call MPI_Init_thread with it");
}

void Engine::start_mpi() {
  int running = 0, ended = 0, level = MPI_THREAD_SINGLE;
  check(MPI_Initialized(&running), "MPI_Initialized");
  check(MPI_Finalized(&ended), "MPI_Finalized");
  if (ended) throw CommError("MPI has ended in this process already");
  owns_mpi_ = !running;
  if (running) {
    expect_thread_multiple();
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
  }
  check(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(world_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(world_, &size_), "MPI_Comm_size");
  int* bound = nullptr;
  int known = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound), &known),
        "MPI_Comm_get_attr");
  if (known) largest_tag_ = *bound;
}

void Engine::end_mpi() {
  if (!owns_mpi_ || give_up_) return;
  if (!abandoned_.empty()) {
    log_warning("MPI is left without MPI_Finalize: " + abandoned_.front()->text() +
                " has not ended");
    return;
  }
  if (const int code = MPI_Finalize(); code != MPI_SUCCESS)
    log_warning("MPI_Finalize failed with " + std::to_string(code));
}

void Engine::add_command(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) throw CommError("MPI has ended in this process");
    commands_.push_back(std::move(command));
    has_commands_ = true;
  }
  changed_.notify_all();
}

void Engine::run(std::function<void()> task, std::chrono::milliseconds timeout,
                 const std::string& what) {
  auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  auto done = packaged->get_future();
  add_command([packaged] { (*packaged)(); });
  const Waiter waiter(*this);
  if (is_mpi_thread()) {
    progress_until(
        [&] { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  } else if (done.wait_for(timeout) != std::future_status::ready) {
    throw TimeoutError(what + " timed out after " + seconds_text(timeout), "did every rank start?");
  }
  done.get();
}

void Engine::submit(WorkPtr work) {
  work->deadline = Clock::now() + work->request().timeout;
  add_command([this, work = std::move(work)] { issue(work); });
}

void Engine::end(bool failing) noexcept {
  {
    Slot& own = slot();
    const std::lock_guard lock(own.mutex);
    if (own.engine.get() == this) own.engine.reset();
  }
  if (failing) give_up_ = true;
  std::unique_lock lock(mutex_);
  stop_ = true;
  changed_.notify_all();
  const auto ended = [this] { return ended_; };
  if (give_up_) {
    changed_.wait_for(lock, kAbortPatience, ended);
  } else {
    changed_.wait(lock, ended);
  }
  if (!ended_ || !thread_.joinable()) return;
  lock.unlock();
  thread_.join();
}

}  // namespace lockstep::mpi
