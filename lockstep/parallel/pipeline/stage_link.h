#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// What goes between neighbouring stages: an activation to the next one, or the gradient of it back
/// to the one before.
enum class Parcel { activation, gradient };

/// Which parcel: `stage` is the one that receives it.
struct ParcelId {
  Parcel kind;
  int stage;
  int micro_batch;
  auto operator<=>(const ParcelId&) const = default;
  /// The stage that gives or gave the activation.
  int activation_from() const { return kind == Parcel::activation ? stage - 1 : stage; }
};

/// By what two micro-batches are known to have the same shapes everywhere in the pipeline: those of
/// the pipeline's input, and whether a graph is recorded.
using ShapeKey = std::vector<int64_t>;

/// A rank's way to the stages of other ranks. One thread. Nothing but `take` and `finish` blocks.
class StageLink {
 public:
  virtual ~StageLink() = default;
  /// Before a batch: the key of each micro-batch. All ranks give equal ones.
  virtual void begin(std::vector<ShapeKey> keys) {}
  /// `tensor` must not change until `finish`. An activation that requires a gradient will get one.
  /// Of one that does not the gradient is undefined.
  virtual void send(const ParcelId& id, const at::Tensor& tensor) = 0;
  /// Lets a parcel come ahead of `take`.
  virtual void expect(const ParcelId& id) {}
  /// Starts what was sent and expected since the last call, all together.
  virtual void flush() {}
  /// Waits for a parcel. An activation requires a gradient when it did where it came
  /// from. It may lie on the device from which it came.
  virtual at::Tensor take(const ParcelId& id) = 0;
  /// Waits until all that was sent has been taken over.
  virtual void finish() {}
};

/// Stages in processes: sends and receives of a group, of which each rank has every size()-th
/// stage. The shape of an activation is sent ahead of the first one of its key. After that both
/// sides know it, and that of its gradient. Receives of a batch are begun ahead once all shapes are
/// known.
std::unique_ptr<StageLink> make_group_link(ProcessGroup group, c10::Device device);

}  // namespace lockstep::detail
