// A simulation over MPI that trains while it runs. The rod's heat spreads by an explicit scheme,
// each rank has a part of it, and neighbours swap their edges over MPI. A linear layer learns the
// scheme from what the simulation makes: Lockstep averages its gradients over the ranks of the
// simulation's own communicator.
//   P=build/examples/mpi_simulation/heat
//   mpirun -np 2 $P
// On two hosts, whose names mpirun knows:
//   mpirun -np 4 --host node1:2,node2:2 $P
#include <ATen/ops/cat.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/stack.h>
#include <mpi.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cstdio>

#include "lockstep/lockstep.h"

namespace {

constexpr int64_t kCells = 64;      // Of each rank.
constexpr double kDiffusion = 0.2;  // Of a cell's difference to its neighbour, in a step.

/// Each cell with its left and right neighbour, as three columns. At the ends of the rod the heat
/// stays in.
at::Tensor stencil(const at::Tensor& heat, MPI_Comm comm) {
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  const int left = rank > 0 ? rank - 1 : MPI_PROC_NULL;
  const int right = rank + 1 < size ? rank + 1 : MPI_PROC_NULL;
  auto before = heat.slice(0, 0, 1).clone(), after = heat.slice(0, -1).clone();
  float first = before.item<float>(), last = after.item<float>();
  MPI_Sendrecv(&last, 1, MPI_FLOAT, right, 0, before.data_ptr<float>(), 1, MPI_FLOAT, left, 0, comm,
               MPI_STATUS_IGNORE);
  MPI_Sendrecv(&first, 1, MPI_FLOAT, left, 1, after.data_ptr<float>(), 1, MPI_FLOAT, right, 1, comm,
               MPI_STATUS_IGNORE);
  const auto wide = at::cat({before, heat, after});
  return at::stack({wide.slice(0, 0, kCells), heat, wide.slice(0, 2)}, 1);
}

/// Trains beside the simulation. Gives the last step's loss.
double simulate(const lockstep::World& world, MPI_Comm comm, torch::nn::Linear& learned) {
  lockstep::GradientAverager averager(*learned, world.group());
  torch::optim::Adam optimizer(learned->parameters(), torch::optim::AdamOptions(0.02));
  auto own = lockstep::rank_generator(world, 0);
  auto heat = at::rand({kCells}, own);
  double loss_value = 0;
  for (int step = 0; step < 1500; ++step) {
    const auto seen = stencil(heat, comm);
    const auto next = heat + kDiffusion * (seen.select(1, 0) - 2 * heat + seen.select(1, 2));
    optimizer.zero_grad();
    auto loss = torch::nn::functional::mse_loss(learned->forward(seen).squeeze(1), next);
    loss.backward();
    optimizer.step();
    loss_value = loss.item<double>();
    // Sources and sinks of heat, so that there is something to learn to the end.
    heat = next + 0.2 * (at::rand({kCells}, own) - 0.5);
  }
  return loss_value;
}

}  // namespace

int main(int argc, char** argv) {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  {
    auto world = lockstep::init({.mpi_communicator = comm});
    at::manual_seed(0);
    torch::nn::Linear learned(torch::nn::LinearOptions(3, 1).bias(false));
    const double loss = simulate(world, comm, learned);
    const auto weights = learned->weight.flatten();
    if (world.rank() == 0)
      std::printf("%d ranks: loss %.1e, learned %.2f %.2f %.2f of %.2f %.2f %.2f\n", world.size(),
                  loss, weights[0].item<double>(), weights[1].item<double>(),
                  weights[2].item<double>(), kDiffusion, 1 - 2 * kDiffusion, kDiffusion);
  }
  MPI_Comm_free(&comm);
  MPI_Finalize();  // MPI is the program's: the World has left it as it was.
}
