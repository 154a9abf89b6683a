#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

/// A tensor of the whole module and the stages that use it.
struct StageTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<int> ranks;  ///< Of the pipeline, ascending; several: it is tied.
  int owner() const { return ranks.front(); }
  bool is_on(int rank) const;
};

/// All parameters and buffers of a module, by what ranks of the pipeline have them.
class StageTensors {
 public:
  /// `starts` are the first layers of the stages, which go round the ranks. Throws UsageError for a
  /// parameter that no layer has.
  StageTensors(torch::nn::Module& module, const std::vector<Layer>& layers,
               const std::vector<size_t>& starts, int rank, int num_ranks);

  /// Each once, in the module's order: the numbers of an optimizer's state.
  const std::vector<StageTensor>& parameters() const { return parameters_; }
  const std::vector<StageTensor>& buffers() const { return buffers_; }
  /// The numbers of the parameters that this rank has.
  const std::vector<size_t>& own() const { return own_; }
  std::vector<at::Tensor> own_parameters() const;

  /// Gives the memory of other ranks' parameters back. They keep their shape and are NaN.
  void free_others();

  /// The states of the module and of an optimizer of own_parameters(). Keep this for as long.
  SpreadModel spread_model(torch::nn::Module& module, const ProcessGroup& pipeline) const;
  SpreadOptimizer spread_optimizer(const ProcessGroup& pipeline) const;

 private:
  int rank_;
  std::vector<StageTensor> parameters_;
  std::vector<StageTensor> buffers_;
  std::vector<size_t> own_;
};

}  // namespace lockstep::detail
