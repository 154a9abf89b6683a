#include "tools/lockstep/train/train_flags.h"

#include <ATen/Context.h>

#include "lockstep/amp/precision.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/duration.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/data/dataset.h"
#include "lockstep/launch/binding.h"
#include "lockstep/launch/spawn_ranks.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/pipeline/partition.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/memory_format.h"
#include "tools/lockstep/train/placement.h"
#include "tools/lockstep/train/training.h"

namespace lockstep::tool {

void add_model_and_data_flags(Cli& cli, RunConfig& config) {
  cli.group("Model and data");
  cli.option("--model", config.model,
             join(model_names(), ", ") +
                 ", or a TorchScript file FILE.pt. gpt and resnet18 come in sizes: "
                 "gpt:layers=2,heads=2,channels=64,context=64,dropout=0.1 and resnet18:classes=10. "
                 "`linear` is trained with the mean squared error: the cross-entropy of its one "
                 "output, which the tutorial it comes from uses, is always 0 and trains nothing",
             "NAME");
  cli.option(
      "--dataset", config.dataset,
      join(dataset_names(), ", ") +
          ", file:PATH with tensors named data and targets (safetensors, npz, a folder of "
          "npy), text:PATH, any file as characters for gpt, or folder:PATH with a folder of JPEG "
          "and PNG images for each class, also below train and val",
      "NAME");
  cli.option(
      "--data-dir", config.data_dir,
      "Where the files of mnist, fashion-mnist and cifar10 lie; without it LOCKSTEP_DATA_DIR, else "
      "./data",
      "DIR");
  cli.flag("--download", config.download, "Fetch files of the data set that are missing");
  cli.option("--image-size", config.image_size,
             "Height and width to which images of a folder are scaled and cut", {1, 4096});
  cli.option("--num-workers", config.num_workers,
             "Threads that prepare batches; 0: the training thread does it", {0, 1024});
  cli.option(
      "--limit-test-batches", config.limit_test_batches,
      "Batches of held-out samples that each process uses at most; of 256 samples, but for gpt, "
      "resnet18 and files of --batch-size",
      {1});
}

void add_process_flags(Cli& cli, RunConfig& config) {
  cli.group("Processes");
  cli.option("--devices", config.devices,
             "Processes to start on this host; not under a launcher such as `lockstep run` or "
             "torchrun, which has started them already",
             {1, 4096});
  cli.choice("--accelerator", config.accelerator, {"auto", "cpu", "cuda", "gpu"},
             "Where to compute; auto: CUDA when every process has a device of its own");
  cli.choice("--backend", config.backend, backend_names(), "How processes communicate");
  cli.option(
      "--threads", config.threads,
      "Threads of LibTorch in a process; without it OMP_NUM_THREADS, else the cores that the "
      "host's processes share, in equal parts, but for small models fewer. `lockstep env` says "
      "how many",
      {1, 4096});
  cli.choice("--bind-to", config.bind_to, launch::binding_names(),
             "Keep each process to its part of the host's cores (core) or to a NUMA domain (numa); "
             "auto: numa where there are several domains and nobody else has bound the processes");
  cli.choice("--memory-format", config.memory_format, memory_format_names(),
             "Order of images and convolutions in memory; auto: channels-last for models with 2-d "
             "convolutions on the CPU, where it is faster, else contiguous, which gives Python's "
             "bits");
  cli.option("--timeout", config.timeout,
             "Seconds after which a wait for other processes is an error; without it "
             "LOCKSTEP_TIMEOUT, else 120",
             {0.001, std::chrono::duration<double>(kLongestTimeout).count()});
}

namespace {

/// "ddp: every rank has the whole model; zero1: ..."
std::string strategies_text() {
  std::vector<std::string> rows;
  for (const StrategyInfo& info : strategy_infos()) rows.push_back(info.name + ": " + info.summary);
  return join(rows, "; ");
}

}  // namespace

void add_training_flags(Cli& cli, RunConfig& config) {
  cli.group("Training");
  cli.choice("--strategy", config.strategy, strategy_names(),
             "How the model is spread over processes. " + strategies_text());
  cli.choice(
      "--precision", config.precision, precision_names(),
      "Numbers to compute in: 32 bits; -mixed: 32-bit parameters, of which autocast computes "
      "in 16 bits what can be; -true: parameters and all else in 16 bits");
  cli.choice(
      "--amp-level", config.amp_level, amp_level_names(),
      "Apex's levels: O0 is 32-true, O1 is 16-mixed, O2 is a 16-bit model whose optimizer and "
      "batch norm keep 32 bits, O3 is 16-true");
  cli.option("--loss-scale", config.loss_scale,
             "dynamic, or a number by which the loss is multiplied before backward; without it "
             "dynamic where gradients of 16 bits would vanish",
             "dynamic|N");
  cli.option("--mesh", config.mesh,
             "Named dimensions of the processes, such as dp=2,pp=2, for strategies that combine",
             "NAME=SIZE,...");
  cli.option("--num-micro-batches", config.num_micro_batches,
             "Parts into which --strategy pipeline cuts each batch; without it 4", {1});
  cli.option(
      "--pipeline-schedule", config.pipeline_schedule,
      "Order of work of --strategy pipeline: gpipe, 1f1b, interleaved-1f1b or zero-bubble; without "
      "it 1f1b",
      "NAME");
  cli.option("--pipeline-stages-per-rank", config.pipeline_stages_per_rank,
             "Stages of each process of a pipeline; 0: the schedule's own, 2 for interleaved-1f1b, "
             "else 1",
             {0});
  cli.option("--pipeline-plan", config.pipeline_plan,
             "Layers at which the second and all further stages begin; without it stages of equal "
             "cost",
             "LAYER,...");
  cli.choice("--pipeline-balance", config.pipeline_balance, pipeline_balance_names(),
             "What makes stages equal: the time of their layers, measured with zeros at the start, "
             "or their parameters; without it time");
  cli.option("--dp-replicas", config.dp_replicas,
             "Replicas of --strategy dp; without it one for each core or GPU", {1});
  cli.flag("--recompute-activations", config.recompute_activations,
           "A pipeline keeps only the inputs of its stages, and runs forward again in backward");
  cli.option("--max-epochs", config.max_epochs, "Passes over the data", {0});
  cli.option("--batch-size", config.batch_size,
             "Samples of a batch in each process; a step of N processes uses N times as many", {1});
  cli.flag(
      "--augment", config.augment,
      "Cut training images out and mirror them at random: with a margin of 4 pixels, those of a "
      "folder from images of 8/7 of --image-size");
  cli.choice("--optimizer", config.optimizer, optimizer_names(), "The optimizer");
  cli.option(
      "--lr", config.lr,
      "Learning rate; without it 0.05 for sgd (0.01 for the models with convolutions), 0.01 for "
      "adagrad, 1 for lbfgs, 0.001 for the others",
      {0});
  cli.option("--momentum", config.momentum, "Of sgd and rmsprop; without it 0.9 and 0", {0});
  cli.option("--weight-decay", config.weight_decay,
             "L2 penalty, for adamw decoupled from the gradient; without it 0.01 for adamw and 0 "
             "for the others, as in PyTorch",
             {0});
  cli.flag("--nesterov", config.nesterov, "Nesterov's momentum, for sgd");
  cli.choice("--line-search-fn", config.line_search_fn, line_search_names(),
             "How --optimizer lbfgs finds the length of a step; without it each iteration moves by "
             "--lr, as in PyTorch, which needs large batches");
  cli.option("--max-iter", config.max_iter, "Iterations of lbfgs in a step; without it 20", {1});
  cli.option("--history-size", config.history_size,
             "Iterations that lbfgs remembers, two copies of the model for each; without it 100",
             {1});
  cli.choice("--schedule", config.schedule, schedule_names(),
             "How the learning rate changes over the run");
  cli.option("--warmup-steps", config.warmup_steps,
             "Steps in which the learning rate rises to --lr", {0});
  cli.option("--lr-step-size", config.lr_step_size,
             "Epochs after which --schedule step multiplies the rate by --lr-gamma", {1});
  cli.option("--lr-gamma", config.lr_gamma, "See --lr-step-size");
  cli.option("--min-lr", config.min_lr, "Where --schedule cosine and linear end", {0});
  cli.option("--accumulate-grad-batches", config.accumulate_grad_batches,
             "Batches whose gradients are averaged for one step", {1});
  cli.option("--gradient-clip-val", config.gradient_clip_val,
             "Largest norm of all gradients together; 0: no clipping", {0});
  cli.option("--limit-train-batches", config.limit_train_batches,
             "Batches of an epoch that each process uses at most", {1});
  cli.choice("--on-nan", config.on_nan, {"stop", "skip", "proceed"},
             "What to do when a loss or gradient is NaN or infinite: stop with the step and rank, "
             "skip the step on all ranks, or proceed unchecked");
  cli.option("--early-stop-patience", config.early_stop_patience,
             "Stop after so many epochs without a lower test loss; 0: never", {0});
  cli.seed("--seed", config.seed,
           "Of weights and order of samples: as torch.manual_seed(S) right before the model and "
           "DistributedSampler(seed=S) in Python");
  cli.flag("--deterministic", config.deterministic,
           "Refuse operations whose result differs from run to run");
}

void add_output_flags(Cli& cli, RunConfig& config) {
  cli.group("Files");
  cli.option("--checkpoint-dir", config.checkpoint_dir,
             "Save checkpoints here, after each epoch and when a signal ends the run. One run at a "
             "time has the folder",
             "DIR");
  cli.option("--checkpoint-every", config.checkpoint_every,
             "Save one every so many steps too; 0: not within an epoch", {0});
  cli.option("--keep-checkpoints", config.keep_checkpoints, "The newest so many stay; 0: all", {0});
  cli.option(
      "--resume", config.resume,
      "none; auto: the newest whole checkpoint in --checkpoint-dir, if there is one; or a "
      "checkpoint's folder. Goes on to the same bits as a run that was not interrupted, with a "
      "warning where --lr, --schedule and the like are others",
      "auto|none|DIR");
  cli.option("--load-weights", config.load_weights,
             "Start from the weights of a safetensors file or a checkpoint's folder", "PATH");
  cli.option("--save-weights", config.save_weights, "Save the weights at the end as safetensors",
             "FILE");
  cli.option("--save-best", config.save_best,
             "Save the weights of the epoch with the lowest test loss as safetensors", "FILE");
  cli.option("--metrics-file", config.metrics_file, "Write metrics as JSON lines", "FILE");
  cli.group("Output");
  cli.option("--log-every-n-steps", config.log_every_n_steps,
             "Steps between lines, and between rows of --metrics-file", {1});
  cli.flag("--quiet", config.quiet, "Print the last line only");
}

namespace {

/// Who waits shall know what for: each rank sets up its share of the group and reads the data.
void tell_crowd(const RunConfig& config) {
  constexpr int64_t kWorthTelling = 8;  // A processor starts so many in a few seconds.
  const int processors = usable_processors();
  if (config.quiet || config.devices <= kWorthTelling * processors) return;
  log_info("starting " + counted(config.devices, "rank") + ", which share " +
           counted(processors, "processor") + ": it takes a while until all have come");
}

}  // namespace

bool spawn_ranks(const RunConfig& config, const std::string& command,
                 const std::function<int()>& run) {
  if (config.devices == 1) return false;
  if (!read_job_environment().started_as_rank()) {
    check_files(config);
    tell_crowd(config);
  }
  launch::SpawnCall call;
  // CUDA does not survive a fork.
  if (config.accelerator == "cpu" || !at::hasCUDA()) {
    call.body = [&] { return run_guarded(command, run); };
  }
  const auto role = launch::spawn_ranks(static_cast<int>(config.devices), {}, call);
  return role != launch::SpawnRole::worker;
}

void place_rank(const RunConfig& config) {
  apply(choose_placement(config.threads, config.bind_to, read_job_environment()));
}

std::string config_file_in(const std::vector<std::string>& args) {
  std::string file;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "--config" && i + 1 < args.size()) file = args[i + 1];
    if (args[i].starts_with("--config=")) file = args[i].substr(9);
  }
  return file;
}

}  // namespace lockstep::tool
