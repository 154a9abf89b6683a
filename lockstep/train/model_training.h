#pragma once

#include <c10/core/MemoryFormat.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/models/models.h"
#include "lockstep/train/training_module.h"

namespace lockstep {

enum class LossKind {
  /// Outputs [B, classes], targets int64 [B]. Or a class a token: [B, T, classes] and [B, T].
  cross_entropy,
  mean_squared,  ///< Outputs and targets [B, K], float32.
};

struct ModelTrainingOptions {
  LossKind loss = LossKind::cross_entropy;
  OptimizerConfig optimizer = {};  ///< Of the model's parameters.
  /// Of the model's tensors, and so of batches of 4 dimensions; see memory_format.h.
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
};

/// A built-in model as the chain that strategies know.
std::vector<Layer> layers_of(Model& model);

/// How a built-in model is trained: one of two losses, and the accuracy where there are classes.
class ModelTraining : public SupervisedModule {
 public:
  ModelTraining(std::shared_ptr<Model> model, ModelTrainingOptions options);

  at::Tensor forward(const at::Tensor& input) override { return model_->forward(input); }
  at::Tensor loss(const at::Tensor& output, const at::Tensor& target) override;
  void measure(const at::Tensor& output, const at::Tensor& target, double loss) override;
  void validate(const at::Tensor& output, const at::Tensor& target) override;
  std::vector<Layer> layers() override;
  std::function<at::Tensor(torch::nn::Module& copy, const at::Tensor& input)> forward_of_copies()
      override;
  std::vector<OptimizerConfig> configure_optimizers() override;
  Batch prepare_batch(const Batch& batch, c10::Device device) const override;

  Model& model() { return *model_; }

 private:
  void note(const at::Tensor& output, const at::Tensor& target, double loss, bool is_mean);

  std::shared_ptr<Model> model_;
  ModelTrainingOptions options_;
};

}  // namespace lockstep
