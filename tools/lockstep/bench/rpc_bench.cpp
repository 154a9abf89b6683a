// `lockstep bench rpc`: calls between two workers, beside Python's.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <deque>
#include <optional>

#include "lockstep/rpc/rpc.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

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

PlainJson latency(const Figures& times) {
  const double p50 = median(times);
  return {{"p50_us", p50}, {"p99_us", percentile(times, 0.99)}, {"calls_per_s", 1e6 / p50}};
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

PlainJson measure_call(const Functions& functions, const PlainJson& row, const PlainJson& config) {
  const std::string call = row.at("call");
  const int64_t steps = row.at("steps");
  const at::Tensor one = at::ones({1});
  if (call == "unbatched") return throughput(functions.unbatched, steps);
  if (call == "batched") return throughput(functions.batched, steps);
  if (call == "echo") {
    const at::Tensor tensor = at::ones({row.at("bytes").get<int64_t>() / 4});
    const auto echo = [&] { rpc::call("server", functions.echo, tensor); };
    return latency(timed(echo, kEchoWarmup, steps));
  }
  const at::Tensor leaf = at::ones({1}).requires_grad_();
  const auto add = [&] {
    std::optional<rpc::AutogradContext> context;
    if (call == "autograd") context.emplace();
    rpc::call("server", functions.add, call == "autograd" ? leaf : one, one);
  };
  return latency(timed(add, config.at("warmup"), steps));
}

/// The rows, each way from a start of its own: LibTorch's calls, ours, and ours by TCP, as those
/// between hosts go.
PlainJson ways_of(int64_t steps) {
  const auto row = [](const char* call, int64_t bytes, int64_t calls) {
    return PlainJson{{"call", call}, {"bytes", bytes}, {"steps", calls}};
  };
  const auto way = [](bool fast_calls, bool shared_memory, std::vector<PlainJson> rows) {
    return PlainJson{
        {"fast_calls", fast_calls}, {"shared_memory", shared_memory}, {"rows", std::move(rows)}};
  };
  return {way(false, true, {row("own", 4, steps)}),
          way(true, true,
              {row("autograd", 4, steps), row("fast", 4, steps), row("echo", 65'536, steps),
               row("echo", 4'194'304, std::max<int64_t>(steps / 10, 5)),
               row("unbatched", kWidth * 4, steps), row("batched", kWidth * 4, steps)}),
          way(true, false, {row("tcp", 4, steps)})};
}

}  // namespace

PlainJson rpc_worker(const PlainJson& config) {
  const World world = join_group(config);
  const Functions functions;
  auto agent = rpc::init(
      world, world.rank() == 0 ? "client" : "server",
      {.fast_calls = config.at("fast_calls"), .shared_memory = config.at("shared_memory")});
  PlainJson rows = PlainJson::array();
  for (const auto& row : config.at("rows")) {
    if (world.rank() == 0) rows.push_back(measure_call(functions, row, config));
  }
  agent.shutdown();
  return {{"rows", rows}};
}

BenchRows bench_rpc(BenchRunner& runner) {
  const auto& options = runner.options;
  BenchRow config = {{"kind", "rpc"}, {"ranks", 2}, {"backend", "auto"}, {"warmup", kWarmup}};
  const PlainJson ways = ways_of(options.steps);
  PlainJson wanted = PlainJson::array();
  for (const auto& way : ways) wanted.insert(wanted.end(), way["rows"].begin(), way["rows"].end());
  const Sides sides = runner.in_turns("rpc", runner.sides(), [&](const std::string& side) {
    config["rows"] = wanted;
    if (side == kPythonSide) return runner.run_ranks(true, config);
    BenchRow results;
    for (const auto& way : ways) {
      config.update(BenchRow(way));
      const BenchRow part = runner.run_ranks(false, config);
      for (const auto& row : part.at("rows")) results["rows"].push_back(row);
    }
    return results;
  });
  const std::string& own = options.backends.front();
  BenchRows rows;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const std::string index = "/rows/" + std::to_string(i);
    rows.push_back({{"call", wanted[i].at("call")}, {"bytes", wanted[i].at("bytes")}});
    add_comparison(rows.back(), "p50_us", sides, own, index + "/p50_us");
    for (const std::string key : {"p99_us", "calls_per_s"})
      rows.back()[key] = median_at(sides.at(own), index + "/" + key);
  }
  return rows;
}

}  // namespace lockstep::tool
