#include "tools/lockstep/train/model_and_data.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

/// 256 images of MNIST are a batch of a few MB.
constexpr int64_t kEvaluationBatch = 256;

bool is_text(const SampleSource& source) {
  return source.data_spec().dtype == at::kLong && source.target_spec().shape.size() == 1 &&
         source.num_classes() > 0;
}

/// Of the training images, as recipes for PyTorch have them.
TransformPtr normalize_for(const std::string& dataset) {
  if (dataset == "fashion-mnist") return normalize({0.2860}, {0.3530});
  if (dataset == "cifar10") return normalize({0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616});
  if (dataset.starts_with("folder:")) {
    return normalize({0.485, 0.456, 0.406}, {0.229, 0.224, 0.225});  // ImageNet's
  }
  return normalize();
}

/// Random crops and flips. A folder's images are larger for it; others are padded.
void add_augmentation(const RunConfig& config, const SampleSource& source,
                      std::vector<TransformPtr>& steps) {
  if (source.data_spec().dtype != at::kByte) {
    throw UsageError("--augment is for images of bytes, but the samples of dataset " +
                         source.name() + " are " + source.data_spec().describe(),
                     "leave --augment out");
  }
  constexpr int64_t kMargin = 4;  // of the recipes for CIFAR-10
  const bool larger = source.name().starts_with("folder:");
  steps.push_back(random_crop(
      larger ? RandomCropOptions{.height = config.image_size, .width = config.image_size}
             : RandomCropOptions{.padding = kMargin}));
  steps.push_back(random_horizontal_flip());
}

std::string hint_for(const ModelInfo& model) {
  if (model.per_token) return "this model is for texts: try --dataset text:FILE";
  if (model.regression) return "this model is for regression: try --dataset random";
  if (model.any_image_size)
    return "this model is for images of three colours: try --dataset cifar10";
  return "this model is for images: try --dataset digits or mnist";
}

/// Shapes of single samples.
void check_shape(const ModelInfo& model, const SampleSource& source, const std::string& both) {
  const SampleSpec spec = source.data_spec();
  if (model.per_token != is_text(source)) {
    throw UsageError(
        both + (model.per_token ? "the model takes tokens of a text, the dataset is none"
                                : "the dataset is a text, which the model does not take"),
        model.per_token ? hint_for(model) : "--model gpt is for texts");
  }
  if (model.any_image_size) {
    if (spec.shape.size() == 3 && spec.shape[0] == model.input_shape.at(0)) return;
    throw UsageError(both + "the model takes images of " +
                         counted(model.input_shape.at(0), "channel") +
                         ", the dataset's samples are " + spec.describe(),
                     hint_for(model));
  }
  const int64_t wanted = SampleSpec{model.input_shape}.numel();
  if (wanted == spec.numel()) return;
  throw UsageError(both + "the model takes " + std::to_string(wanted) +
                       " numbers a sample, the dataset's samples have " +
                       std::to_string(spec.numel()),
                   hint_for(model));
}

}  // namespace

std::map<std::filesystem::path, std::span<const std::byte>>& unpacked_files() {
  static std::map<std::filesystem::path, std::span<const std::byte>> files;
  return files;
}

DatasetSources open_data(const RunConfig& config) {
  DatasetOptions options;
  options.data_dir = config.data_dir;
  options.download = config.download;
  options.unpacked = unpacked_files();
  options.image_size = config.image_size;
  if (config.augment) options.train_image_size = config.image_size * 8 / 7;
  const ModelInfo model = model_info(config.model);
  if (model.per_token) options.context = model.input_shape.at(0);
  return open_dataset(config.dataset, options);
}

Compose transforms_for(const RunConfig& config, const ModelInfo& info, const SampleSource& source,
                       bool training) {
  std::vector<TransformPtr> steps;
  if (training && config.augment) add_augmentation(config, source, steps);
  if (source.data_spec().dtype == at::kByte) steps.push_back(normalize_for(source.name()));
  if (!info.from_file && !info.any_image_size) steps.push_back(reshape(info.input_shape));
  return Compose(std::move(steps));
}

LossKind loss_of(const ModelInfo& info, const SampleSource& source) {
  const bool regression = info.from_file ? source.num_classes() == 0 : info.regression;
  return regression ? LossKind::mean_squared : LossKind::cross_entropy;
}

int64_t evaluation_batch(const RunConfig& config, const ModelInfo& info) {
  const bool small = !info.from_file && !info.any_image_size && !info.per_token;
  return small ? kEvaluationBatch : config.batch_size;
}

void check_model_fits(const ModelInfo& model, const SampleSource& source) {
  if (model.from_file) return;  // A batch tells; see check_output_fits.
  const std::string both = "model " + model.name + " and dataset " + source.name() + ": ";
  check_shape(model, source, both);
  const bool classes = source.num_classes() > 0;
  if (model.regression == classes) {
    throw UsageError(both + "the model " +
                         (model.regression ? "is for regression, the dataset has classes"
                                           : "is for classes, the dataset is for regression"),
                     hint_for(model));
  }
  if (classes && source.num_classes() > model.outputs) {
    throw UsageError(both + "the model tells " + std::to_string(model.outputs) +
                     " classes apart, the dataset has " + std::to_string(source.num_classes()));
  }
  const int64_t targets = source.target_spec().numel();
  if (!classes && targets != model.outputs) {
    throw UsageError(both + "the model gives " + std::to_string(model.outputs) +
                     " numbers a sample, the dataset's targets have " + std::to_string(targets));
  }
}

void check_output_fits(const ModelInfo& info, const DataLoader& loader,
                       const SampleSource& source) {
  if (!info.from_file) return;
  constexpr int64_t kRows = 2;
  const at::NoGradGuard no_grad;
  const SampleSpec input = loader.data_spec();
  const std::vector<int64_t> shape = input.batch_shape(kRows);
  const auto model = make_model(info.name);
  model->eval();
  const at::Tensor output = model->forward(at::zeros(shape, input.dtype));
  std::vector<int64_t> expected = loader.target_spec().batch_shape(kRows);
  const bool classes = source.num_classes() > 0;
  if (classes) expected.push_back(source.num_classes());
  std::vector<int64_t> given = output.sizes().vec();
  const bool more = classes && given.size() == expected.size() && given.back() > expected.back();
  if (more) given.back() = expected.back();  // classes that do not occur do no harm
  if (given == expected && output.is_floating_point()) return;
  throw UsageError("model " + info.name + " and dataset " + source.name() + ": for a batch " +
                       c10::str(at::IntArrayRef(shape)) + " the model gives " +
                       c10::toString(output.scalar_type()) + " " + c10::str(output.sizes()) +
                       ", expected " + c10::str(at::IntArrayRef(expected)) +
                       (classes ? ", a number for each class" : ""),
                   classes ? "the model is to give logits, without softmax or argmax" : "");
}

}  // namespace lockstep
