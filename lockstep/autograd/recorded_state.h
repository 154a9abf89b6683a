#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

/// What a function's numbers depend on besides its inputs: the generators of random numbers, and
/// autocast. `record` notes both for this thread. While a Replay lives they are as they were noted.
class RecordedState {
 public:
  /// Generators of the CPU and of the CUDA devices given; none without `random`.
  static RecordedState record(const std::vector<c10::Device>& devices, bool random);

  class Replay {
   public:
    explicit Replay(const RecordedState& state);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

   private:
    std::unique_ptr<RecordedState> before_;
  };

 private:
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  void apply() const;

  std::vector<std::pair<c10::Device, at::Tensor>> generators_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_ = true;
};

}  // namespace lockstep
