#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/parallel/pipeline/micro_batches.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "lockstep/parallel/pipeline/stage_link.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

struct StageOptions {
  c10::Device device = c10::kCPU;
  bool recompute_activations = false;  ///< Keep a stage's input only, and run forward again.
  ForwardContext forward_context = {};
  /// Of stages in several threads of one process, which have one random generator together. Held by
  /// each forward when activations are recomputed. Null: no other stage is there.
  std::shared_ptr<std::mutex> one_forward = nullptr;
};

class Stage;

/// Does what a schedule says for one rank, with that rank's stages. One thread.
class ScheduleRunner {
 public:
  /// `starts` are the first layers of all stages, of which the rank has every `num_ranks`-th.
  /// `link` must outlive the runner.
  ScheduleRunner(int rank, int num_ranks, const std::vector<Layer>& layers,
                 const std::vector<size_t>& starts, const StageOptions& options, StageLink& link);
  ~ScheduleRunner();

  /// One batch, forward and backward. All ranks know the shapes of the inputs. Losses are made on
  /// the rank of the last stage. Throws what layers, the loss and the link throw. After that the
  /// link must not be used again.
  void run(const PipelineSchedule& schedule, const MicroBatches& batches);
  /// One forward of a whole batch, without a graph: the output, on the rank of the last stage.
  at::Tensor predict(const at::Tensor& input);

 private:
  Stage& stage_of(int stage) { return *stages_.at(static_cast<size_t>(stage / num_ranks_)); }
  bool is_here(int stage) const { return stage % num_ranks_ == rank_; }
  bool is_last(int stage) const { return stage == num_stages_ - 1; }
  at::Tensor take(const ParcelId& id);
  void perform(const PipelineAction& action);
  void forward(const PipelineAction& action);

  const int rank_;
  const int num_ranks_;
  const int num_stages_;
  std::vector<std::unique_ptr<Stage>> stages_;
  StageLink& link_;
  const MicroBatches* batches_ = nullptr;  ///< While `run` runs, as all below.
  std::map<ParcelId, at::Tensor> here_;    ///< For stages of this rank, or to be sent.
};

}  // namespace lockstep::detail
