#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/flat_unit.h"

namespace lockstep::detail {

/// Every rank updates as many elements of each unit as every other. A parameter is cut where that
/// needs it, so each rank has at most one part of it. `buckets`: lists of parameters of one dtype
/// and device.
std::vector<FlatUnit> even_layout(const std::vector<at::Tensor>& parameters,
                                  const std::vector<std::vector<size_t>>& buckets, int ranks);

/// Every parameter of `trained` belongs to one rank, by the algorithm of Python's
/// ZeroRedundancyOptimizer: largest first, each to the rank that has least. One unit for each
/// dtype and device.
std::vector<FlatUnit> whole_layout(const std::vector<at::Tensor>& parameters,
                                   const std::vector<size_t>& trained, int ranks);

/// `trained` in lists of one dtype and device, each of at most `cap` bytes or of one parameter, in
/// the order given.
std::vector<std::vector<size_t>> buckets_of(const std::vector<at::Tensor>& parameters,
                                            const std::vector<size_t>& trained, int64_t cap);

/// Parameters of which each rank of a group updates its own part. They are moved into flat memory,
/// in which the parts of a rank lie side by side, and stay the same tensors. One thread at a time.
class ParameterShards {
 public:
  /// Moves the parameters that the units have, by their indices in `parameters`. Not a collective.
  ParameterShards(std::vector<at::Tensor> parameters, std::vector<FlatUnit> units,
                  ProcessGroup group);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<FlatUnit>& units() const { return units_; }
  const ProcessGroup& group() const { return group_; }
  /// Whether a unit has the parameter: it is one of those that are trained.
  bool has(size_t parameter) const { return places_[parameter].unit != kNone; }
  /// In which it lies.
  size_t unit(size_t parameter) const { return places_[parameter].unit; }
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
    size_t unit = kNone;
    size_t parameter = 0;  ///< In the unit.
  };

  void move(size_t unit);
  const FlatParameter& member(size_t parameter) const {
    return units_[places_[parameter].unit].parameters[places_[parameter].parameter];
  }

  std::vector<at::Tensor> parameters_;
  std::vector<FlatUnit> units_;
  std::vector<Place> places_;  ///< By parameter.
  ProcessGroup group_;
  std::vector<at::Tensor> flats_;  ///< By unit.
  std::vector<at::Tensor> views_;  ///< By parameter, in `flats_`.
  std::vector<at::Tensor> parts_;  ///< By parameter.
};

}  // namespace lockstep::detail
