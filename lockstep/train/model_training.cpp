#include "lockstep/train/model_training.h"

#include <utility>

#include "lockstep/train/loss.h"
#include "lockstep/train/memory_format.h"

namespace lockstep {

ModelTraining::ModelTraining(std::shared_ptr<Model> model, ModelTrainingOptions options)
    : model_(register_module("model", std::move(model))), options_(std::move(options)) {
  options_.optimizer.module = model_;
}

at::Tensor ModelTraining::loss(const at::Tensor& output, const at::Tensor& target) {
  return batch_loss(options_.loss, output, target);
}

void ModelTraining::note(const at::Tensor& output, const at::Tensor& target, double loss,
                         bool is_mean) {
  const bool has_classes = options_.loss == LossKind::cross_entropy;
  const int64_t terms = (has_classes ? target : output).numel();
  log_sum("loss", is_mean ? loss * static_cast<double>(terms) : loss, terms);
  if (has_classes) log_sum("accuracy", static_cast<double>(count_correct(output, target)), terms);
}

void ModelTraining::measure(const at::Tensor& output, const at::Tensor& target, double loss) {
  note(output, target, loss, /*is_mean=*/true);
}

void ModelTraining::validate(const at::Tensor& output, const at::Tensor& target) {
  const at::Tensor sum = batch_loss(options_.loss, output, target, at::Reduction::Sum);
  note(output, target, sum.item<double>(), /*is_mean=*/false);
}

std::vector<Layer> layers_of(Model& model) {
  std::vector<Layer> layers;
  for (const ModelLayer& layer : model.layers()) {
    layers.push_back({layer.name, layer.module, layer.forward});
  }
  return layers;
}

std::vector<Layer> ModelTraining::layers() {
  return layers_of(*model_);
}

std::function<at::Tensor(torch::nn::Module& copy, const at::Tensor& input)>
ModelTraining::forward_of_copies() {
  return [](torch::nn::Module& copy, const at::Tensor& input) {
    return dynamic_cast<Model&>(copy).forward(input);
  };
}

std::vector<OptimizerConfig> ModelTraining::configure_optimizers() {
  return {options_.optimizer};
}

Batch ModelTraining::prepare_batch(const Batch& batch, c10::Device device) const {
  Batch prepared = SupervisedModule::prepare_batch(batch, device);
  prepared.data = with_memory_format(prepared.data, options_.memory_format);
  return prepared;
}

}  // namespace lockstep
