#include "lockstep/models/resnet.h"

#include <ATen/Functions.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;

nn::Conv2d make_conv(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

class BasicBlock : public nn::Module {
 public:
  /// `downsample`: where a block halves the image, it brings the input to the same size.
  /// torchvision draws its values before those of the block.
  BasicBlock(int64_t in, int64_t out, int64_t stride, nn::Sequential downsample)
      : conv1_(register_module("conv1", make_conv(in, out, 3, stride))),
        bn1_(register_module("bn1", nn::BatchNorm2d(out))),
        conv2_(register_module("conv2", make_conv(out, out, 3, 1))),
        bn2_(register_module("bn2", nn::BatchNorm2d(out))),
        downsample_(std::move(downsample)) {
    if (downsample_) register_module("downsample", downsample_);
  }

  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = bn1_->forward(conv1_->forward(input)).relu_();
    x = bn2_->forward(conv2_->forward(x));
    x += downsample_ ? downsample_->forward(input) : input;
    return x.relu_();
  }

 private:
  nn::Conv2d conv1_;
  nn::BatchNorm2d bn1_;
  nn::Conv2d conv2_;
  nn::BatchNorm2d bn2_;
  nn::Sequential downsample_;
};

/// From the image to a quarter of its height and width.
class Stem : public nn::Module {
 public:
  Stem()
      : conv1(register_module("conv1", make_conv(3, 64, 7, 2))),
        bn1(register_module("bn1", nn::BatchNorm2d(64))) {}

  at::Tensor forward(const at::Tensor& input) {
    if (input.dim() != 4 || input.size(1) != 3) {
      throw UsageError("model resnet18: the input has shape " + c10::str(input.sizes()) +
                       ", expected images [batch, 3, height, width]");
    }
    const at::Tensor x = bn1->forward(conv1->forward(input)).relu_();
    return at::max_pool2d(x, {3, 3}, {2, 2}, {1, 1});
  }

  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
};

class ResNet18 : public Model {
 public:
  explicit ResNet18(int64_t num_classes)
      : Model("resnet18"), num_classes_(num_classes), stem_(std::make_shared<Stem>()) {
    register_module("conv1", stem_->conv1);
    register_module("bn1", stem_->bn1);
    int64_t in = 64;
    for (size_t i = 0; i < kStages; ++i) {
      const int64_t out = int64_t{64} << i;
      add_stage("layer" + std::to_string(i + 1), in, out, /*stride=*/i == 0 ? 1 : 2);
      in = out;
    }
    fc_ = register_module("fc", nn::Linear(in, num_classes));
    // nn::init draws from torchvision's modules in this order, convolutions only.
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* conv = module->as<nn::Conv2dImpl>()) {
        nn::init::kaiming_normal_(conv->weight, /*a=*/0, torch::kFanOut, torch::kReLU);
      }
    }
  }

  std::vector<ModelLayer> layers() override {
    std::vector<ModelLayer> chain{
        {"", stem_, [stem = stem_](const at::Tensor& x) { return stem->forward(x); }}};
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const std::string name =
          "layer" + std::to_string(i / kBlocks + 1) + "." + std::to_string(i % kBlocks);
      const auto block = blocks_[i];
      chain.push_back({name, block, [block](const at::Tensor& x) { return block->forward(x); }});
    }
    chain.push_back({"fc", fc_.ptr(), [fc = fc_](const at::Tensor& x) { return classify(fc, x); }});
    return chain;
  }

 protected:
  std::shared_ptr<Model> make_again() const override { return make_resnet18(num_classes_); }

 private:
  static constexpr size_t kStages = 4, kBlocks = 2;

  void add_stage(const std::string& name, int64_t in, int64_t out, int64_t stride) {
    auto stage = register_module(name, std::make_shared<nn::Module>(name));
    for (size_t i = 0; i < kBlocks; ++i) {
      const bool first = i == 0;
      const bool changes = first && (stride != 1 || in != out);
      nn::Sequential downsample(nullptr);
      if (changes) downsample = nn::Sequential(make_conv(in, out, 1, stride), nn::BatchNorm2d(out));
      blocks_.push_back(stage->register_module(
          std::to_string(i),
          std::make_shared<BasicBlock>(first ? in : out, out, first ? stride : 1, downsample)));
    }
  }

  static at::Tensor classify(nn::Linear fc, const at::Tensor& x) {
    return fc->forward(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

  int64_t num_classes_;
  std::shared_ptr<Stem> stem_;  ///< Its parts are registered as torchvision names them.
  std::vector<std::shared_ptr<BasicBlock>> blocks_;
  nn::Linear fc_{nullptr};
};

}  // namespace

std::shared_ptr<Model> make_resnet18(int64_t num_classes) {
  return std::make_shared<ResNet18>(num_classes);
}

}  // namespace lockstep
