#include "lockstep/comm/backends/hierarchical/leaders.h"

#include <ATen/ATen.h>

#include "lockstep/base/settings.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep::hierarchical {

const HostsBackend& hosts_backend() {
  static const HostsBackend kGloo{"gloo", gloo::kTraits, gloo::make};
  static const HostsBackend kMpi{"mpi", mpi::kTraits, mpi::make};
  return hosts_backend_setting() == kMpi.name ? kMpi : kGloo;
}

void Leaders::post(bool sends, int host, std::byte* data, size_t bytes, Transfers& transfers) {
  if (bytes == 0) return;
  std::vector<at::Tensor> tensors{at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
  try {
    const int peer = ranks_[static_cast<size_t>(host)];
    auto work = sends ? backend_->send(tensors, peer, 0) : backend_->recv(tensors, peer, 0);
    transfers.push_back({std::move(work), host});
  } catch (const std::exception&) {
    throw HostFailure{HostFailure::Kind::lost, host, failure_text(std::current_exception())};
  }
}

void Leaders::finish(Transfers& transfers, Clock::time_point deadline) {
  for (auto& transfer : transfers) {
    TransferWait::End end = TransferWait::End::done;
    awaited_ = transfer.host;
    try {
      end =
          ends_waits_ ? wait_.wait(*transfer.work, deadline) : wait_.poll(*transfer.work, deadline);
    } catch (const std::exception&) {
      throw HostFailure{HostFailure::Kind::lost, transfer.host,
                        failure_text(std::current_exception())};
    }
    if (end == TransferWait::End::done) continue;
    throw HostFailure{end == TransferWait::End::late ? HostFailure::Kind::late
                                                     : HostFailure::Kind::failed_elsewhere,
                      transfer.host,
                      {}};
  }
  awaited_ = -1;  // After a failure it stays: nothing of the group is awaited any more.
  transfers.clear();
}

}  // namespace lockstep::hierarchical
