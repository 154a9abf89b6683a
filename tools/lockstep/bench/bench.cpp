#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/bench/mpirun.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/launch/binding.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/tool/cli.h"
#include "lockstep/tool/output_file.h"
#include "tools/lockstep/bench/pipeline_bench.h"
#include "tools/lockstep/bench/scaling.h"
#include "tools/lockstep/entry.h"
#include "tools/lockstep/env_python.h"
#include "tools/lockstep/env_report.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

/// A benchmark: what it measures, and which flags it takes beside those that all take.
struct Kind {
  std::string name;
  std::string summary;
  std::vector<std::string> flags;
  std::vector<std::string> examples;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"step",
       "Measures a training step of a model with each strategy, in microseconds.",
       {"--model", "--batch-size", "--devices", "--backend", "--strategy", "--optimizer",
        "--precision", "--steps", "--threads", "--bind-to", "--profile"},
       {"lockstep bench step --model mlp,linear --devices 1,2 --compare-python",
        "lockstep bench step --strategy ddp,zero1,fsdp --optimizer adam --devices 2",
        "lockstep bench step --model convnet --profile --trace step.json"}},
      {"data-parallel",
       "Measures the inference of a model with DataParallel on the CPU, in microseconds, beside "
       "the "
       "model by itself, for batches of several sizes, and says when replicas are faster, and why.",
       {"--model", "--batch-sizes", "--replicas", "--training", "--steps", "--threads"},
       {"lockstep bench data-parallel --model convnet,fashion-cnn --batch-sizes 1,64,1024"}},
      {"memory",
       "Measures what each rank keeps for training with each strategy, in bytes: parameters, "
       "gradients and optimizer state right after backward, and the peak memory of its process.",
       {"--model", "--batch-size", "--devices", "--backend", "--strategy", "--optimizer",
        "--precision", "--threads", "--bind-to"},
       {"lockstep bench memory --model wide --strategy ddp,zero1,zero2,fsdp --optimizer adam"}},
      {"scaling",
       "Measures the same job, epochs of training on all samples, with several numbers of ranks: "
       "time, speed-up, efficiency, and which parts of the steps limit the speed-up.",
       {"--model", "--batch-size", "--devices", "--backend", "--strategy", "--optimizer",
        "--precision", "--epochs", "--threads", "--bind-to", "--data-dir", "--plot"},
       {"lockstep bench scaling --devices 1,2 --model mlp,convnet --plot scaling.svg"}},
      {"allreduce",
       "Measures all-reduces of tensors of several sizes, in microseconds, beside a lower bound: "
       "the time to copy each tensor into shared memory and back (two reads and two writes of its "
       "bytes), on all ranks at once and without waiting for each other.",
       {"--devices", "--backend", "--sizes", "--steps", "--threads", "--bind-to"},
       {"lockstep bench allreduce --sizes 4,65536,4194304 --json"}},
      {"rpc",
       "Measures calls between two workers, in microseconds: a function of one-element tensors "
       "through LibTorch's RPC (own), the same in an autograd context (autograd) and by the fast "
       "path (fast), tensors sent there and back (echo), and 64 calls in flight to a layer that "
       "answers them one by one or 16 at a time (unbatched, batched).",
       {"--steps", "--threads", "--bind-to"},
       {"lockstep bench rpc --steps 2000 --compare-python"}},
      {"loader",
       "Measures the loader on MNIST with normalisation, in samples per second.",
       {"--batch-size", "--steps", "--threads", "--bind-to", "--data-dir"},
       {"lockstep bench loader --data-dir data --compare-python"}},
      {"launch",
       "Measures `lockstep run` from its start through the first all-reduce to its exit, in "
       "seconds.",
       {"--devices", "--backend", "--threads", "--bind-to"},
       {"lockstep bench launch --devices 2,4 --compare-python"}},
      {"train",
       "Measures `lockstep train` of an MLP on MNIST as a whole: seconds, memory, accuracy.",
       {"--batch-size", "--devices", "--backend", "--epochs", "--threads", "--bind-to",
        "--data-dir"},
       {"lockstep bench train --epochs 3 --compare-python"}},
      {"python",
       "Measures Python's DDP, all-reduces and launch over the backend \"lockstep\" against Gloo "
       "and torchrun, with 2 ranks. 'alone' is the step without communication, where each of the "
       "two processes is its own group: no backend can be faster. Needs the Python package.",
       {"--steps", "--threads"},
       {"LOCKSTEP_PYTHON=venv/bin/python lockstep bench python"}},
      {"targets",
       "Measures all figures that have a target, mostly against Python, and says which are met.",
       {"--steps", "--threads", "--bind-to", "--data-dir"},
       {"lockstep bench targets --output targets.json"}},
  };
  return all;
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const auto& kind : kinds()) names.push_back(kind.name);
  names.push_back("pipeline");
  return names;
}

void check_profile(const BenchOptions& options) {
  const auto needs_profile = [&](const char* flag, bool given) {
    if (given && !options.profile) throw UsageError(std::string(flag) + " needs --profile");
  };
  needs_profile("--operations", options.operations);
  needs_profile("--trace", !options.trace.empty());
  if (options.profile &&
      std::count(options.strategies.begin(), options.strategies.end(), "pipeline") > 0) {
    throw UsageError("--profile: a pipeline's forward and backward take turns in a step",
                     "`lockstep bench pipeline` shows where its time goes");
  }
  if (!options.profile) return;
  if (options.compare_python) {
    throw UsageError("--profile: Python's steps are not looked into; leave out --compare-python");
  }
  if (std::count(options.backends.begin(), options.backends.end(), "nccl") > 0) {
    throw UsageError(
        "--profile: with nccl a step's parts run on the device, which a profile of the "
        "processes does not see; expected another --backend");
  }
  const size_t runs =
      options.models.size() * options.backends.size() * options.devices_or({2}).size();
  if (!options.trace.empty() && runs > 1) {
    throw UsageError(
        "--trace: a trace holds one run, but " + std::to_string(runs) + " are asked for",
        "give one --model, one number of --devices and one --backend");
  }
}

/// A list is cut at its commas, also at those between the sizes of a model.
std::vector<std::string> with_sizes_joined(const std::vector<std::string>& words) {
  std::vector<std::string> models;
  for (const std::string& word : words) {
    const bool is_size = word.find('=') != std::string::npos && word.find(':') == std::string::npos;
    if (is_size && !models.empty()) {
      models.back() += "," + word;
    } else {
      models.push_back(word);
    }
  }
  return models;
}

/// Those whose step is one forward and backward. lbfgs makes as many as it likes.
std::vector<std::string> measured_optimizers() {
  std::vector<std::string> names = optimizer_names();
  std::erase(names, "lbfgs");
  return names;
}

void check(const BenchOptions& options) {
  for (const auto& model : options.models) {
    check_model_name("--model", model);
    if (!model_info(model).from_file) continue;
    throw UsageError("--model " + model + ": a TorchScript file does not tell what its batches are",
                     "expected one of " + join(model_names(), ", "));
  }
  expect_one_of("--optimizer", options.optimizer, measured_optimizers());
  for (const auto& name : options.strategies) expect_one_of("--strategy", name, strategy_names());
  for (const auto& name : options.precisions) {
    expect_one_of("--precision", name, precision_names());
  }
  std::vector<std::string> backends = {"auto"};
  for (const auto& backend : available_backends()) backends.push_back(backend.name);
  for (const auto& name : options.backends) {
    expect_one_of("--backend", name, backends);
    if (name == "auto") continue;
    const auto backend = backend_info(name);
    if (backend.available) continue;
    throw UsageError("--backend: " + name + " cannot be used: " + backend.reason, backend.remedy);
  }
  check_profile(options);
  for (const int64_t bytes : options.sizes) {
    if (bytes % 4 != 0) {
      throw UsageError("--sizes: " + std::to_string(bytes) +
                       " is no whole number of float32 values; expected a multiple of 4, or 0 "
                       "for a barrier");
    }
  }
}

void add_profile_options(Cli& cli, BenchOptions& options) {
  cli.group("Where the time goes");
  cli.flag("--profile", options.profile,
           "Print a table of the step's parts (data, forward, backward, communication, optimizer), "
           "with batches from a loader. Communication is exposed while the step waits for it, and "
           "hidden while backward computes. Times are means over the middle half of the steps, "
           "which add up, and medians, which need not. The table has rank 0's times, and the "
           "minimum and maximum over all ranks. Profiling costs some 0.5 us per step. Default of "
           "--devices with it: 2");
  cli.flag(
      "--operations", options.operations,
      "With --profile: also list LibTorch's operations by self time. This slows each operation by "
      "some 0.5 us");
  cli.option("--trace", options.trace,
             "With --profile: write all ranks' steps for Perfetto or Chrome's about:tracing",
             "FILE");
}

/// The flags of one benchmark.
void add_options(Cli& cli, const Kind& kind, BenchOptions& options) {
  const auto takes = [&](const char* flag) {
    return std::find(kind.flags.begin(), kind.flags.end(), flag) != kind.flags.end();
  };
  const bool of_steps = kind.name == "step" || kind.name == "memory" || kind.name == "scaling";
  const std::string batch_size = of_steps ? "0: 32, for gpt 8" : "0: 64";
  const bool several = kind.name != "train";
  const bool from_one = kind.name == "step" || kind.name == "scaling";
  const std::string devices = from_one ? "without it 1 and 2" : "without it 2";
  cli.group("What is measured");
  if (takes("--model")) {
    cli.list("--model", options.models,
             join(model_names(), ", ") + ", with sizes as `lockstep train` takes them");
  }
  if (takes("--optimizer")) {
    cli.option("--optimizer", options.optimizer,
               join(measured_optimizers(), ", ") + "; sgd has a momentum of 0.9", "NAME");
  }
  if (takes("--batch-size")) {
    cli.option("--batch-size", options.batch_size, "Samples of a rank in a step; " + batch_size,
               {0, 1e9});
  }
  if (takes("--batch-sizes")) {
    cli.list("--batch-sizes", options.batch_sizes, "Samples of a batch, one size after the other",
             {1, 1e7});
  }
  if (takes("--replicas")) {
    cli.option("--replicas", options.replicas, "Replicas; 0: one for each core", {0, 1024});
  }
  if (takes("--training")) {
    cli.flag("--training", options.training, "Measure forward and backward instead of inference");
  }
  if (takes("--devices")) {
    cli.also_called("--devices", {"--gpus", "--nproc-per-node"});
    cli.list("--devices", options.devices,
             (several ? "Ranks, several measured one after the other; " : "Ranks; ") + devices,
             {1, 1024});
  }
  if (takes("--strategy")) {
    cli.list("--strategy", options.strategies, join(strategy_names(), ", "));
    cli.list("--precision", options.precisions, join(precision_names(), ", "));
  }
  if (takes("--backend")) {
    cli.list("--backend", options.backends, several ? "Backends to compare" : "The backend");
  }
  if (takes("--sizes"))
    cli.list("--sizes", options.sizes, "Bytes of float32 values; 0: a barrier", {0, 1e11});
  if (takes("--steps")) {
    const std::string what = kind.name == "loader"          ? "Timed batches"
                             : kind.name == "allreduce"     ? "Timed all-reduces of each size"
                             : kind.name == "data-parallel" ? "Timed batches of each size"
                             : kind.name == "rpc"           ? "Timed calls of each kind"
                                                            : "Timed steps";
    cli.option("--steps", options.steps, what + " in a run", {1, 1e9});
  }
  if (takes("--threads")) cli.option("--threads", options.threads, "Threads of a rank", {1, 1024});
  if (takes("--profile")) add_profile_options(cli, options);
  if (takes("--bind-to")) {
    cli.choice(
        "--bind-to", options.bind_to, launch::binding_names(),
        "Keep each rank to its part of the cores or to a NUMA domain, as `lockstep train` does");
  }
  if (takes("--epochs")) cli.option("--epochs", options.epochs, "Passes over the data", {1, 1000});
  if (takes("--plot")) {
    cli.option("--plot", options.plot, "Draw speed-up over ranks into this file", "FILE.svg");
  }
  if (takes("--data-dir")) {
    cli.option(
        "--data-dir", options.data_dir,
        "Folder of MNIST; default: LOCKSTEP_DATA_DIR, else ./data. If MNIST is not there, the "
        "built-in digits are used",
        "DIR");
  }
}

void add_common_options(Cli& cli, const Kind& kind, BenchOptions& options, bool& json,
                        std::string& output) {
  const bool always = kind.name == "targets" || kind.name == "python";
  cli.option("--rounds", options.rounds,
             std::string("Runs of each side; the result is their median. 0: ") +
                 (always ? "5" : "3, or 5 with --compare-python"),
             {0, 1000});
  // Python's DataParallel refuses the CPU, and it has no strategy of each of our names.
  const bool python =
      kind.name != "memory" && kind.name != "scaling" && kind.name != "data-parallel";
  if (!always && python) {
    cli.flag("--compare-python", options.compare_python,
             "Run the same work in Python in turns, and show the ratios");
  }
  cli.group("Output");
  cli.flag("--json", json, "Print one JSON object instead of the table");
  cli.option("--output", output, "Write the JSON object to this file too", "FILE");
}

Json report_of(const std::string& kind, const BenchOptions& options, const BenchRows& rows) {
  Json context = machine_context();
  context["threads"] = options.threads;
  context["bind_to"] = options.bind_to;
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
  refuse_under_mpirun();
  if (kind == "data-parallel") return bench_data_parallel(options);
  BenchRunner runner(options);
  if (kind == "step") return options.profile ? runner.profiled_step() : runner.step();
  if (kind == "memory") return runner.memory();
  if (kind == "scaling") return runner.scaling();
  if (kind == "allreduce") return runner.allreduce();
  if (kind == "rpc") return runner.rpc();
  if (kind == "loader") return runner.loader();
  if (kind == "launch") return runner.launch();
  if (kind == "python") return runner.python_backend();
  return runner.train();
}

}  // namespace

void bench_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO)) {
    std::fprintf(stderr, "\r\033[K%s\r", text.c_str());
  } else if (!text.empty()) {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
}

namespace {

/// What `lockstep bench` without a known benchmark's name does: says which there are.
void explain(const std::vector<std::string>& args) {
  for (const auto& word : args) {
    if (!word.starts_with('-')) expect_one_of("WHAT", word, kind_names());
  }
  Cli cli(
      "lockstep bench",
      "Measures Lockstep on this machine, in fresh processes, and with --compare-python against "
      "the same work in Python. 'lockstep bench WHAT --help' lists a benchmark's flags.");
  std::string list;
  for (const auto& kind : kinds()) {
    list += (list.empty() ? "" : "; ") + kind.name + ": " + kind.summary.substr(9);
    if (list.ends_with('.')) list.pop_back();
    for (const auto& example : kind.examples) cli.example(example);
  }
  list += "; pipeline: " + std::string(kPipelineBenchSummary).substr(9);
  list.pop_back();
  std::string what;
  cli.positional("WHAT", what, list, /*required=*/false);
  if (!cli.parse(args)) return;
  throw UsageError("no benchmark named; expected one of " + join(kind_names(), ", "),
                   "lockstep bench step; 'lockstep bench --help' says what each measures");
}

int run_benchmark(const Kind& kind, const std::vector<std::string>& args) {
  BenchOptions options;
  if (kind.name == "data-parallel") {
    options.models = {"fashion-cnn"};
    options.steps = 10;
  }
  bool json = false;
  std::string output;
  Cli cli("lockstep bench " + kind.name, kind.summary);
  add_options(cli, kind, options);
  add_common_options(cli, kind, options, json, output);
  for (const auto& example : kind.examples) cli.example(example);
  if (!cli.parse(args)) return 0;
  options.models = with_sizes_joined(options.models);
  check(options);
  check_output_file("--output", output, "bench.json");
  check_output_file("--trace", options.trace, "trace.json");
  check_output_file("--plot", options.plot, "scaling.svg");
  if (kind.name == "targets" || kind.name == "python") options.compare_python = true;

  const OrderlyInterrupts orderly_interrupts;
  const BenchRows rows = measure(kind.name, options, /*print=*/!json);
  bench_progress("");
  const std::string text = report_of(kind.name, options, rows).dump(2) + "\n";
  if (!output.empty()) write_file_atomically(output, text);
  if (json) {
    print(text);
  } else if (kind.name != "targets") {
    print(options.profile          ? profile_tables(rows)
          : kind.name == "scaling" ? scaling_text(rows)
                                   : bench_table(rows));
  }
  return 0;
}

int bench_command(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "worker") return bench_worker(args[1]);
  if (!args.empty() && args[0] == "pipeline") return bench_pipeline({args.begin() + 1, args.end()});
  for (auto word = args.begin(); word != args.end(); ++word) {
    for (const auto& kind : kinds()) {
      if (*word != kind.name && (*word != "all-reduce" || kind.name != "allreduce")) continue;
      std::vector<std::string> rest(args.begin(), word);
      rest.insert(rest.end(), word + 1, args.end());
      return run_benchmark(kind, rest);
    }
  }
  explain(args);
  return 0;
}

}  // namespace
}  // namespace lockstep::tool

int lockstep_bench_main(int argc, char** argv) {
  using namespace lockstep::tool;
  const std::vector<std::string> args(argv + std::min(argc, 2), argv + argc);
  return run_guarded("lockstep bench", [&] { return bench_command(args); });
}
