#include "lockstep/comm/backends/mpi/mpi_work.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::mpi {

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  const Engine::Waiter waiter(*engine_);
  if (engine_->is_mpi_thread()) engine_->progress_until([this] { return isCompleted(); });
  return TensorWork::wait(timeout);
}

size_t MpiWork::start_next() {
  const size_t before = requests_.size();
  auto& [call, start] = starts_.at(next_++);
  const int code = start(group_->communicator, requests_);
  std::erase(requests_, MPI_REQUEST_NULL);
  check(code, call);
  return requests_.size() - before;
}

size_t MpiWork::test() {
  size_t ended = 0;
  for (auto request = requests_.begin(); request != requests_.end();) {
    int done = 0;
    MPI_Status status;
    const int code = MPI_Test(&*request, &done, &status);
    if (code == MPI_SUCCESS && !done) {
      ++request;
      continue;
    }
    ++ended;
    request = requests_.erase(request);
    if (code != MPI_SUCCESS) throw_failure(code);
    receive_status(status);
  }
  return ended;
}

bool MpiWork::drained() {
  try {
    test();
  } catch (const Error&) {  // It has failed already.
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
  const Operation operation = request().operation;
  if (operation != Operation::recv && operation != Operation::recv_any) return;
  for (auto& request : requests_) {
    if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
  }
  expected_ = -1;
}

}  // namespace lockstep::mpi
