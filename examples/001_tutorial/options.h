// The flags of the programs of this folder. The tutorial's `main` defines them all for the program
// without multiprocessing too, "to put the whole skeleton in place".
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "common/data.h"
#include "common/program.h"
#include "lockstep/amp/precision.h"

namespace tutorial {

struct Options {
  int nodes = 1;
  int gpus = 1;
  int nr = 0;
  int epochs = 2;
  int64_t batch_size = 100;
  std::string backend = "auto";
  std::string opt_level = "O2";
  std::string loss_scale;
  examples::DataOptions data;
};

inline Options read_options(const std::string& about, int argc, char** argv, bool mixed = false) {
  Options options;
  examples::Flags flags(about);
  flags.option("-n,--nodes", options.nodes, "number of nodes", {1});
  flags.option("-g,--gpus", options.gpus, "number of gpus per node", {1});
  flags.option("--nr", options.nr, "-nr: ranking within the nodes", {0});
  flags.option("--epochs", options.epochs, "number of total epochs to run", {0});
  flags.option("--batch-size", options.batch_size, "samples of a process in a step", {1});
  flags.option("--backend", options.backend, "auto, gloo or nccl", "NAME");
  if (mixed) {
    flags.option("--opt-level", options.opt_level, "Apex's level: O0, O1, O2 or O3", "LEVEL");
    flags.option("--loss-scale", options.loss_scale,
                 "'dynamic', or a number that the loss is multiplied by (default: the level's)",
                 "SCALE");
  }
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv, {"-nr"});
  examples::check_node_rank("-nr", options.nr, options.nodes);
  // Before any process starts, so that a mistake is told once.
  if (mixed) {
    lockstep::Precision({.amp_level = options.opt_level, .loss_scale = options.loss_scale});
  }
  return options;
}

/// "0:01:02.345678", as Python prints a timedelta.
inline std::string duration_text(std::chrono::steady_clock::duration duration) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
  const auto s = us / 1'000'000;
  char text[48];
  std::snprintf(text, sizeof text, "%lld:%02lld:%02lld.%06lld", static_cast<long long>(s / 3600),
                static_cast<long long>(s / 60 % 60), static_cast<long long>(s % 60),
                static_cast<long long>(us % 1'000'000));
  return text;
}

}  // namespace tutorial
