#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/autograd/backward.h"
#include "lockstep/autograd/recorded_state.h"
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

/// Makes a loss of the last stage's output. Called once for each micro-batch.
using MicroBatchLoss = std::function<at::Tensor(int micro_batch, const at::Tensor& output)>;

/// Some layers, one after the other, and what they keep between forward and backward of each
/// micro-batch. One thread.
class Stage {
 public:
  Stage(std::vector<Layer> layers, StageOptions options);

  const c10::Device& device() const { return options_.device; }

  /// The layers, without anything kept.
  at::Tensor run(const at::Tensor& input) const;

  void begin(int micro_batches);
  /// `input` is a leaf. Gives the output, for the next stage: it requires a gradient when backward
  /// wants one.
  at::Tensor forward(int micro_batch, at::Tensor input);
  /// The same on the last stage, which gives nothing on.
  void forward_with_loss(int micro_batch, at::Tensor input, const MicroBatchLoss& loss);
  /// `gradient` is that of the output; undefined on the last stage. Gives the input's gradient,
  /// undefined when nobody wants it.
  at::Tensor backward(int micro_batch, const at::Tensor& gradient);
  /// The same in two halves.
  at::Tensor backward_input(int micro_batch, const at::Tensor& gradient);
  void backward_weight(int micro_batch);

 private:
  struct Kept {
    at::Tensor input;
    at::Tensor output;  ///< Or the loss.
    MicroBatchLoss loss;
    std::optional<RecordedState> state;  ///< With which forward ran.
    std::optional<SplitBackward> split;
  };
  /// Held while this stage draws random numbers that must be drawn once more.
  std::unique_lock<std::mutex> lock_forward() const;
  at::Tensor recompute(int micro_batch);
  at::Tensor root_of(int micro_batch);
  at::Tensor input_gradient(Kept& kept) const;
  Kept& kept(int micro_batch) { return kept_.at(static_cast<size_t>(micro_batch)); }

  std::vector<Layer> layers_;
  StageOptions options_;
  std::vector<at::Tensor> parameters_;  ///< Of the layers' modules, each once.
  std::vector<at::Tensor> buffers_;
  std::vector<Kept> kept_;
};

}  // namespace lockstep::detail
