#include "lockstep/comm/backends/tensor_work.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <array>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/tensor_checks.h"

namespace lockstep::backends {
namespace {

using Type = c10d::OpType;
/// c10d's names, in the order of Operation.
constexpr std::array kOpTypes{Type::ALLREDUCE,
                              Type::ALLREDUCE_COALESCED,
                              Type::ALLREDUCE,
                              Type::BROADCAST,
                              Type::REDUCE,
                              Type::ALLGATHER,
                              Type::_ALLGATHER_BASE,
                              Type::ALLGATHER_COALESCED,
                              Type::ALLGATHER_COALESCED,
                              Type::GATHER,
                              Type::SCATTER,
                              Type::REDUCE_SCATTER,
                              Type::_REDUCE_SCATTER_BASE,
                              Type::_REDUCE_SCATTER_BASE,
                              Type::ALLTOALL,
                              Type::ALLTOALL_BASE,
                              Type::BARRIER,
                              Type::BARRIER,
                              Type::UNKNOWN,
                              Type::COALESCED,
                              Type::SEND,
                              Type::RECV,
                              Type::RECVANYSOURCE};
static_assert(kOpTypes.size() == static_cast<size_t>(Operation::recv_any) + 1);

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

bool fits(const at::Tensor& tensor, at::ScalarType dtype) {
  return is_plain(tensor) && (dtype == at::ScalarType::Undefined || dtype == tensor.scalar_type());
}

}  // namespace

std::shared_ptr<const GroupNames> names_of(const BackendOptions& options) {
  return std::make_shared<GroupNames>(GroupNames{
      names_or_numbers(options.global_ranks, options.size), options.group_name, options.steps});
}

void write_to(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  // As in plain_copy: a lazy negation and another dtype in one copy are too much for LibTorch.
  to.copy_(to.is_neg() ? from.to(to.scalar_type()) : from);
}

void divide(const at::Tensor& sum, int ranks) {
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  if (at::isIntegralType(sum.scalar_type(), false)) {
    sum.div_(ranks, "trunc");
  } else {
    (sum.is_complex() ? at::view_as_real(sum) : sum).div_(ranks);
  }
}

TensorWork::TensorWork(int rank, Request request, std::shared_ptr<const GroupNames> names)
    : c10d::Work(
          rank, kOpTypes.at(static_cast<size_t>(request.operation)),
          request.title.empty() ? nullptr : request.title.c_str(),
          request.title.empty()
              ? std::nullopt
              : std::make_optional(request.inputs.empty() ? request.outputs : request.inputs)),
      request_(std::move(request)),
      names_(std::move(names)) {}

bool TensorWork::wait(std::chrono::milliseconds timeout) {
  if (!done_.load(std::memory_order_acquire)) {
    std::unique_lock lock(mutex_);
    const auto done = [this] { return completed_; };
    if (timeout == kNoTimeout) {
      cv_.wait(lock, done);  // The call has a time-out of its own.
    } else if (!cv_.wait_for(lock, timeout, done)) {
      throw TimeoutError("rank " + std::to_string(names_->ranks[static_cast<size_t>(rank_)]) +
                         ": " + text() + " is not finished after " + seconds_text(timeout) +
                         "; it goes on");
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void TensorWork::await_end() {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });
}

c10::intrusive_ptr<c10::ivalue::Future> TensorWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future_ = future;
  const bool ended = ended_;
  lock.unlock();
  if (ended) resolve(*future);
  return future;
}

bool TensorWork::end(std::exception_ptr error) {
  if (!error) {
    try {
      finish_results();
      for (const auto& [to, from] : copies_) write_to(to, from);
    } catch (...) {
      error = std::current_exception();
    }
  }
  FlightRecorder::of_process().end(recorded_, error);
  if (const auto end = std::exchange(recordFunctionEndCallback_, nullptr)) end();
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    exception_ = std::move(error);
    if (future_) return true;
  }
  let_go();
  return false;
}

void TensorWork::run_callbacks() {
  // Before those who wait go on: they may ask the future for its value.
  resolve(*future_);
  let_go();
}

void TensorWork::let_go() {
  std::unique_lock lock(mutex_);
  completed_ = true;
  done_.store(true, std::memory_order_release);
  lock.unlock();
  cv_.notify_all();
}

void TensorWork::resolve(c10::ivalue::Future& future) const {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(results()));
  }
}

uint64_t TensorWork::hash() const {
  Hash hash;
  hash.add(static_cast<int64_t>(request_.operation));
  hash.add(request_.reduction);
  hash.add(request_.root);
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

CallSignature TensorWork::signature() const {
  CallSignature call;
  call.operation = request_.operation;
  call.reduction = request_.reduction;
  call.root = request_.root;
  call.sequence = sequence_;
  call.inputs = signatures_of(request_.inputs);
  call.outputs = signatures_of(request_.outputs);
  call.input_splits = request_.input_splits;
  call.output_splits = request_.output_splits;
  call.origin = origin_.text(names_->steps ? names_->steps->load() : 0);
  return call;
}

std::string TensorWork::encoded() const {
  return encode(signature());
}

std::string TensorWork::text() const {
  const CallSignature call = signature();
  return describe(call, names_->ranks) +
         (call.is_message() ? " in" : ", collective " + std::to_string(sequence_) + " of") +
         " group '" + names_->group + "',";
}

at::Tensor TensorWork::given(const at::Tensor& tensor, at::ScalarType dtype) {
  given_bytes_ += tensor.nbytes();
  return fits(tensor, dtype) ? tensor : keep(plain_copy(tensor, dtype));
}

Blocks TensorWork::given(const Tensors& tensors, at::ScalarType dtype) {
  Blocks blocks;
  blocks.reserve(tensors.size());
  for (const auto& tensor : tensors) blocks.push_back(bytes_of(given(tensor, dtype)));
  return blocks;
}

at::Tensor TensorWork::taken(const at::Tensor& tensor, bool reads, at::ScalarType dtype) {
  taken_bytes_ += tensor.nbytes();
  if (fits(tensor, dtype)) return tensor;
  expect_own_elements(request_.operation, tensor);
  if (dtype == at::ScalarType::Undefined) dtype = tensor.scalar_type();
  at::Tensor flat =
      reads ? plain_copy(tensor, dtype) : at::empty(tensor.sizes(), tensor.options().dtype(dtype));
  copies_.emplace_back(tensor, flat);
  return flat;
}

Blocks TensorWork::taken(const Tensors& tensors) {
  Blocks blocks;
  blocks.reserve(tensors.size());
  for (const auto& tensor : tensors) blocks.push_back(bytes_of(taken(tensor, false)));
  return blocks;
}

}  // namespace lockstep::backends
