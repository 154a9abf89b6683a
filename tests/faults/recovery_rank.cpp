// Ranks that live on when others die (test_recovery.py):
//   lockstep_recovery_rank FOLDER RANKS RESTARTS SAMPLES OPTIMIZER PAUSE_US BACKEND
// trains on SAMPLES numbered samples, and writes into FOLDER, for each process:
//   steps-PID  a line for each committed step: its number, the samples seen then, the ranks, the
//   time
//              in microseconds, the generation
//   end-PID    the number of steps and the weights, once it is done
// It begins by sending its process number there as `pid-RANK`.
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/gradient_averager.h"
#include "lockstep/recovery/elastic_job.h"

namespace {

using namespace lockstep;

/// Samples of the next step that are this rank's: each is a number.
at::Tensor samples_of(int64_t seen, int64_t samples, const World& world) {
  constexpr int64_t kBatch = 4;
  std::vector<double> own;
  for (int64_t i = 0; i < kBatch; ++i) {
    own.push_back(static_cast<double>((seen + world.rank() * kBatch + i) % samples));
  }
  return at::tensor(own, at::kDouble).div(static_cast<double>(samples)).reshape({kBatch, 1});
}

int64_t now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argv[1];
  StartOptions options;
  options.max_restarts = std::atoi(argv[3]);
  options.seed = 1;
  options.init.backend = argv[7];
  ElasticJob job(std::atoi(argv[2]), options);
  const int64_t samples = std::atoll(argv[4]);
  const std::string kind = argv[5];
  const std::chrono::microseconds pause(std::atoi(argv[6]));
  const std::string process = std::to_string(getpid());
  std::ofstream(folder + "/pid-" + process) << std::getenv("RANK");

  at::manual_seed(static_cast<uint64_t>(getpid()));  // A late process must get the others' weights.
  torch::nn::Linear model(1, 3);
  model->to(at::kDouble);
  std::unique_ptr<torch::optim::Optimizer> native;
  std::unique_ptr<Optimizer> own;
  if (kind == "adam") {
    native = std::make_unique<torch::optim::Adam>(model->parameters(), 0.01);
  } else if (kind == "sgd") {
    native = std::make_unique<torch::optim::SGD>(model->parameters(),
                                                 torch::optim::SGDOptions(0.01).momentum(0.9));
  } else {
    own = make_optimizer("adamw", model->parameters(), {.lr = 0.01});
  }
  int64_t seen = 0;
  job.add("model", *model);
  own ? job.add("optimizer", *own) : job.add("optimizer", *native);
  job.add("seen", seen);
  std::ofstream steps(folder + "/steps-" + process);
  job.run([&](World& world) {
    GradientAverager averager(*model, world.group());
    while (seen < samples) {
      const at::Tensor x = samples_of(seen, samples, world);
      const at::Tensor loss = at::mse_loss(model->forward(x), x.mul(2).expand({-1, 3}));
      model->zero_grad();
      loss.backward();
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
      seen += 4 * world.size();  // An unfinished step changes a number, too.
      if (own) own->step();
      if (native) native->step();
      steps << job.commits() + 1 << " " << seen << " " << world.size() << " " << now_us() << " "
            << world.generation() << std::endl;
      job.commit();
    }
  });
  std::ofstream end(folder + "/end-" + process);
  end.precision(17);
  end << job.commits() << " " << seen;
  for (const auto& parameter : model->parameters()) {
    for (int64_t i = 0; i < parameter.numel(); ++i)
      end << " " << parameter.view(-1)[i].item<double>();
  }
  end << std::endl;
}
