// The module's first exercise: does DataParallel make inference faster? FashionCNN classifies
// batches of several sizes, by itself and with a replica for each GPU, or for each core where there
// is none.
//
//   build/examples/004_distributed_training/data_parallel
//   build/examples/004_distributed_training/data_parallel --batch-sizes 1,64,1024 --n-reps 20
//
// One process on one host. Several hosts train with distributed_example.cpp, beside this file; on
// the first, at address IP, and the same with NODE_RANK=1 on the second:
//   MASTER_ADDR=IP NNODES=2 NODE_RANK=0 examples/004_distributed_training/distributed_example.sh 2
//
// The answer: for large batches it does. A forward with replicas has to cut the batch, wake the
// replicas' threads and put their outputs together, which costs some ten microseconds whatever the
// batch is. (Python has to copy the model to every GPU as well, in each forward. These replicas
// stay, and are refreshed only when the weights have changed.) A small batch's own work takes
// hardly longer than that. A large one's is divided by the replicas. `lockstep bench data-parallel`
// says more.
#include <ATen/Parallel.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"

namespace {

struct Options {
  std::vector<int64_t> batch_sizes = {1, 8, 64, 256, 1024};
  int64_t n_reps = 10;
  int64_t replicas = 0;
  int threads = 1;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("Times the inference of FashionCNN with DataParallel");
  flags.list("--batch-sizes", options.batch_sizes, "Images of a batch, one size after the other",
             {1, 1e6});
  flags.option("--n-reps", options.n_reps, "Batches of each size", {1, 1e6});
  flags.option("--replicas", options.replicas,
               "Replicas on the CPU; 0: one for each core (on GPUs always one for each)", {0, 256});
  flags.option("--threads", options.threads,
               "LibTorch's threads of the model by itself, and of each replica on the CPU",
               {1, 256});
  examples::parse(flags, argc, argv);
  return options;
}

/// Seconds of `n_reps` forwards: the median of each one's.
template <class Forward>
double seconds(Forward forward, int64_t n_reps) {
  forward();  // Not timed: memory is allocated, caches fill.
  std::vector<double> times;
  for (int64_t i = 0; i < n_reps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    forward();
    if (torch::cuda::is_available()) torch::cuda::synchronize();
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + n_reps / 2, times.end());
  return times[static_cast<size_t>(n_reps / 2)];
}

void measure(const Options& options) {
  at::set_num_threads(options.threads);
  const at::Device device(torch::cuda::is_available() ? at::kCUDA : at::kCPU);
  at::manual_seed(0);
  auto model = lockstep::make_model("fashion-cnn");
  model->to(device);
  model->eval();
  lockstep::DataParallelOptions parallel_options;
  parallel_options.threads_per_replica = options.threads;
  if (device.is_cpu()) {
    parallel_options.devices.resize(static_cast<size_t>(options.replicas), device);
  }
  lockstep::DataParallel<std::shared_ptr<lockstep::Model>> parallel(
      model, parallel_options, [] { return lockstep::make_model("fashion-cnn"); });

  const at::NoGradGuard no_grad;
  std::printf("%10s %14s %14s %8s   %zu replicas\n", "batch", "one model/ms", "replicas/ms",
              "speed-up", parallel.devices().size());
  for (const int64_t size : options.batch_sizes) {
    const at::Tensor batch = at::rand({size, 1, 28, 28}, at::device(device));
    const double one = seconds([&] { model->forward(batch); }, options.n_reps);
    const double several = seconds([&] { parallel.forward(batch); }, options.n_reps);
    std::printf("%10lld %14.3f %14.3f %8.2f\n", static_cast<long long>(size), one * 1e3,
                several * 1e3, one / several);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  measure(read_options(argc, argv));
  return 0;
} catch (...) {
  return examples::report_error();
}
