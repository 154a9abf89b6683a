// PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework". A large
// embedding table lies on a parameter server. The dense part of the model is the same on all
// trainers, in DistributedDataParallel. A master makes the table and lets the trainers begin.
// Distributed autograd goes through the table; DDP averages the gradients of the dense part.
//   build/examples/003_rpc/ddp_rpc
// Under a launcher, the trainers' number and two:
//   build/bin/lockstep run --nproc-per-node 4 build/examples/003_rpc/ddp_rpc
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
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

constexpr int64_t kTokens = 100;
constexpr int64_t kWidth = 16;
constexpr int64_t kClasses = 8;
constexpr int64_t kBagSize = 3;  ///< Tokens whose vectors are added up.

/// On the parameter server: a vector for each token.
class EmbeddingTable {
 public:
  EmbeddingTable()
      : table_(nn::EmbeddingBagOptions(kTokens, kWidth).mode(torch::enumtype::kSum())) {}
  /// Takes bags of tokens [batch, kBagSize] and gives their sums [batch, kWidth].
  at::Tensor forward(const at::Tensor& bags) { return table_->forward(bags); }
  Parameters parameters() const { return references_to(table_->parameters()); }

 private:
  nn::EmbeddingBag table_;
};

const auto make_table = rpc::function("make_table", [] {
  at::manual_seed(1);
  return std::make_shared<EmbeddingTable>();
});
const auto look_up = rpc::method("EmbeddingTable.forward", &EmbeddingTable::forward);
const auto table_parameters = rpc::method("EmbeddingTable.parameters", &EmbeddingTable::parameters);

struct Options {
  int trainers = 2;
  int epochs = 8;
  int64_t batches = 25;
  int64_t batch_size = 32;
  double lr = 0.2;
};

/// In a bag are tokens of one class: its number is what their numbers leave when divided by
/// kClasses.
struct Batch {
  at::Tensor bags, classes;
};
Batch random_batch(int64_t size, at::Generator generator) {
  const at::Tensor classes = at::randint(kClasses, {size}, generator, at::kLong);
  const at::Tensor places = at::randint(kTokens / kClasses, {size, kBagSize}, generator, at::kLong);
  return {places * kClasses + classes.unsqueeze(1), classes};
}

/// The table is elsewhere, the layer is averaged over the trainers.
class HybridModel {
 public:
  HybridModel(rpc::RRef<EmbeddingTable> table, const lockstep::ProcessGroup& trainers)
      : table_(std::move(table)), layer_(nn::Linear(kWidth, kClasses), trainers) {}

  at::Tensor forward(const at::Tensor& bags) {
    return layer_.forward(table_.rpc_sync(look_up, bags));
  }
  Parameters parameters() const {
    Parameters all = table_.rpc_sync(table_parameters);
    for (const auto& own : references_to(layer_.parameters())) all.push_back(own);
    return all;
  }

 private:
  rpc::RRef<EmbeddingTable> table_;
  lockstep::DistributedDataParallel<nn::Linear> layer_;
};

/// What this process is, for the function that the master calls.
struct Trainer {
  lockstep::ProcessGroup group;
  Options options;
};
std::optional<Trainer> this_trainer;

/// Called by the master. Returns the part of new bags whose class the model knows.
double run_trainer(const rpc::RRef<EmbeddingTable>& table) {
  const auto& [group, options] = this_trainer.value();
  HybridModel model(table, group);
  rpc::DistributedOptimizer optimizer("sgd", model.parameters(), {.lr = options.lr});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(10 + group.rank());
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    double total = 0;
    for (int64_t i = 0; i < options.batches; ++i) {
      const Batch batch = random_batch(options.batch_size, generator);
      rpc::AutogradContext context;
      const auto loss = nn::functional::cross_entropy(model.forward(batch.bags), batch.classes);
      context.backward({loss});
      optimizer.step(context);
      total += loss.item<double>();
    }
    std::printf("trainer %d: epoch %d, loss %.4f\n", group.rank(), epoch + 1,
                total / static_cast<double>(options.batches));
    std::fflush(stdout);
  }
  const at::NoGradGuard no_grad;
  const Batch batch = random_batch(1000, generator);
  return model.forward(batch.bags)
      .argmax(1)
      .eq(batch.classes)
      .to(at::kDouble)
      .mean()
      .item<double>();
}
const auto train = rpc::function("train", run_trainer);

void run_master(const Options& options) {
  const auto table = rpc::remote("ps", make_table);
  std::vector<rpc::Future<double>> running;
  for (int i = 0; i < options.trainers; ++i) {
    running.push_back(
        rpc::call_async({"trainer_" + std::to_string(i), std::chrono::hours(1)}, train, table));
  }
  const auto accuracies = rpc::when_all(running).wait();
  for (size_t i = 0; i < accuracies.size(); ++i) {
    std::printf("master: trainer %zu has an accuracy of %.4f\n", i, accuracies[i]);
  }
}

void run_worker(const Options& options) {
  const auto world = lockstep::init();
  const int trainers = options.trainers, rank = world.rank();
  if (world.size() != trainers + 2) {
    throw lockstep::UsageError("expected " + std::to_string(trainers + 2) +
                               " workers: the trainers, a master and a parameter server");
  }
  const bool trains = rank < trainers;
  const auto group = world.group().split(trains ? 0 : 1);
  if (trains) this_trainer = Trainer{group, options};
  const std::string name = trains             ? "trainer_" + std::to_string(rank)
                           : rank == trainers ? "master"
                                              : "ps";
  auto agent = rpc::init(world, name);
  if (name == "master") run_master(options);
  agent.shutdown();  // Until then trainers and server do what they are called for.
  this_trainer.reset();
}

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An embedding table on a server, and trainers with DDP");
  flags.option("--trainers", options.trainers, "How many train; two processes are beside them",
               {1, 62});
  flags.option("--epochs", options.epochs, "How often to go on with --batches", {1});
  flags.option("--batches", options.batches, "Batches of an epoch", {1});
  flags.option("--batch-size", options.batch_size, "Bags of a batch", {1});
  flags.option("--lr", options.lr, "The learning rate");
  examples::parse(flags, argc, argv);
  return options;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto options = read_options(argc, argv);
  lockstep::spawn([&](int) { run_worker(options); }, options.trainers + 2);
  return 0;
} catch (...) {
  return examples::report_error();
}
