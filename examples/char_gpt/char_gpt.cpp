// Learns the characters of a text and then writes some itself: nanoGPT's train.py and sample.py in
// one program, on several processes. Without --text it reads its own source.
//   P=build/examples/char_gpt/char_gpt
//   $P --text book.txt --devices 2
//   build/bin/lockstep run --nproc-per-node 2 $P --text book.txt
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <cstdio>

#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

struct Options {
  std::string text = __FILE__;
  int64_t devices = 1;
  int64_t epochs = 3;
  int64_t batch_size = 8;
  int64_t sample = 300;
  double lr = 0.003;
  double temperature = 0.8;  // Below 1 it dares less.
  lockstep::GptOptions model = {
      .context = 64, .layers = 2, .heads = 2, .channels = 64, .dropout = 0};
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("A small GPT that learns the characters of a text");
  flags.option("--text", options.text, "The text", "FILE");
  flags.option("--devices", options.devices, "Processes to start", {1});
  flags.option("--epochs", options.epochs, "Passes over the text", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a process in a step", {1});
  flags.option("--sample", options.sample, "Characters to write at the end", {0});
  flags.option("--lr", options.lr, "Learning rate of AdamW", {0});
  flags.option("--temperature", options.temperature, "How daring the sample is", {0.01});
  flags.option("--context", options.model.context, "Characters that the model looks back on", {1});
  flags.option("--layers", options.model.layers, "Blocks of the model", {1});
  flags.option("--heads", options.model.heads, "Heads of each attention", {1});
  flags.option("--channels", options.model.channels, "Numbers for each character", {1});
  examples::parse(flags, argc, argv);
  return options;
}

/// Logits of the last place are the chances of the next character.
std::string sample(lockstep::Model& model, const Options& options,
                   const std::vector<std::string>& characters) {
  const at::NoGradGuard no_grad;
  model.eval();
  std::string text;
  at::Tensor tokens = at::zeros({1, 1}, at::kLong);
  for (int64_t i = 0; i < options.sample; ++i) {
    const int64_t seen = std::min(tokens.size(1), options.model.context);
    const at::Tensor logits = model.forward(tokens.narrow(1, tokens.size(1) - seen, seen));
    const at::Tensor chances = at::softmax(logits.select(1, -1) / options.temperature, -1);
    const at::Tensor next = at::multinomial(chances, 1);
    text += characters.at(next.item<int64_t>());
    tokens = at::cat({tokens, next}, 1);
  }
  return text;
}

void train(Options options) {
  const auto world = lockstep::init();
  const auto text =
      lockstep::load_dataset("text:" + options.text, {.context = options.model.context});
  options.model.vocabulary = text.train.num_classes;
  at::manual_seed(0);
  const auto model = lockstep::make_gpt(options.model);
  const auto parameters = model->parameters();
  const auto optimizer = lockstep::make_optimizer("adamw", parameters, {.lr = options.lr});
  lockstep::DistributedDataParallel ddp(model, world.group());
  lockstep::DataLoader loader(
      text.train, lockstep::DistributedSampler({text.train.size(), world.rank(), world.size()}), {},
      {.batch_size = options.batch_size});

  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    double loss_of_rank = 0;
    for (const auto& batch : loader.epoch(epoch)) {
      const at::Tensor logits = ddp.forward(batch.data);
      const at::Tensor loss =
          torch::nn::functional::cross_entropy(logits.flatten(0, 1), batch.target.flatten());
      lockstep::zero_grad(parameters);
      lockstep::backward(loss);
      optimizer->step();
      loss_of_rank += loss.item<double>();
    }
    at::Tensor loss = at::full({1}, loss_of_rank / loader.batches_per_epoch(), at::kDouble);
    world.group().all_reduce(loss, lockstep::ReduceOp::avg);
    if (world.rank() == 0) {
      std::printf("epoch %ld: loss %.4f\n", static_cast<long>(epoch), loss.item<double>());
      std::fflush(stdout);
    }
  }
  if (world.rank() == 0 && options.sample > 0) {
    std::printf("%s\n", sample(*model, options, text.train.classes).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = read_options(argc, argv);
    if (!lockstep::spawn(static_cast<int>(options.devices))) train(options);
    return 0;
  } catch (const std::exception&) {
    return examples::report_error();
  }
}
