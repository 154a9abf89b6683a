#include "lockstep/parallel/pipeline/local_link.h"

#include <utility>

namespace lockstep::detail {

void LocalExchange::put(const ParcelId& id, at::Tensor tensor) {
  {
    const std::lock_guard lock(mutex_);
    parcels_[id] = std::move(tensor);
  }
  changed_.notify_all();
}

at::Tensor LocalExchange::get(const ParcelId& id) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failed_ || parcels_.contains(id); });
  if (failed_) throw OtherStageFailed("pipeline: another stage has failed");
  return parcels_.extract(id).mapped();
}

void LocalExchange::fail() {
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
  }
  changed_.notify_all();
}

void LocalExchange::reset() {
  const std::lock_guard lock(mutex_);
  parcels_.clear();
  failed_ = false;
}

void LocalLink::send(const ParcelId& id, const at::Tensor& tensor) {
  at::Tensor sent = tensor.detach();
  if (id.kind == Parcel::activation) {
    if (!tensor.requires_grad()) {
      without_gradient_.insert({Parcel::gradient, id.stage - 1, id.micro_batch});
    } else {
      sent.set_requires_grad(true);
    }
  }
  exchange_.put(id, std::move(sent));
}

at::Tensor LocalLink::take(const ParcelId& id) {
  if (without_gradient_.contains(id)) return {};
  const at::Tensor tensor = exchange_.get(id);
  return tensor.detach().to(device_).set_requires_grad(tensor.requires_grad());
}

}  // namespace lockstep::detail
