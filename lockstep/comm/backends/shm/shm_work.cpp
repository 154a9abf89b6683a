#include "lockstep/comm/backends/shm/shm_work.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/op_type.h"

namespace lockstep::shm {
namespace {

using Tensors = std::vector<at::Tensor>;

class Hash {
 public:
  void add(int64_t value) {
    state_ = (state_ ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15U;
    state_ ^= state_ >> 32;
  }
  void add(const at::Tensor& tensor) {
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) add(size);
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x51ED270B;
};

}  // namespace

ShmWork::ShmWork(int rank, Request request, std::shared_ptr<const GroupNames> names,
                 std::chrono::milliseconds timeout)
    : c10d::Work(rank, backends::op_type(request.operation)),
      request_(std::move(request)),
      names_(std::move(names)),
      timeout_(timeout) {}

bool ShmWork::isCompleted() {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool ShmWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr ShmWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto done = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, done);  // The call has a time-out of its own.
  } else if (!cv_.wait_for(lock, timeout, done)) {
    throw TimeoutError("rank " + std::to_string(names_->ranks[static_cast<size_t>(rank_)]) + ": " +
                       text() + " is not finished after " + seconds_text(timeout) + "; it goes on");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void ShmWork::await_end() {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future_ = future;
  const bool done = ended_;
  lock.unlock();
  if (done) resolve(*future);
  return future;
}

void ShmWork::complete(std::exception_ptr error) {
  if (!error) {
    try {
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
  }
  cv_.notify_all();
}

void ShmWork::resolve(c10::ivalue::Future& future) const {
  if (const auto error = exception()) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(results()));
  }
}

// What all ranks must have in common, by operation. How much passes between two ranks of an
// all_to_all its plan compares.
uint64_t ShmWork::hash() const {
  Hash hash;
  hash.add(static_cast<int64_t>(request_.operation));
  hash.add(request_.reduction);
  hash.add(request_.root);
  if (request_.place) {
    hash.add(static_cast<int64_t>(request_.place->number));
    hash.add(static_cast<int64_t>(request_.place->offset));
  }
  switch (request_.operation) {
    case Operation::scatter:
    case Operation::reduce_scatter:
      for (const auto& tensor : request_.outputs) hash.add(tensor);
      break;
    case Operation::all_to_all:
      hash.add(static_cast<int64_t>(request_.inputs.at(0).scalar_type()));
      break;
    case Operation::all_to_all_single: {
      const at::Tensor& input = request_.inputs[0];
      hash.add(static_cast<int64_t>(input.scalar_type()));
      for (int64_t dim = 1; dim < input.dim(); ++dim) hash.add(input.size(dim));
      break;
    }
    default:
      hash.add(static_cast<int64_t>(request_.inputs.size()));
      for (const auto& tensor : request_.inputs) hash.add(tensor);
  }
  return hash.value();
}

CallSignature ShmWork::signature() const {
  CallSignature call;
  call.operation = request_.operation;
  call.reduction = request_.reduction;
  call.root = request_.root;
  call.sequence = sequence_;
  call.inputs = signatures_of(request_.inputs);
  call.outputs = signatures_of(request_.outputs);
  call.input_splits = request_.input_splits;
  call.output_splits = request_.output_splits;
  return call;
}

std::string ShmWork::encoded() const {
  return encode(signature());
}

std::string ShmWork::text() const {
  return describe(signature(), names_->ranks) + ", collective " + std::to_string(sequence_) +
         " of group '" + names_->group + "',";
}

at::Tensor ShmWork::given(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  kept_.push_back(tensor.contiguous());
  return kept_.back();
}

at::Tensor ShmWork::taken(const at::Tensor& tensor, bool reads) {
  if (tensor.is_contiguous()) return tensor;
  at::Tensor flat = reads ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
  copies_.emplace_back(tensor, flat);
  return flat;
}

}  // namespace lockstep::shm
