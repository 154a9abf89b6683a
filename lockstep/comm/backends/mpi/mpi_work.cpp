#include "lockstep/comm/backends/mpi/mpi_work.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/op_type.h"

namespace lockstep::mpi {
namespace {

constexpr size_t kAtOnce = 4;

}  // namespace

MpiWork::MpiWork(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group,
                 Description description)
    : c10d::Work(group->rank, backends::op_type(description.operation)),
      engine_(std::move(engine)),
      group_(std::move(group)),
      description_(std::move(description)) {}

MpiWork::~MpiWork() = default;

bool MpiWork::isCompleted() {
  return completed();
}

bool MpiWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr MpiWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  if (!completed()) {
    const Engine::Waiter waiter(*engine_);
    if (engine_->is_mpi_thread()) {
      engine_->progress_until([this] { return completed(); });
    } else {
      std::unique_lock lock(mutex_);
      const auto done = [this] { return completed_; };
      if (timeout == kNoTimeout) {
        cv_.wait(lock, done);  // The call has a time-out of its own.
      } else if (!cv_.wait_for(lock, timeout, done)) {
        throw TimeoutError(text() + " is not finished after " + seconds_text(timeout) +
                           "; it goes on");
      }
    }
  }
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future_ = future;
  const bool done = ended_;
  lock.unlock();
  if (done) resolve(*future);
  return future;
}

at::Tensor MpiWork::given(const at::Tensor& tensor, at::ScalarType dtype) {
  kept_.push_back(tensor.to(dtype).contiguous());
  return kept_.back();
}

at::Tensor MpiWork::taken(const at::Tensor& tensor, at::ScalarType dtype, bool reads) {
  if (tensor.is_contiguous() && tensor.scalar_type() == dtype) {
    kept_.push_back(tensor);
    return tensor;
  }
  at::Tensor flat = reads ? tensor.to(dtype).contiguous()
                          : at::empty(tensor.sizes(), tensor.options().dtype(dtype));
  copies_.emplace_back(tensor, flat);
  return flat;
}

at::Tensor MpiWork::fresh(at::IntArrayRef shape, const at::TensorOptions& options) {
  kept_.push_back(at::empty(shape, options));
  return kept_.back();
}

void MpiWork::add(const char* call, Start start) {
  starts_.emplace_back(call, std::move(start));
}

void MpiWork::start() {
  while (!all_started() && requests_.size() < kAtOnce) {
    auto& [call, start] = starts_[next_++];
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = start(group_->communicator, &request);
    if (request != MPI_REQUEST_NULL) requests_.push_back(request);
    check(code, call);
  }
}

MpiWork::Progress MpiWork::test() {
  bool some = false;
  for (auto request = requests_.begin(); request != requests_.end();) {
    int done = 0;
    MPI_Status status;
    const int code = MPI_Test(&*request, &done, &status);
    if (code != MPI_SUCCESS) throw_failure(code);
    if (!done) {
      ++request;
      continue;
    }
    some = true;
    request = requests_.erase(request);
    receive_status(status);
  }
  if (some) start();
  if (requests_.empty() && all_started()) return Progress::done;
  return some ? Progress::some : Progress::none;
}

bool MpiWork::drained() {
  for (auto request = requests_.begin(); request != requests_.end();) {
    int done = 0;
    const int code = MPI_Test(&*request, &done, MPI_STATUS_IGNORE);
    request = code != MPI_SUCCESS || done ? requests_.erase(request) : request + 1;
  }
  return requests_.empty();
}

void MpiWork::receive_status(const MPI_Status& status) {
  if (expected_ < 0) return;
  int elements = 0;
  check(MPI_Get_count(&status, expected_type_, &elements), "MPI_Get_count");
  source_ = status.MPI_SOURCE;
  if (elements == expected_) return;
  throw MismatchError(text() + " got " +
                      (elements == MPI_UNDEFINED ? "a part of an element"
                                                 : std::to_string(elements) + " elements") +
                      " from " + rank_list({status.MPI_SOURCE}, group_->world_ranks) +
                      ", expected " + std::to_string(expected_));
}

void MpiWork::throw_failure(int code) const {
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  if (kind == MPI_ERR_TRUNCATE) {
    throw MismatchError(
        text() + " got more data than fits its tensor, expected " +
        (expected_ < 0 ? "what the others were to send" : std::to_string(expected_) + " elements"));
  }
  check(code, text().c_str());
  throw CommError(text() + " failed without a reason");
}

void MpiWork::cancel() {
  next_ = starts_.size();
  if (description_.operation != Operation::recv && description_.operation != Operation::recv_any)
    return;
  for (auto& request : requests_) {
    if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
  }
  expected_ = -1;
}

void MpiWork::release() noexcept {
  for (auto& type : types_) MPI_Type_free(&type);
  types_.clear();
  requests_.clear();
  starts_.clear();
  next_ = 0;
}

void MpiWork::complete(std::exception_ptr error) {
  if (!error) {
    try {
      for (const auto& step : steps_) step();
      for (auto& [to, from] : copies_) to.copy_(from);
    } catch (...) {
      error = std::current_exception();
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    exception_ = error;
    future = future_;
  }
  // Before those who wait go on: they may ask the future for its value.
  if (future) resolve(*future);
  {
    const std::lock_guard lock(mutex_);
    completed_ = true;
    done_.store(true, std::memory_order_release);
  }
  cv_.notify_all();
}

void MpiWork::resolve(c10::ivalue::Future& future) const {
  if (const auto error = exception()) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(description_.results));
  }
}

std::string MpiWork::text() const {
  const std::string name(operation_name(description_.operation));
  if (!is_collective()) return name + " in group '" + group_->name + "'";
  return name + ", collective " + std::to_string(description_.sequence) + " of group '" +
         group_->name + "',";
}

}  // namespace lockstep::mpi
