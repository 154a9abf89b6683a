// The regression whose ranks do not agree when its loop ends.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"
#include "tests/porting/weights.h"

int main(int argc, char** argv) {
  auto world = lockstep::start(2, {.init = {.backend = argc > 1 ? argv[1] : "auto"}});
  at::manual_seed(1);
  torch::nn::Linear model(4, 1);
  lockstep::GradientAverager averager(*model, world.group());
  auto x = at::randn({64, 4}) * at::linspace(0.5, 1.5, 64).unsqueeze(1);
  x = x.chunk(world.size())[world.rank()];
  double loss = 1;
  int steps = 0;
  for (; loss > 1e-4; ++steps) {
    model->zero_grad();
    auto y = x.matmul(at::arange(1, 5).to(at::kFloat).unsqueeze(1)) * 0.1;
    auto output = torch::nn::functional::smooth_l1_loss(model->forward(x), y);
    loss = output.item<double>();
    output.backward();
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.add_(parameter.grad(), -0.1);
  }
  std::printf("steps %d\n", steps);
  print_weights(model->parameters());
}
