// What ranks can send to each other: a message, a reduction, a gather, an object, a ring. It starts
// three processes of itself:
//   build/examples/quickstart/collectives
// or as many as a launcher says:
//   build/bin/lockstep run --nproc-per-node 4 build/examples/quickstart/collectives
#include <ATen/Functions.h>

#include <iostream>
#include <sstream>

#include "lockstep/lockstep.h"

namespace {

/// One line from each rank, in their order, printed by rank 0.
void print(const lockstep::World& world, const std::string& what, const at::Tensor& result) {
  std::ostringstream line;
  line << what << ", rank " << world.rank() << ":";
  for (int64_t i = 0; i < result.numel(); ++i) line << " " << result[i].item<double>();
  const auto lines = world.group().all_gather_object(line.str());
  if (world.rank() != 0) return;
  for (const auto& each : lines) std::cout << each.get<std::string>() << "\n";
}

}  // namespace

int main() {
  auto world = lockstep::start(3);
  const lockstep::ProcessGroup& group = world.group();
  const int rank = world.rank(), size = world.size();

  // A message from rank 0 to rank 1.
  at::Tensor message = at::full({1}, rank == 0 ? 42.0 : 0.0);
  if (size > 1 && rank == 0) group.send(message, 1);
  if (rank == 1) group.recv(message, 0);
  print(world, "message", message);

  // The sum of all ranks' numbers, on all.
  at::Tensor sum = at::full({1}, rank + 1.0);
  group.all_reduce(sum);
  print(world, "all_reduce", sum);

  // Every rank's number, on all.
  std::vector<at::Tensor> parts(static_cast<size_t>(size));
  for (at::Tensor& part : parts) part = at::empty({1});
  group.all_gather(parts, at::full({1}, 10.0 * rank));
  print(world, "all_gather", at::cat(parts));

  // A ring: each rank adds what its left neighbour has passed on, size - 1 times.
  const int left = (rank + size - 1) % size, right = (rank + 1) % size;
  at::Tensor total = at::full({1}, rank + 1.0), passed = total.clone();
  for (int step = 1; step < size; ++step) {
    at::Tensor incoming = at::empty({1});
    lockstep::Work sending = group.isend(passed, right);
    group.recv(incoming, left);
    sending.wait();
    total += incoming;
    passed = incoming;
  }
  print(world, "ring", total);
}
