// `lockstep bench rpc`: calls between two workers, beside Python's.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <deque>

#include "lockstep/rpc/rpc.h"
#include "tools/lockstep/bench/runner_impl.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

/// A policy's layer, as a server of many small requests has it.
constexpr int64_t kWidth = 1024;
/// So many calls are under way in the rows of throughput, and so many make a batch.
constexpr size_t kInFlight = 64;
constexpr int64_t kBatch = 16;
/// Calls of a large echo before its time counts: each of the threads that run functions, 16 on both
/// sides, takes memory for its first.
constexpr int64_t kEchoWarmup = 64;

/// Registered when a worker starts, not when the library is loaded.
struct Functions {
  using Add = rpc::Function<at::Tensor(at::Tensor, at::Tensor)>;
  using Echo = rpc::Function<at::Tensor(at::Tensor)>;
  using Batched = rpc::Function<rpc::Future<at::Tensor>(at::Tensor)>;

  at::Tensor weights = at::ones({kWidth, kWidth});
  Add add =
      rpc::function("bench.add", [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
  Echo echo = rpc::function("bench.echo", [](const at::Tensor& a) { return a; });
  Echo unbatched = rpc::function(
      "bench.unbatched", [w = weights](const at::Tensor& state) { return state.matmul(w); });
  Batched batched = rpc::batched("bench.batched",
                                 [w = weights](const std::vector<at::Tensor>& states) {
                                   return at::stack(states).matmul(w).unbind();
                                 },
                                 {.size = kBatch});
};

PlainJson latency(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const double p50 = times[times.size() / 2], p99 = times[times.size() * 99 / 100];
  return {{"p50_us", p50}, {"p99_us", p99}, {"calls_per_s", 1e6 / p50}};
}

template <class Run>
PlainJson time_each(Run run, int64_t warmup, int64_t steps) {
  for (int64_t i = 0; i < warmup; ++i) run();
  std::vector<double> times;
  time_calls(run, steps, times);
  return latency(std::move(times));
}

/// Batches come out even, as in the twin: a last one that is not full would wait for its delay.
template <class Function>
PlainJson throughput(const Function& function, int64_t calls) {
  calls = (calls + kBatch - 1) / kBatch * kBatch;
  const at::Tensor state = at::ones({kWidth});
  const auto run = [&](int64_t count) {
    std::deque<rpc::Future<at::Tensor>> under_way;
    for (int64_t i = 0; i < count; ++i) {
      if (under_way.size() == kInFlight) {
        under_way.front().wait();
        under_way.pop_front();
      }
      under_way.push_back(rpc::call_async("server", function, state));
    }
    for (const auto& call : under_way) call.wait();
  };
  run(4 * kInFlight);  // The first calls start threads and take memory, as those one at a time do.
  const auto start = BenchClock::now();
  run(calls);
  const double us = seconds_since(start) * 1e6 / static_cast<double>(calls);
  return {{"p50_us", us}, {"p99_us", nullptr}, {"calls_per_s", 1e6 / us}};
}

PlainJson measure_calls(const Functions& functions, const PlainJson& config) {
  const int64_t warmup = config.at("warmup"), steps = config.at("steps");
  const at::Tensor one = at::ones({1});
  PlainJson results = PlainJson::array();
  for (const auto& row : config.at("rows")) {
    const std::string call = row.at("call");
    const int64_t bytes = row.at("bytes");
    if (call == "own" || call == "fast" || call == "tcp") {
      results.push_back(
          time_each([&] { rpc::call("server", functions.add, one, one); }, warmup, steps));
    } else if (call == "autograd") {
      const at::Tensor leaf = at::ones({1}).requires_grad_();
      results.push_back(time_each(
          [&] {
            const rpc::AutogradContext context;
            rpc::call("server", functions.add, leaf, one);
          },
          warmup, steps));
    } else if (call == "echo") {
      const at::Tensor tensor = at::ones({bytes / 4});
      results.push_back(time_each([&] { rpc::call("server", functions.echo, tensor); }, kEchoWarmup,
                                  row.at("steps")));
    } else if (call == "unbatched") {
      results.push_back(throughput(functions.unbatched, steps));
    } else {
      results.push_back(throughput(functions.batched, steps));
    }
  }
  return results;
}

/// The rows, with fewer calls for large tensors. First that which goes LibTorch's way, last that
/// which goes over TCP, as calls between hosts do.
PlainJson rows_to_measure(int64_t steps) {
  PlainJson rows = {{{"call", "own"}, {"bytes", 4}},
                    {{"call", "autograd"}, {"bytes", 4}},
                    {{"call", "fast"}, {"bytes", 4}}};
  for (const int64_t bytes : {65'536, 4'194'304}) {
    rows.push_back({{"call", "echo"},
                    {"bytes", bytes},
                    {"steps", bytes > 1'000'000 ? std::max<int64_t>(steps / 10, 5) : steps}});
  }
  for (const char* call : {"unbatched", "batched"}) {
    rows.push_back({{"call", call}, {"bytes", kWidth * 4}});
  }
  rows.push_back({{"call", "tcp"}, {"bytes", 4}});
  return rows;
}

/// What way a row's calls go: that of the row "own", "tcp" or "fast".
std::string way_of(const BenchRow& row) {
  const std::string call = row.at("call");
  return call == "own" || call == "tcp" ? call : "fast";
}

/// The results of one round, each way from a start of its own.
template <class Run>
BenchRow measure_round(BenchRow config, const Run& run) {
  const BenchRow wanted = config.at("rows");
  BenchRow results = BenchRow::array();
  for (const char* way : {"own", "fast", "tcp"}) {
    config["fast_calls"] = way != std::string("own");
    config["shared_memory"] = way != std::string("tcp");
    config["rows"] = BenchRow::array();
    for (const auto& row : wanted) {
      if (way_of(row) == way) config["rows"].push_back(row);
    }
    const BenchRow part = run(config);
    for (const auto& result : part.at("rows")) results.push_back(result);
  }
  return {{"rows", results}};
}

Figures figures_of(const std::vector<BenchRow>& results, size_t row, const char* key) {
  Figures figures;
  for (const auto& result : results) figures.push_back(result.at("rows").at(row).at(key));
  return figures;
}

}  // namespace

PlainJson bench_rpc_worker(const PlainJson& config) {
  const World world = join_group(config);
  const Functions functions;
  auto agent = rpc::init(
      world, world.rank() == 0 ? "client" : "server",
      {.fast_calls = config.at("fast_calls"), .shared_memory = config.at("shared_memory")});
  PlainJson result;
  if (world.rank() == 0) result = {{"rows", measure_calls(functions, config)}};
  agent.shutdown();
  return result;
}

BenchRows BenchRunner::rpc() {
  const auto& options = impl_->options;
  const PlainJson wanted = rows_to_measure(options.steps);
  const BenchRow config = {{"kind", "rpc"},
                           {"backend", "auto"},
                           {"warmup", kWarmup},
                           {"steps", options.steps},
                           {"rows", wanted}};
  std::vector<BenchRow> own, python;  // A result a round.
  for (int round = 0; round < options.rounds_or_default(); ++round) {
    impl_->progress("rpc", round);
    own.push_back(measure_round(
        config, [&](const BenchRow& part) { return impl_->run_ranks(false, part, 2); }));
    if (impl_->python) python.push_back(impl_->run_ranks(true, config, 2));
  }
  BenchRows rows;
  for (size_t i = 0; i < wanted.size(); ++i) {
    BenchRow row = {{"call", wanted[i].at("call")}, {"bytes", wanted[i].at("bytes")}};
    add_comparison(row, "p50_us", figures_of(own, i, "p50_us"), figures_of(python, i, "p50_us"));
    const bool each = !own[0].at("rows")[i].at("p99_us").is_null();
    row["p99_us"] = each ? BenchRow(median(figures_of(own, i, "p99_us"))) : BenchRow();
    row["calls_per_s"] = median(figures_of(own, i, "calls_per_s"));
    rows.push_back(row);
  }
  return rows;
}

}  // namespace lockstep::tool
