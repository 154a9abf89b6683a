// The RNN language model of PyTorch's RPC tutorial, split over two workers: the embedding table and
// the decoder lie on a parameter server, the LSTM on the trainer. Distributed autograd goes through
// both, and the distributed optimizer steps each one's parameters where they are.
//   build/examples/003_rpc/rnn
// Under a launcher:
//   build/bin/lockstep run --nproc-per-node 2 build/examples/003_rpc/rnn
#include <ATen/ops/dropout.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "003_rpc/references.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace nn = torch::nn;
namespace rpc = lockstep::rpc;
using rpc_tutorial::Parameters;
using rpc_tutorial::references_to;
using Hidden = std::tuple<at::Tensor, at::Tensor>;

/// What the model learns: each letter of a text from those before it.
constexpr char kText[] =
    "the quick brown fox jumps over the lazy dog. how vexingly quick daft zebras jump. "
    "sphinx of black quartz, judge my vow. pack my box with five dozen liquor jugs. ";

/// On the parameter server: a vector for each token.
class EmbeddingTable {
 public:
  EmbeddingTable(int64_t tokens, int64_t inputs, double dropout)
      : encoder_(tokens, inputs), dropout_(dropout) {
    const at::NoGradGuard no_grad;
    encoder_->weight.uniform_(-0.1, 0.1);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return at::dropout(encoder_->forward(tokens), dropout_, /*train=*/true);
  }
  Parameters parameters() const { return references_to(encoder_->parameters()); }

 private:
  nn::Embedding encoder_;
  double dropout_;
};

/// On the parameter server: what token follows.
class Decoder {
 public:
  Decoder(int64_t tokens, int64_t hidden, double dropout)
      : decoder_(hidden, tokens), dropout_(dropout) {
    const at::NoGradGuard no_grad;
    decoder_->bias.zero_();
    decoder_->weight.uniform_(-0.1, 0.1);
  }
  at::Tensor forward(const at::Tensor& output) {
    return decoder_->forward(at::dropout(output, dropout_, /*train=*/true));
  }
  Parameters parameters() const { return references_to(decoder_->parameters()); }

 private:
  nn::Linear decoder_;
  double dropout_;
};

const auto make_embedding =
    rpc::function("make_embedding", [](int64_t tokens, int64_t inputs, double dropout) {
      at::manual_seed(1);
      return std::make_shared<EmbeddingTable>(tokens, inputs, dropout);
    });
const auto make_decoder =
    rpc::function("make_decoder", [](int64_t tokens, int64_t hidden, double dropout) {
      at::manual_seed(2);
      return std::make_shared<Decoder>(tokens, hidden, dropout);
    });
const auto embed = rpc::method("EmbeddingTable.forward", &EmbeddingTable::forward);
const auto embedding_parameters =
    rpc::method("EmbeddingTable.parameters", &EmbeddingTable::parameters);
const auto decode = rpc::method("Decoder.forward", &Decoder::forward);
const auto decoder_parameters = rpc::method("Decoder.parameters", &Decoder::parameters);

struct Options {
  int epochs = 4;
  int64_t batch_size = 8;
  int64_t sequence = 20;
  int64_t inputs = 32;
  int64_t hidden = 64;
  int64_t layers = 1;
  double dropout = 0;
  double lr = 2;
  int64_t batches = 40;
};

/// The text as numbers, and how many there are.
std::pair<at::Tensor, int64_t> read_text() {
  const std::string text = kText;
  std::string letters;
  std::vector<int64_t> tokens;
  for (const char letter : text) {
    size_t token = letters.find(letter);
    if (token == std::string::npos) {
      token = letters.size();
      letters += letter;
    }
    tokens.push_back(static_cast<int64_t>(token));
  }
  return {at::tensor(tokens), static_cast<int64_t>(letters.size())};
}

/// The LSTM is here, the rest on the server.
class RnnModel {
 public:
  RnnModel(const std::string& server, int64_t tokens, const Options& options)
      : embedding_(rpc::remote(server, make_embedding, tokens, options.inputs, options.dropout)),
        rnn_(nn::LSTMOptions(options.inputs, options.hidden)
                 .num_layers(options.layers)
                 .dropout(options.layers > 1 ? options.dropout : 0)),
        decoder_(rpc::remote(server, make_decoder, tokens, options.hidden, options.dropout)) {}

  /// Takes tokens [sequence, batch] and gives scores [sequence, batch, tokens].
  std::tuple<at::Tensor, Hidden> forward(const at::Tensor& tokens, const Hidden& hidden) {
    const auto [output, next] = rnn_->forward(embedding_.rpc_sync(embed, tokens), hidden);
    return {decoder_.rpc_sync(decode, output), next};
  }

  Parameters parameters() const {
    Parameters all = embedding_.rpc_sync(embedding_parameters);
    const auto add = [&](const Parameters& some) {
      all.insert(all.end(), some.begin(), some.end());
    };
    add(references_to(rnn_->parameters()));
    add(decoder_.rpc_sync(decoder_parameters));
    return all;
  }

 private:
  rpc::RRef<EmbeddingTable> embedding_;
  nn::LSTM rnn_;
  rpc::RRef<Decoder> decoder_;
};

void run_trainer(const Options& options) {
  at::manual_seed(0);
  const auto [text, tokens] = read_text();
  RnnModel model("ps", tokens, options);
  rpc::DistributedOptimizer optimizer("sgd", model.parameters(), {.lr = options.lr});

  // Each column of a batch goes through the text from a place of its own.
  const auto columns = at::arange(options.batch_size) * (text.size(0) / options.batch_size);
  const auto rows = at::arange(options.sequence + 1).unsqueeze(1);
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    const auto zeros = at::zeros({options.layers, options.batch_size, options.hidden});
    Hidden hidden{zeros, zeros};
    double total = 0;
    for (int64_t batch = 0; batch < options.batches; ++batch) {
      const auto places = (columns + rows + batch * options.sequence).remainder(text.size(0));
      const auto part = text.index({places});
      rpc::AutogradContext context;
      // What was before this batch gets no gradient: truncated backpropagation through time.
      hidden = {std::get<0>(hidden).detach(), std::get<1>(hidden).detach()};
      const auto [scores, next] = model.forward(part.narrow(0, 0, options.sequence), hidden);
      const auto loss = nn::functional::cross_entropy(
          scores.flatten(0, 1), part.narrow(0, 1, options.sequence).flatten());
      context.backward({loss});
      optimizer.step(context);
      hidden = next;
      total += loss.item<double>();
    }
    const double mean = total / static_cast<double>(options.batches);
    std::printf("epoch %d: loss %.4f, perplexity %.2f of %lld\n", epoch + 1, mean, std::exp(mean),
                static_cast<long long>(tokens));
    std::fflush(stdout);
  }
}

void run_worker(const Options& options) {
  const auto world = lockstep::init();
  if (world.size() != 2)
    throw lockstep::UsageError("two workers are needed: a server and a trainer");
  auto agent = rpc::init(world, world.rank() == 0 ? "trainer" : "ps");
  if (world.rank() == 0) run_trainer(options);
  agent.shutdown();
}

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An RNN language model whose parts lie on two workers");
  flags.option("--epochs", options.epochs, "How often to go on with --batches", {1});
  flags.option("--batches", options.batches, "Batches of an epoch", {1});
  flags.option("--batch-size", options.batch_size, "Sequences of a batch", {1});
  flags.option("--sequence", options.sequence, "Tokens of a sequence", {1});
  flags.option("--ninp", options.inputs, "Numbers of a token's vector", {1});
  flags.option("--nhid", options.hidden, "Numbers of the LSTM's state", {1});
  flags.option("--nlayers", options.layers, "Layers of the LSTM", {1});
  flags.option("--dropout", options.dropout, "The part of the numbers that is dropped");
  flags.option("--lr", options.lr, "The learning rate");
  examples::parse(flags, argc, argv);
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto options = read_options(argc, argv);
  lockstep::spawn([&](int) { run_worker(options); }, 2);
  return 0;
} catch (...) {
  return examples::report_error();
}
