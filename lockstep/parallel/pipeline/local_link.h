#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/parallel/pipeline/stage_link.h"

namespace lockstep::detail {

/// Another stage has failed, which ends the wait for it. Its own error says why.
class OtherStageFailed : public Error {
 public:
  using Error::Error;
};

/// Where the threads of one process hand parcels to each other. Any thread.
class LocalExchange {
 public:
  void put(const ParcelId& id, at::Tensor tensor);
  /// Blocks until it has been put. Throws OtherStageFailed after `fail`.
  at::Tensor get(const ParcelId& id);
  void fail();
  /// Before a batch: forgets what is left of one that failed.
  void reset();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<ParcelId, at::Tensor> parcels_;
  bool failed_ = false;
};

/// Stages in threads of one process.
class LocalLink final : public StageLink {
 public:
  LocalLink(LocalExchange& exchange, c10::Device device) : exchange_(exchange), device_(device) {}

  void begin(std::vector<ShapeKey>) override { without_gradient_.clear(); }
  void send(const ParcelId& id, const at::Tensor& tensor) override;
  void expect(const ParcelId&) override {}
  void flush() override {}
  at::Tensor take(const ParcelId& id) override;
  void finish() override {}

 private:
  LocalExchange& exchange_;
  c10::Device device_;
  std::set<ParcelId> without_gradient_;  ///< Gradients that will not come.
};

}  // namespace lockstep::detail
