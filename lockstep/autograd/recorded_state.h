#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

/// While it lives, what is recorded on this thread also has a guard of some other room: one that
/// changes what operations do. `enter` makes such a guard anew, on the thread that replays.
class RecordedGuard {
 public:
  using Enter = std::function<std::shared_ptr<void>()>;
  explicit RecordedGuard(Enter enter);
  ~RecordedGuard();
  RecordedGuard(const RecordedGuard&) = delete;
  RecordedGuard& operator=(const RecordedGuard&) = delete;

  /// Those of this thread, the outermost first.
  static std::vector<Enter> all();

 private:
  Enter enter_;
  const RecordedGuard* outer_;
};

/// What a function's numbers depend on besides its inputs: the generators of random numbers,
/// autocast, and RecordedGuards. `record` notes them for this thread. While a Replay lives they are
/// as they were noted.
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
    std::vector<std::shared_ptr<void>> guards_;
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
  std::vector<RecordedGuard::Enter> guards_;
};

}  // namespace lockstep
