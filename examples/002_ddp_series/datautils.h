// What the three programs of this folder share: the data set (the series' datautils.py), the flags,
// and reading and writing a model.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

#include "common/program.h"
#include "lockstep/data/dataset.h"

namespace series {

/// `size` samples of 20 random numbers in [0, 1) each, with a random number as the target. In
/// Python `[(torch.rand(20), torch.rand(1)) for _ in range(size)]` gives the same. Seeded, so that
/// all processes hold the same data, of which each sees its share.
inline lockstep::TensorDataset make_train_dataset(int64_t size) {
  lockstep::DatasetOptions options;
  options.random_train = size;
  return lockstep::load_dataset("random", options).train;
}

struct Args {
  int total_epochs = 0;
  int save_every = 0;
  int64_t batch_size = 32;
};

/// The positional arguments and the flag of the series' scripts. `add_more` may add flags.
template <class AddMore>
Args read_args(int argc, char** argv, AddMore add_more) {
  Args args;
  examples::Flags flags("simple distributed training job");
  flags.positional("total_epochs", args.total_epochs, "Total epochs to train the model", {0});
  flags.positional("save_every", args.save_every, "How often to save a snapshot", {1});
  flags.option("--batch-size", args.batch_size, "Input batch size on each device; --batch_size too",
               {1});
  add_more(flags);
  examples::parse(flags, argc, argv);
  return args;
}

inline Args read_args(int argc, char** argv) {
  return read_args(argc, argv, [](examples::Flags&) {});
}

}  // namespace series
