#include "lockstep/parallel/data_parallel/parallel_apply.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

namespace lockstep {
namespace {

[[noreturn]] void throw_replica_error(size_t replica, c10::Device device,
                                      const std::exception_ptr& failure) {
  std::string message = "an exception that is no std::exception";
  int exit_code = kExitFailure;
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
    exit_code = exit_code_of(error);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the message says it.
  }
  throw ReplicaError(replica, device, message, failure, exit_code);
}

}  // namespace

ReplicaError::ReplicaError(size_t replica, c10::Device device, const std::string& message,
                           std::exception_ptr cause, int exit_code)
    : Error("replica " + std::to_string(replica) + " on device " + device.str() + ": " + message),
      replica_(replica),
      device_(device),
      cause_(std::move(cause)),
      exit_code_(exit_code) {}

namespace detail {

/// What a thread needs for one piece of work.
struct Job {
  const std::function<void(size_t)>* work = nullptr;
  const at::ThreadLocalState* state = nullptr;
  std::optional<c10::Stream> stream;  ///< The caller's current one; none on the CPU.
};

struct ReplicaThreads::Impl {
  std::vector<c10::Device> devices;
  int threads_each = 1;

  std::mutex run_mutex;  ///< Held by the one caller whose work is done.
  std::mutex mutex;      ///< Guards what follows.
  std::condition_variable work_came, work_done;
  std::vector<std::optional<Job>> jobs;  ///< By replica; none when it is done.
  std::vector<std::exception_ptr> failures;
  size_t open = 0;  ///< Jobs that are not done yet.
  bool ending = false;
  std::vector<std::thread> threads;

  void loop(size_t replica) {
    if (devices[replica].is_cpu()) {
      at::get_num_threads();  // A thread's first look at its number sets it to the last one set.
      at::set_num_threads(threads_each);
    }
    std::unique_lock lock(mutex);
    finish_one();  // The constructor waits for all threads to have set their number.
    while (true) {
      work_came.wait(lock, [&] { return ending || jobs[replica]; });
      if (ending) return;
      const Job job = *std::exchange(jobs[replica], std::nullopt);
      lock.unlock();
      std::exception_ptr failure = do_job(replica, job);
      lock.lock();
      failures[replica] = std::move(failure);
      finish_one();
    }
  }

  void finish_one() {
    if (--open == 0) work_done.notify_all();
  }

  std::exception_ptr do_job(size_t replica, const Job& job) const {
    try {
      const at::ThreadLocalStateGuard state(*job.state);
      std::optional<c10::StreamGuard> stream;
      if (job.stream) stream.emplace(*job.stream);
      (*job.work)(replica);
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
};

ReplicaThreads::ReplicaThreads(std::vector<c10::Device> devices, int threads_each)
    : impl_(std::make_unique<Impl>()) {
  const size_t count = devices.size();
  const int callers = at::get_num_threads();
  impl_->threads_each =
      threads_each > 0 ? threads_each : std::max(1, callers / static_cast<int>(count));
  impl_->devices = std::move(devices);
  impl_->jobs.resize(count);
  impl_->failures.resize(count);
  impl_->open = count;
  for (size_t i = 0; i < count; ++i) impl_->threads.emplace_back([this, i] { impl_->loop(i); });
  std::unique_lock lock(impl_->mutex);
  impl_->work_done.wait(lock, [&] { return impl_->open == 0; });
  // The last number that any thread has set is the one with which new threads start.
  at::set_num_threads(callers);
}

ReplicaThreads::~ReplicaThreads() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->ending = true;
  }
  impl_->work_came.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

const std::vector<c10::Device>& ReplicaThreads::devices() const {
  return impl_->devices;
}

int ReplicaThreads::threads_each() const {
  return impl_->threads_each;
}

void ReplicaThreads::run(size_t count, const std::function<void(size_t)>& work) {
  const std::lock_guard one_caller(impl_->run_mutex);
  const at::ThreadLocalState state;
  std::unique_lock lock(impl_->mutex);
  for (size_t i = 0; i < count; ++i) {
    Job job{&work, &state, std::nullopt};
    const c10::Device device = impl_->devices[i];
    if (!device.is_cpu()) {
      job.stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    }
    impl_->jobs[i] = job;
  }
  impl_->open = count;
  impl_->work_came.notify_all();
  impl_->work_done.wait(lock, [&] { return impl_->open == 0; });
  std::vector<std::exception_ptr> failures(impl_->failures.size());
  failures.swap(impl_->failures);
  lock.unlock();
  for (size_t i = 0; i < count; ++i) {
    if (failures[i]) throw_replica_error(i, impl_->devices[i], failures[i]);
  }
}

}  // namespace detail
}  // namespace lockstep
