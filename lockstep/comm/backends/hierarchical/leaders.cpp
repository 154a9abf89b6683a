#include "lockstep/comm/backends/hierarchical/leaders.h"

#include <ATen/ATen.h>

#include <climits>

#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep::hierarchical {
namespace {

/// Of messages in the flat group that are no program's; the one above is host_exchange's.
constexpr int kLeadersTag = INT_MAX - 2;

}  // namespace

void Leaders::post(bool sends, int host, std::byte* data, size_t bytes, Transfers& transfers) {
  if (bytes == 0) return;
  std::vector<at::Tensor> tensors{at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
  try {
    const int rank = ranks_[static_cast<size_t>(host)];
    auto work = sends ? backend_->send(tensors, rank, kLeadersTag)
                      : backend_->recv(tensors, rank, kLeadersTag);
    transfers.push_back({std::move(work), host});
  } catch (const std::exception&) {
    throw HostFailure{Kind::lost, host, failure_text(std::current_exception())};
  }
}

void Leaders::finish(Transfers& transfers, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    deadline_.emplace(timeout);
  }
  for (const auto& transfer : transfers) {
    awaited_ = transfer.host;
    wait(transfer);
  }
  awaited_ = -1;  // After a failure it stays: nothing of the group is awaited any more.
  transfers.clear();
}

void Leaders::wait(const Transfer& transfer) {
  /// Longer than any deadline. A wait without a time-out would be given the group's by Gloo.
  constexpr std::chrono::hours kWithoutEnd{24 * 365};
  {
    const std::lock_guard lock(mutex_);
    if (interrupted_) throw HostFailure{Kind::failed_elsewhere, transfer.host, {}};
    current_ = transfer.work.get();
    ended_.reset();
  }
  std::string error;
  bool finished = false;
  try {
    finished = transfer.work->wait(kWithoutEnd);
  } catch (const std::exception&) {
    error = failure_text(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  current_ = nullptr;
  if (!finished) throw HostFailure{ended_.value_or(Kind::lost), transfer.host, error};
}

// Under the lock: the waiting thread cannot let go of the work before.
void Leaders::look() {
  const std::lock_guard lock(mutex_);
  if (!current_ || ended_ || !deadline_->passed()) return;
  ended_ = Kind::late;
  current_->abort();
}

void Leaders::interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (!current_) return;
  ended_ = Kind::failed_elsewhere;
  current_->abort();
}

}  // namespace lockstep::hierarchical
