// The flags of both programs of this folder: the tutorial's `main`, which defines them all for the
// program without multiprocessing too, "to put the whole skeleton in place".
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "examples/common/data.h"
#include "examples/common/program.h"
#include "lockstep/base/error.h"

namespace tutorial {

struct Options {
  int nodes = 1;
  int gpus = 1;
  int nr = 0;
  int epochs = 2;
  int64_t batch_size = 100;
  std::string backend = "auto";
  examples::DataOptions data;
};

inline Options read_options(const std::string& about, int argc, char** argv) {
  Options options;
  CLI::App app(about);
  app.add_option("-n,--nodes", options.nodes, "number of nodes")->check(CLI::PositiveNumber);
  app.add_option("-g,--gpus", options.gpus, "number of gpus per node")->check(CLI::PositiveNumber);
  app.add_option("--nr", options.nr, "-nr: ranking within the nodes")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--epochs", options.epochs, "number of total epochs to run")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--batch-size", options.batch_size, "samples of a process in a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--backend", options.backend, "auto, gloo or nccl")->capture_default_str();
  app.add_option("--data-dir", options.data.dir, "where MNIST lies")->capture_default_str();
  app.add_flag("--download", options.data.download, "fetch MNIST when it is not there");
  app.add_option("--limit", options.data.limit, "use so many samples only; 0: all");
  examples::parse(app, argc, argv, {"-nr"});
  if (options.nr >= options.nodes) {
    throw lockstep::UsageError("-nr " + std::to_string(options.nr) + " is not below -n " +
                               std::to_string(options.nodes));
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
