// `lockstep bench checkpoint`: saves of a strategy's state, beside memcpy, dd and Python's.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/words.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/checkpoint/sharded_save.h"
#include "tools/lockstep/bench/step_bench.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

/// In a process. One before them takes its memory, and does not count.
constexpr int kSaves = 3;

CheckpointShards shards_of(Strategy& strategy, int64_t step) {
  CheckpointShards shards;
  shards.info.step = step;
  shards.model = strategy.model_shards();
  for (TensorShard& shard : strategy.optimizer_shards()) {
    shard.name = "optimizer." + shard.name;
    shards.state.push_back(std::move(shard));
  }
  return shards;
}

/// Copies what a rank writes with memcpy, into memory that it has written to before.
class Memcpy {
 public:
  Memcpy(const ProcessGroup& group, Strategy& strategy) {
    detail::ShardedSave save(group, shards_of(strategy, 0));
    for (const at::Tensor* tensor : save.tensors()) {
      bytes_ += static_cast<int64_t>(tensor->nbytes());
      sources_.push_back(tensor->cpu().contiguous());
    }
    target_ = at::empty({bytes_}, at::kByte);
    run();
  }
  void run() {
    auto* out = static_cast<char*>(target_.mutable_data_ptr());
    for (const at::Tensor& source : sources_) {
      std::memcpy(out, source.const_data_ptr(), source.nbytes());
      out += source.nbytes();
    }
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<at::Tensor> sources_;
  at::Tensor target_;
  int64_t bytes_ = 0;
};

/// The seconds that the slowest rank takes, all beginning at once.
template <class Run>
double seconds_of(const ProcessGroup& group, const Run& run) {
  group.barrier();
  const auto start = BenchClock::now();
  run();
  double seconds = seconds_since(start);
  group.all_reduce_values(ReduceOp::max, seconds);
  return seconds;
}

/// As many bytes as all ranks write, by the tool that disks are measured with.
void run_dd(const fs::path& file, int64_t bytes) {
  const auto result =
      run_process({"dd", "if=/dev/zero", "of=" + file.string(), "bs=1M", "iflag=count_bytes",
                   "count=" + std::to_string(bytes), "conv=fsync"});
  expect_success("dd", result);
}

/// Saves in turns with memcpy and dd.
PlainJson measure_saves(Strategy& strategy, const ProcessGroup& group, const fs::path& folder,
                        int saves_wanted) {
  CheckpointWriter writer(group, CheckpointFolder(folder));
  Memcpy copy(group, strategy);
  int64_t bytes = copy.bytes(), rank_bytes = copy.bytes();
  group.all_reduce_values(bytes);
  group.all_reduce_values(ReduceOp::max, rank_bytes);
  Figures stalls, copies, saves, of_memcpy, of_dd;
  for (int i = 0; i <= saves_wanted; ++i) {
    const fs::path file = folder / "dd";
    const double dd = seconds_of(group, [&] {
      if (group.rank() == 0) run_dd(file, bytes);
    });
    if (group.rank() == 0) fs::remove(file);
    const double copied = seconds_of(group, [&] { copy.run(); });
    const double stall = seconds_of(group, [&] { writer.save(shards_of(strategy, i)); });
    const double written = seconds_of(group, [&] { writer.finish(); });
    // What dd wrote is removed beside the measurement, too.
    if (group.rank() == 0 && i > 0) fs::remove_all(folder / checkpoint_name(i - 1));
    if (i == 0) continue;
    stalls.push_back(stall * 1e3);
    saves.push_back(stall + written);
    of_memcpy.push_back(stall / copied);
    of_dd.push_back(dd / (stall + written));
  }
  return {{"bytes", bytes},
          {"rank_bytes", rank_bytes},
          {"stall_ms", median(stalls)},
          {"of_memcpy", median(of_memcpy)},
          {"seconds", median(saves)},
          {"of_dd", median(of_dd)}};
}

/// The most bytes of tensors that one of these ranks reads to go on.
PlainJson measure_read(Strategy& strategy, const ProcessGroup& group, const fs::path& folder) {
  const StoredCheckpoint stored = open_checkpoint(folder / "latest");
  const auto of_model = strategy.needed_of_model();
  const auto of_optimizer = strategy.needed_of_optimizer();
  const auto in = [](const auto& needed, const auto& key) {
    const auto found = needed.find(key);
    return found == needed.end() ? nullptr : &found->second;
  };
  read_tensors(stored, stored.model, "",
               [&](const std::string& name) { return in(of_model, name); });
  read_tensors(stored, stored.state, "optimizer.", [&](const std::string& name) {
    return in(of_optimizer, std::stoul(name.substr(name.rfind('.') + 1)));
  });
  int64_t most = *stored.bytes_read;
  group.all_reduce_values(ReduceOp::max, most);
  return {{"read_bytes", most}};
}

/// The rows of one configuration: saved, and read by one rank more.
BenchRow measure(BenchRunner& runner, BenchRow config) {
  const TemporaryDirectory folder("lockstep-bench");
  config["folder"] = folder.path().string();
  config["reads"] = false;
  BenchRow result = runner.run_ranks(false, config);
  config["reads"] = true;
  config["ranks"] = result["read_ranks"] = config["ranks"].get<int64_t>() + 1;
  result.update(runner.run_ranks(false, config));
  return result;
}

BenchRow row_of(BenchRunner& runner, const BenchRow& config) {
  const std::string& own = runner.options.backends.front();
  const std::string strategy = config["strategy"];
  const bool has_twin = strategy == "ddp" || strategy == "fsdp";
  const auto run = [&](const std::string& side) {
    if (side != kPythonSide) return measure(runner, config);
    const TemporaryDirectory folder("lockstep-bench");
    BenchRow python = config;
    python["folder"] = folder.path().string();
    return runner.run_ranks(true, python);
  };
  const Sides sides = runner.in_turns(
      "checkpoint, " + strategy + ", " + counted(config["ranks"].get<int64_t>(), "rank"),
      has_twin ? runner.sides() : std::vector<std::string>{own}, run);
  BenchRow row = pick(config, {"model", "strategy", "ranks"});
  for (const char* key : {"bytes", "rank_bytes", "read_ranks", "read_bytes"})
    row[key] = sides.at(own).front()[key];
  for (const char* key : {"stall_ms", "of_memcpy", "seconds", "of_dd"})
    row[key] = median_at(sides.at(own), std::string("/") + key);
  if (!runner.has_python()) return row;
  for (const char* key : {"torch_save_s", "dcp_stall_ms", "dcp_s"})
    row[key] = has_twin ? median_at(sides.at(kPythonSide), std::string("/") + key) : BenchRow();
  return row;
}

}  // namespace

PlainJson checkpoint_worker(const PlainJson& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  const auto folder = config.at("folder").get<std::string>();
  if (config.at("reads").get<bool>()) return measure_read(bench.strategy(), world.group(), folder);
  bench.draw_batch();
  bench.step();
  return measure_saves(bench.strategy(), world.group(), folder, config.at("saves"));
}

BenchRows bench_checkpoint(BenchRunner& runner) {
  BenchRows rows;
  for (BenchRow& config : cases_of(runner.options, "checkpoint")) {
    config["saves"] = kSaves;
    rows.push_back(row_of(runner, config));
  }
  return rows;
}

}  // namespace lockstep::tool
