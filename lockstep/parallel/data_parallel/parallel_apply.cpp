#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/autograd/backward_hook.h"

namespace lockstep::detail {
namespace {

namespace autograd = torch::autograd;

struct GraphPart {
  autograd::edge_list outputs;
  autograd::edge_list starts;
};

struct Graphs : torch::CustomClassHolder {
  std::shared_ptr<ReplicaThreads> threads;
  std::vector<GraphPart> parts;  ///< By replica.
  bool kept = false;             ///< Gradients of gradients come by once more.
};

/// From all replicas' starts to all replicas' outputs, replica after replica.
class JoinedGraphs : public autograd::Function<JoinedGraphs> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* context,
                                         const c10::intrusive_ptr<Graphs>& graphs,
                                         const std::vector<at::Tensor>& outputs, at::TensorList) {
    context->set_materialize_grads(false);
    context->saved_data["graphs"] = c10::IValue::make_capsule(graphs);
    autograd::variable_list joined;
    for (const at::Tensor& output : outputs) joined.push_back(output.detach());
    return joined;
  }

  static autograd::variable_list backward(autograd::AutogradContext* context,
                                          autograd::variable_list gradients) {
    const auto holder = context->saved_data["graphs"].toCapsule();
    auto& graphs = static_cast<Graphs&>(*holder);
    const bool create = c10::GradMode::is_enabled();
    graphs.kept = graphs.kept || create;
    const bool keep = graphs.kept || keeps_graph();
    std::vector<size_t> first(graphs.parts.size());
    for (size_t i = 1; i < first.size(); ++i) {
      first[i] = first[i - 1] + graphs.parts[i - 1].outputs.size();
    }
    std::vector<autograd::variable_list> found(graphs.parts.size());
    graphs.threads->run(graphs.parts.size(), [&](size_t i) {
      found[i] = run_part(graphs.parts[i], &gradients[first[i]], keep, create);
    });
    autograd::variable_list all(2);  // Of `graphs` and `outputs`.
    for (auto& of_part : found) {
      all.insert(all.end(), std::make_move_iterator(of_part.begin()),
                 std::make_move_iterator(of_part.end()));
    }
    return all;
  }

 private:
  static autograd::variable_list run_part(const GraphPart& part, const at::Tensor* gradients,
                                          bool keep, bool create) {
    autograd::edge_list roots;
    autograd::variable_list values;
    for (size_t k = 0; k < part.outputs.size(); ++k) {
      if (!gradients[k].defined()) continue;
      roots.push_back(part.outputs[k]);
      values.push_back(gradients[k]);
    }
    if (roots.empty() || part.starts.empty()) return autograd::variable_list(part.starts.size());
    return autograd::Engine::get_default_engine().execute(roots, values, keep, create,
                                                          /*accumulate_grad=*/false, part.starts);
  }
};

}  // namespace

bool joins_graphs(const ReplicaThreads& threads, size_t replicas) {
  const auto& devices = threads.devices();
  return replicas > 1 && c10::GradMode::is_enabled() &&
         std::all_of(devices.begin(), devices.end(),
                     [](c10::Device device) { return device.is_cpu(); });
}

void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<at::Tensor>>& parameters,
                 std::vector<std::vector<at::Tensor>>& outputs) {
  auto graphs = c10::make_intrusive<Graphs>();
  graphs->threads = threads;
  std::vector<at::Tensor> all_starts, all_outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    GraphPart& part = graphs->parts.emplace_back();
    for (const at::Tensor& parameter : parameters[i]) {
      if (!parameter.requires_grad()) continue;
      const autograd::Edge edge = autograd::impl::gradient_edge(parameter);
      // Once each: a tied parameter's gradient must not come twice.
      if (std::find(part.starts.begin(), part.starts.end(), edge) != part.starts.end()) continue;
      part.starts.push_back(edge);
      all_starts.push_back(parameter);
    }
    for (const at::Tensor& output : outputs[i]) {
      if (!output.requires_grad()) continue;
      part.outputs.push_back(autograd::impl::gradient_edge(output));
      all_outputs.push_back(output);
    }
  }
  if (all_starts.empty() || all_outputs.empty()) return;
  const auto joined = JoinedGraphs::apply(graphs, all_outputs, at::TensorList(all_starts));
  size_t next = 0;
  for (auto& of_replica : outputs) {
    for (at::Tensor& output : of_replica) {
      if (output.requires_grad()) output = joined[next++];
    }
  }
}

}  // namespace lockstep::detail

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
