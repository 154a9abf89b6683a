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

void ModelTraining::note(const MetricSums& sums) {
  if (sums.loss_terms > 0) log_sum("loss", sums.loss, sums.loss_terms);
  if (sums.classified > 0) log_sum("accuracy", sums.correct, sums.classified);
}

void ModelTraining::measure(const at::Tensor& output, const at::Tensor& target, double loss) {
  MetricSums sums;
  add_batch(sums, options_.loss, loss, output, target, target.size(0));
  note(sums);
}

void ModelTraining::validate(const at::Tensor& output, const at::Tensor& target) {
  const int64_t rows = target.size(0);
  MetricSums sums;
  add_batch(sums, options_.loss, 0, output, target, rows);
  sums.loss = loss_sum(options_.loss, output, target, rows);
  note(sums);
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
