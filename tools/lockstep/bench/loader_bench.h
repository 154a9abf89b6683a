#pragma once

#include <cstdint>
#include <functional>

#include "lockstep/data/dataset.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/transforms.h"

namespace lockstep {

/// Seconds since some moment, by the steady clock.
double steady_seconds();

struct LoaderBenchOptions {
  LoaderOptions loader{.batch_size = 64};  ///< 64: what the measured peers had.
  int epochs = 5;  ///< Measured ones, after one to warm up; the median is robust against one pause.
  std::function<double()> seconds = steady_seconds;  ///< Read before and after every epoch.
};

/// Samples per second that a loader gives when nobody computes on them: the median over epochs.
/// Whole shuffled epochs go through the pipeline, the sampler's work included. With no workers it
/// is the rate of one core.
double loader_samples_per_second(const TensorDataset& dataset, const Compose& transforms,
                                 const LoaderBenchOptions& options = {});

/// As large as MNIST's training part, of random bytes: for a benchmark where there is no MNIST.
TensorDataset random_images(int64_t count = 60000);

}  // namespace lockstep
