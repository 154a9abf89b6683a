#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/zero/partition.h"

namespace lockstep::detail {

/// Parameters of which each rank of a group updates its own part. They are moved into flat memory,
/// in which the parts of a rank lie side by side, and stay the same tensors. One thread at a time.
class ParameterShards {
 public:
  /// Moves the parameters that the layout has. Not a collective.
  ParameterShards(std::vector<at::Tensor> parameters, ShardLayout layout, ProcessGroup group);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const ShardLayout& layout() const { return layout_; }
  const ProcessGroup& group() const { return group_; }
  /// Whether the layout has the parameter: it is one of those that are trained.
  bool has(size_t parameter) const { return place_[parameter].bucket != kNone; }
  /// What the rank updates of the parameter. Empty where that is nothing.
  Part part(int rank, size_t parameter) const;
  /// This rank's part of each parameter: the memory of the parameters, without autograd. A whole
  /// parameter has its own shape, a part of one is a vector, and nothing has no elements.
  const std::vector<at::Tensor>& parts() const { return parts_; }
  /// This rank's part of a tensor of the parameter's shape, in the shape of `parts()`. Shares its
  /// memory where that has the parameter's order.
  at::Tensor cut(size_t parameter, const at::Tensor& tensor) const;
  /// Takes the values of parameters that were given other memory (set_data, torch::load) into the
  /// flat one, where they lie from then on. Gives their indices. Throws UsageError for one of
  /// another shape or dtype; `what` begins it.
  std::vector<size_t> take_values(const std::string& what);
  /// Gives every rank the values of all parts. A collective.
  void share();
  /// The same for some parameters. What it returns must be waited for.
  [[nodiscard]] std::vector<Work> share(const std::vector<size_t>& parameters);

 private:
  static constexpr size_t kNone = SIZE_MAX;
  struct Place {
    size_t bucket = kNone;
    int64_t offset = 0;
  };

  void move(size_t bucket);

  std::vector<at::Tensor> parameters_;
  ShardLayout layout_;
  ProcessGroup group_;
  std::vector<Place> place_;       ///< By parameter.
  std::vector<at::Tensor> flats_;  ///< By bucket.
  std::vector<at::Tensor> views_;  ///< By parameter, in `flats_`.
  std::vector<at::Tensor> parts_;  ///< By parameter.
};

}  // namespace lockstep::detail
