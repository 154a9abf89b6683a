// `lockstep bench`: the one table of benches, their flags and what is printed.
#include "tools/lockstep/bench/bench.h"

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
#include "tools/lockstep/entry.h"
#include "tools/lockstep/env_report.h"

namespace lockstep::tool {
namespace {

/// Of all benches that train.
const std::string kOfSteps =
    "--model --batch-size --devices --backend --strategy --optimizer --threads --bind-to ";

std::vector<std::string> bench_names() {
  std::vector<std::string> names;
  for (const auto& bench : benches()) names.push_back(bench.name);
  return names;
}

void check_profile(const BenchOptions& options) {
  if (!options.profile) {
    if (!options.operations && options.trace.empty()) return;
    throw UsageError(std::string(options.operations ? "--operations" : "--trace") +
                     " needs --profile");
  }
  const auto is_staged = [&](const std::string& strategy) {
    return is_pipeline(strategy, {.mesh = options.mesh});
  };
  if (std::ranges::any_of(options.strategies, is_staged)) {
    throw UsageError("--profile: a pipeline's forward and backward take turns in a step",
                     "`lockstep bench pipeline` shows where its time goes");
  }
  if (options.compare_python) {
    throw UsageError("--profile: Python's steps are not looked into; leave out --compare-python");
  }
  if (std::count(options.backends.begin(), options.backends.end(), "nccl") > 0) {
    throw UsageError(
        "--profile: with nccl a step's parts run on the device, which a profile of the "
        "processes does not see; expected another --backend");
  }
  const size_t runs = options.models.size() * options.backends.size() * options.devices.size();
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

void check(const BenchOptions& options) {
  if (options.compare_python && !options.mesh.empty())
    throw UsageError("--mesh does not go with --compare-python, whose ranks have one dimension",
                     "leave one of the two out");
  for (const auto& model : options.models) {
    check_model_name("--model", model);
    if (!model_info(model).from_file) continue;
    throw UsageError("--model " + model + ": a TorchScript file does not tell what its batches are",
                     "expected one of " + join(model_names(), ", "));
  }
  for (const auto& name : options.strategies) expect_one_of("--strategy", name, strategy_names());
  for (const auto& name : options.precisions) expect_one_of("--precision", name, precision_names());
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

void add_pipeline_options(Cli& cli, BenchOptions& options) {
  PipelineBenchOptions& pipeline = options.pipeline;
  cli.list("--schedule", pipeline.schedules, "Schedules");
  cli.list("--stages", options.devices,
           "Ranks of the pipeline, each of which has a stage, or several: see --stages-per-rank",
           {1, 64});
  cli.list("--num-micro-batches", pipeline.micro_batches, "Parts of a batch", {1, 1024});
  cli.option("--stages-per-rank", pipeline.stages_per_rank,
             "0: the schedule's own, 2 for interleaved-1f1b, else 1", {0, 64});
  cli.option("--forward", pipeline.costs.forward, "Time of a stage's forward", {0, 1e6});
  cli.option("--backward-input", pipeline.costs.backward_input,
             "Time of backward for the stage's input", {0, 1e6});
  cli.option("--backward-weight", pipeline.costs.backward_weight,
             "Time of backward for the stage's weights", {0, 1e6});
  cli.option("--transfer", pipeline.transfer, "Time of a message between two ranks", {0, 1e6});
  cli.option("--sleep-ms", pipeline.sleep_ms,
             "Also run the schedule in threads, with stages that sleep this many milliseconds per "
             "unit of time; 0: simulate only",
             {0, 10'000});
}

/// The flags of one benchmark, in the order of --help.
void add_options(Cli& cli, const Bench& bench, BenchOptions& options) {
  const auto flags = split(bench.flags, ' ');
  const auto takes = [&](const char* flag) {
    return std::find(flags.begin(), flags.end(), flag) != flags.end();
  };
  cli.group("What is measured");
  if (takes("--model"))
    cli.list("--model", options.models,
             join(model_names(), ", ") + ", with sizes as `lockstep train` takes them");
  std::vector<std::string> optimizers = optimizer_names();
  std::erase(optimizers, "lbfgs");  // Its step is as many passes as it likes.
  if (takes("--optimizer"))
    cli.choice("--optimizer", options.optimizer, optimizers, "sgd has a momentum of 0.9");
  if (takes("--batch-size"))
    cli.option("--batch-size", options.batch_size,
               std::string("Samples of a rank in a step; 0: ") +
                   (takes("--strategy") ? "32, for gpt 8" : "64"),
               {0, 1e9});
  if (takes("--batch-sizes"))
    cli.list("--batch-sizes", options.batch_sizes, "Samples of a batch, one size after the other",
             {1, 1e7});
  if (takes("--replicas"))
    cli.option("--replicas", options.replicas, "Replicas; 0: one for each core", {0, 1024});
  if (takes("--training"))
    cli.flag("--training", options.training, "Measure forward and backward instead of inference");
  if (takes("--devices")) {
    cli.also_called("--devices", {"--gpus", "--nproc-per-node"});
    cli.list("--devices", options.devices, "Ranks, several measured one after the other",
             {1, 1024});
  }
  if (takes("--strategy")) {
    cli.list("--strategy", options.strategies, join(strategy_names(), ", "));
    cli.option("--mesh", options.mesh, "Dimensions of the ranks, as `lockstep train` takes them",
               "NAME=SIZE,...");
    cli.list("--precision", options.precisions, join(precision_names(), ", "));
  }
  if (takes("--schedule")) add_pipeline_options(cli, options);
  if (takes("--backend")) cli.list("--backend", options.backends, "Backends to compare");
  if (takes("--sizes"))
    cli.list("--sizes", options.sizes, "Bytes of float32 values; 0: a barrier", {0, 1e11});
  if (takes("--steps"))
    cli.option("--steps", options.steps,
               "Timed steps, all-reduces, batches or calls in a run, of each kind", {1, 1e9});
  if (takes("--threads")) cli.option("--threads", options.threads, "Threads of a rank", {1, 1024});
  if (takes("--profile")) add_profile_options(cli, options);
  if (takes("--bind-to"))
    cli.choice(
        "--bind-to", options.bind_to, launch::binding_names(),
        "Keep each rank to its part of the cores or to a NUMA domain, as `lockstep train` does");
  if (takes("--kills")) {
    cli.option("--kills", options.kills, "Kills of each side", {1, 1e6});
    cli.option("--kill-every", options.kill_every, "Seconds between two kills, for goodput",
               {0.1, 3600});
    cli.seed("--seed", options.seed, "Of who is killed when");
  }
  if (takes("--epochs")) cli.option("--epochs", options.epochs, "Passes over the data", {1, 1000});
  if (takes("--data-dir"))
    cli.option(
        "--data-dir", options.data_dir,
        "Folder of MNIST; default: LOCKSTEP_DATA_DIR, else ./data. If MNIST is not there, the "
        "built-in digits are used",
        "DIR");
  cli.option("--rounds", options.rounds,
             std::string("Runs of each side; the result is their median. 0: ") +
                 (options.compare_python ? "5" : "3, or 5 with --compare-python"),
             {0, 1000});
  if (takes("--compare-python"))
    cli.flag("--compare-python", options.compare_python,
             "Run the same work in Python in turns, and show the ratios");
  cli.group("Output");
  if (takes("--plot"))
    cli.option("--plot", options.plot, "Draw the schedule's timeline", "FILE.svg");
  cli.flag("--json", options.json, "Print one JSON object instead of the table");
  cli.option("--output", options.output, "Write the JSON object to this file too", "FILE");
}

BenchRow report_of(const BenchRunner& runner, const std::string& name, const BenchRows& rows) {
  const BenchOptions& options = runner.options;
  BenchRow context = machine_context();
  context["threads"] = options.threads;
  context["bind_to"] = options.bind_to;
  context["steps"] = options.steps;
  context["rounds"] = options.rounds_or_default();
  if (runner.has_python()) {
    context["python"] = runner.python().version;
    context["python_torch"] = runner.python().torch_version;
  }
  return {{"benchmark", name}, {"context", context}, {"results", rows}};
}

}  // namespace

void bench_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO)) {
    std::fprintf(stderr, "\r\033[K%s\r", text.c_str());
  } else if (!text.empty()) {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
}

const std::vector<Bench>& benches() {
  static const std::vector<Bench> all = {
      {"step",
       "Measures a training step of a model with each strategy, in microseconds.",
       kOfSteps + "--steps --profile --compare-python",
       {"lockstep bench step --model mlp,linear --devices 1,2 --compare-python",
        "lockstep bench step --strategy ddp,zero1,fsdp --optimizer adam --devices 2",
        "lockstep bench step --model convnet --profile --trace step.json"},
       bench_step,
       step_worker,
       step_text,
       {.devices = {1, 2}}},
      {"data-parallel",
       "Measures the inference of a model with DataParallel on the CPU, in microseconds, beside "
       "the model by itself, for batches of several sizes, and says when replicas are faster, and "
       "why.",
       "--model --batch-sizes --replicas --training --steps --threads",
       {"lockstep bench data-parallel --model convnet,fashion-cnn --batch-sizes 1,64,1024"},
       bench_data_parallel,
       data_parallel_worker,
       bench_table,
       {.models = {"fashion-cnn"}, .steps = 10}},
      {"memory",
       "Measures what each rank keeps for training with each strategy, in bytes: parameters, "
       "gradients and optimizer state right after backward, and the peak memory of its process.",
       kOfSteps,
       {"lockstep bench memory --model wide --strategy ddp,zero1,zero2,fsdp --optimizer adam"},
       bench_memory,
       memory_worker},
      {"scaling",
       "Measures the same job, epochs of training on all samples, with several numbers of ranks: "
       "time, speed-up, efficiency, and which parts of the steps limit the speed-up.",
       kOfSteps + "--epochs",
       {"lockstep bench scaling --devices 1,2 --model mlp,convnet --output scaling.json"},
       bench_scaling,
       scaling_worker,
       scaling_text,
       {.devices = {1, 2}}},
      {"checkpoint",
       "Measures saves of a strategy's state to the disk of TMPDIR: how long training waits, "
       "beside a memcpy of the state, and how fast it is written, beside dd with conv=fsync. Also "
       "how many bytes a rank writes, and reads where there is one rank more. Python's side is "
       "torch.save and torch.distributed.checkpoint's async_save.",
       kOfSteps + "--compare-python",
       {"lockstep bench checkpoint --model gpt --strategy ddp,zero2,fsdp --compare-python"},
       bench_checkpoint,
       checkpoint_worker,
       bench_table,
       {.models = {"gpt"}, .optimizer = "adam"}},
      {"allreduce",
       "Measures all-reduces of tensors of several sizes, in microseconds, beside a lower bound: "
       "the time to copy each tensor into shared memory and back (two reads and two writes of its "
       "bytes), on all ranks at once and without waiting for each other.",
       "--devices --backend --sizes --steps --threads --bind-to --compare-python",
       {"lockstep bench allreduce --sizes 4,65536,4194304 --json"},
       bench_allreduce,
       allreduce_worker},
      {"recovery",
       "Measures how a job goes on after kill -9 of a rank, in seconds: an MLP on MNIST whose "
       "ranks live on (ours), or all start again from checkpoints (restart), and torchrun with "
       "Python's DDP. A row takes minutes.",
       "--kills --devices --threads --data-dir --compare-python",
       {"lockstep bench recovery --kills 100 --devices 2,4 --json"},
       bench_recovery,
       recovery_worker,
       bench_table,
       {.compare_python = true}},
      {"rpc",
       "Measures calls between two workers, in microseconds: a function of one-element tensors "
       "through LibTorch's RPC (own), the same in an autograd context (autograd) and by the fast "
       "path (fast), tensors sent there and back (echo), and 64 calls in flight to a layer that "
       "answers them one by one or 16 at a time (unbatched, batched).",
       "--steps --threads --bind-to --compare-python",
       {"lockstep bench rpc --steps 2000 --compare-python"},
       bench_rpc,
       rpc_worker},
      {"loader",
       "Measures the loader on MNIST with normalisation, in samples per second.",
       "--batch-size --steps --threads --bind-to --data-dir --compare-python",
       {"lockstep bench loader --data-dir data --compare-python"},
       bench_loader,
       loader_worker},
      {"launch",
       "Measures `lockstep run` from its start through the first all-reduce to its exit, in "
       "seconds.",
       "--devices --backend --threads --bind-to --compare-python",
       {"lockstep bench launch --devices 2,4 --compare-python"},
       bench_launch,
       launch_worker},
      {"train",
       "Measures `lockstep train` of an MLP on MNIST as a whole: seconds, memory, accuracy.",
       "--batch-size --devices --backend --epochs --threads --bind-to --data-dir --compare-python",
       {"lockstep bench train --epochs 3 --compare-python"},
       bench_train},
      {"python",
       "Measures Python's DDP, all-reduces and launch over the backend \"lockstep\" against Gloo "
       "and torchrun, with 2 ranks. 'alone' is the step without communication, where each of the "
       "two processes is its own group: no backend can be faster. Needs the Python package.",
       "--steps --threads",
       {"LOCKSTEP_PYTHON=venv/bin/python lockstep bench python"},
       bench_python,
       nullptr,
       bench_table,
       {.compare_python = true}},
      {"targets",
       "Measures all figures that have a target, mostly against Python, and says which are met.",
       "--steps --threads --bind-to --data-dir",
       {"lockstep bench targets --output targets.json"},
       bench_targets,
       nullptr,
       [](const BenchRows&) { return std::string(); },  // It has printed each as it was measured.
       {.compare_python = true}},
      {"pipeline",
       "Measures how much of a pipeline's time is bubble, by a simulated clock and with stages "
       "that sleep instead of computing, beside the formula of the schedule's authors.",
       "--schedule --plot",
       {"lockstep bench pipeline --stages 2,4 --num-micro-batches 4,8 --sleep-ms 20",
        "lockstep bench pipeline --schedule zero-bubble --stages 4 --plot zero-bubble.svg"},
       bench_pipeline,
       nullptr,
       bench_table,
       {.devices = {2, 4}}},
  };
  return all;
}

const Bench& bench_named(const std::string& name) {
  expect_one_of("WHAT", name, bench_names());
  const auto is_named = [&](const Bench& bench) { return bench.name == name; };
  return *std::find_if(benches().begin(), benches().end(), is_named);
}

std::optional<BenchOptions> parse_bench(const Bench& bench, const std::vector<std::string>& args) {
  BenchOptions options = bench.defaults;
  Cli cli("lockstep bench " + bench.name, bench.summary);
  add_options(cli, bench, options);
  for (const auto& example : bench.examples) cli.example(example);
  if (!cli.parse(args)) return std::nullopt;
  options.models = with_sizes_joined(options.models);
  if (options.profile && !cli.given("--devices")) options.devices = {2};
  check(options);
  check_output_file("--output", options.output, "bench.json");
  check_output_file("--trace", options.trace, "trace.json");
  check_output_file("--plot", options.plot, bench.name + ".svg");
  return options;
}

namespace {

/// What `lockstep bench` without a known benchmark's name does: says which there are.
void explain(const std::vector<std::string>& args) {
  Cli cli(
      "lockstep bench",
      "Measures Lockstep on this machine, in fresh processes, and with --compare-python against "
      "the same work in Python. 'lockstep bench WHAT --help' lists a benchmark's flags.");
  std::string list;
  for (const auto& bench : benches()) {
    const std::string what = bench.summary.substr(std::string("Measures ").size());
    list +=
        (list.empty() ? "" : "\n") + bench.name + ": " + what.substr(0, what.find_first_of(".:"));
    for (const auto& example : bench.examples) cli.example(example);
  }
  std::string what;
  cli.positional("WHAT", what, list, /*required=*/false, bench_names());
  if (!cli.parse(args)) return;
  throw UsageError("no benchmark named; expected one of " + join(bench_names(), ", "),
                   "lockstep bench step; 'lockstep bench --help' says what each measures");
}

int run_benchmark(const Bench& bench, const std::vector<std::string>& args) {
  const auto options = parse_bench(bench, args);
  if (!options) return 0;

  const auto interrupts_wait = hold_interrupts();
  BenchRunner runner(*options);
  const BenchRows rows = bench.measure(runner);
  bench_progress("");
  const std::string text = report_of(runner, bench.name, rows).dump(2) + "\n";
  if (!options->output.empty()) write_file_atomically(options->output, text);
  print(options->json ? text : bench.text(rows));
  return 0;
}

int bench_command(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "worker") return run_worker(args[1]);
  const bool asks = !args.empty() && args[0] == "--help";  // `lockstep help bench step`
  const size_t at = asks ? 1 : 0;
  if (args.size() <= at || args[at].starts_with('-')) {
    explain(args);
    return 0;
  }
  std::vector<std::string> rest = args;
  rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(at));
  return run_benchmark(bench_named(args[at]), rest);
}

}  // namespace
}  // namespace lockstep::tool

int lockstep_bench_main(const std::vector<std::string>& words) {
  using namespace lockstep::tool;
  return run_guarded("lockstep bench", [&] {
    return bench_command({words.begin() + 1, words.end()});
  });
}
