#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
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

  /// The states of the whole module and its optimizer, from those that a row has of this rank's
  /// stages. `group`: the ranks that have the whole together.
  SpreadModel spread_model(torch::nn::Module& module, SpreadModel stages,
                           const ProcessGroup& group) const;
  SpreadOptimizer spread_optimizer(SpreadOptimizer stages, const ProcessGroup& group) const;
  /// What a whole optimizer's state has of the stages' parameters, by their indices there. Throws
  /// CheckpointError for a parameter that does not exist.
  StateDict stage_state(const StateDict& whole, const SpreadOptimizer& stages) const;

 private:
  std::vector<size_t> wholes_of(const SpreadOptimizer& stages) const;

  int rank_;
  std::vector<StageTensor> parameters_;
  std::vector<StageTensor> buffers_;
  std::vector<size_t> own_;
};

/// A module of the layers of some stages, by the names that they have in the whole one. Where they
/// have no parameter it has an empty one, as optimizers want one.
std::shared_ptr<torch::nn::Module> module_of_stages(
    const std::shared_ptr<torch::nn::Module>& whole,
    const std::vector<std::shared_ptr<torch::nn::Module>>& layers);

}  // namespace lockstep::detail
