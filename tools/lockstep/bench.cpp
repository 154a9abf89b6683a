#include "bench.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "bench_process.h"
#include "cli.h"
#include "commands.h"
#include "env_python.h"
#include "env_report.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/backend.h"
#include "lockstep/models/models.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

const std::vector<std::string> kKinds = {"step",   "allreduce", "loader",
                                         "launch", "train",     "targets"};

std::string cell(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  const double size = std::abs(number);
  char text[32];
  std::snprintf(text, sizeof text, size >= 1000 ? "%.0f" : size >= 10 ? "%.1f" : "%.3f", number);
  return text;
}

void check(const BenchOptions& options) {
  for (const auto& model : options.models) model_info(model);
  for (const auto& name : options.backends) {
    const auto backend = backend_info(name);
    if (backend.available) continue;
    throw UsageError("--backend: " + name + " cannot be used: " + backend.reason, backend.remedy);
  }
  for (const int64_t bytes : options.sizes) {
    if (bytes < 4 || bytes % 4 != 0) {
      throw UsageError("--sizes: " + std::to_string(bytes) +
                       " is no whole number of float32 values; expected a multiple of 4");
    }
  }
}

void add_options(Cli& cli, BenchOptions& options, bool& json, std::string& output) {
  cli.group("What is measured");
  cli.list("--model", options.models, "Of step: " + join(model_names(), ", "));
  cli.option("--batch-size", options.batch_size,
             "Samples of a rank in a step; 0: 32 for step, 64 for loader and train", {0, 1e9});
  cli.list("--devices", options.devices, "Ranks; several are measured one after the other",
           {1, 1024});
  cli.list("--backend", options.backends, "Backends to compare");
  cli.list("--sizes", options.sizes, "Of allreduce: bytes of float32 values", {4, 1e11});
  cli.option("--steps", options.steps, "Timed steps, all-reduces or batches in a run", {1, 1e9});
  cli.option("--threads", options.threads, "Threads of a rank", {1, 1024});
  cli.option("--rounds", options.rounds,
             "Runs of each side, whose median counts; 0: 3, or 5 with --compare-python", {0, 1000});
  cli.option("--epochs", options.epochs, "Of train", {1, 1000});
  cli.option("--data-dir", options.data_dir,
             "Where MNIST lies, for loader and train; without it the built-in digits are taken",
             "DIR");
  cli.flag("--compare-python", options.compare_python,
           "Run the same work in Python in alternation, and show the ratios");
  cli.group("Output");
  cli.flag("--json", json, "One JSON object on standard output in place of the table");
  cli.option("--output", output, "Write the JSON object to this file too", "FILE");
}

Json report_of(const std::string& kind, const BenchOptions& options, const BenchRows& rows) {
  Json context = machine_context();
  context["threads"] = options.threads;
  context["steps"] = options.steps;
  context["rounds"] = options.rounds_or_default();
  if (options.compare_python) {
    const auto python = require_python_with_torch();
    context["python"] = python.version;
    context["python_torch"] = python.torch_version;
  }
  return {{"benchmark", kind}, {"context", context}, {"results", rows}};
}

BenchRows measure(const std::string& kind, const BenchOptions& options, bool print) {
  if (kind == "targets") return bench_targets(options, print);
  BenchRunner runner(options);
  if (kind == "step") return runner.step();
  if (kind == "allreduce") return runner.allreduce();
  if (kind == "loader") return runner.loader();
  if (kind == "launch") return runner.launch();
  return runner.train();
}

}  // namespace

std::string bench_table(const BenchRows& rows) {
  if (rows.empty()) return {};
  std::vector<std::vector<std::string>> lines(1);
  for (const auto& [key, value] : rows.front().items()) lines[0].push_back(key);
  for (const auto& row : rows) {
    lines.emplace_back();
    for (const auto& key : lines[0]) lines.back().push_back(cell(row[key]));
  }
  std::vector<size_t> widths(lines[0].size());
  for (const auto& line : lines) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t i = 0; i < widths.size(); ++i) {
      const bool number = rows.front()[lines[0][i]].is_number();
      const std::string padding(widths[i] - line[i].size(), ' ');
      if (i > 0) text += "  ";
      text += number ? padding + line[i] : line[i] + padding;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  }
  return text;
}

void bench_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K%s\r", text.c_str());
}

int bench_command(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "worker") return bench_worker(args[1]);
  BenchOptions options;
  bool json = false;
  std::string output;
  std::string kind;
  Cli cli(
      "lockstep bench",
      "Measures Lockstep on this machine, in fresh processes, and with --compare-python against "
      "the same work in Python.");
  cli.positional(
      "WHAT", kind,
      "step (a training step of a model), allreduce, loader (MNIST with normalisation), "
      "launch (lockstep run to the first all-reduce and out), train (lockstep train as a "
      "whole) or targets (all figures that the project promises, against Python)");
  add_options(cli, options, json, output);
  cli.example("lockstep bench step --model mlp,linear --devices 1,2 --compare-python");
  cli.example("lockstep bench allreduce --sizes 4,65536,4194304 --json");
  cli.example("lockstep bench targets", "What `make bench` prints");
  if (!cli.parse(args)) return 0;
  if (std::find(kKinds.begin(), kKinds.end(), kind) == kKinds.end()) {
    throw UsageError(unknown_word("benchmark", kind, kKinds));
  }
  check(options);
  if (kind == "targets") options.compare_python = true;

  const OrderlyInterrupts orderly_interrupts;
  const BenchRows rows = measure(kind, options, /*print=*/!json);
  bench_progress("");
  const std::string text = report_of(kind, options, rows).dump(2) + "\n";
  if (!output.empty()) write_file_atomically(output, text);
  if (json) {
    std::fputs(text.c_str(), stdout);
  } else if (kind != "targets") {
    std::fputs(bench_table(rows).c_str(), stdout);
  }
  return 0;
}

}  // namespace lockstep::tool
