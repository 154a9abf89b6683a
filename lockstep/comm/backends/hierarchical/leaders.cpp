#include "lockstep/comm/backends/hierarchical/leaders.h"

#include <ATen/ATen.h>

#include <array>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/checks/failure_kind.h"

namespace lockstep::hierarchical {

const HostsBackend& hosts_backend() {
  constexpr const char* kVariable = "LOCKSTEP_HOSTS_BACKEND";
  static const std::array<HostsBackend, 2> kKnown{
      {{"gloo", gloo::kTraits, gloo::make}, {"mpi", mpi::kTraits, mpi::make}}};
  const std::string name = env_string(kVariable).value_or(kKnown[0].name);
  std::vector<std::string> names;
  for (const auto& known : kKnown) {
    if (known.name == name) return known;
    names.push_back(known.name);
  }
  if (name == "hierarchical" || name == "shm" || name == "nccl") {
    throw UsageError("environment variable " + std::string(kVariable) + "='" + name +
                         "': it does not join CPU tensors between hosts",
                     "leave it unset for gloo; for CUDA tensors use --backend nccl, which knows "
                     "hosts by itself");
  }
  throw UsageError("environment variable " + std::string(kVariable) + ": " +
                   unknown_word("backend", name, names));
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
  transfers.clear();
}

}  // namespace lockstep::hierarchical
