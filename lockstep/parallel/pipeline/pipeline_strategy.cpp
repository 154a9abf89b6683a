#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/device_mesh.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/pipeline/gradient_exchange.h"
#include "lockstep/parallel/pipeline/group_link.h"
#include "lockstep/parallel/pipeline/micro_batches.h"
#include "lockstep/parallel/pipeline/schedule_runner.h"
#include "lockstep/parallel/pipeline/stage_state.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

void expect_layers(const StrategySetup& setup) {
  if (!setup.layers.empty()) return;
  throw UsageError("strategy pipeline: the model is not known as a chain of layers",
                   "give StrategySetup::layers, or take a strategy that needs none, such as fsdp");
}

std::vector<MeshDimension> dimensions_of(const StrategyOptions& options, int ranks) {
  const std::string& text = options.mesh;
  auto dimensions = parse_mesh(text.empty() ? "pp=-1" : text, ranks);
  bool has_pipeline = false;
  for (const MeshDimension& dimension : dimensions) {
    has_pipeline = has_pipeline || dimension.name == "pp";
    if (dimension.name == "pp" || dimension.name == "dp") continue;
    throw UsageError("strategy pipeline: mesh '" + text + "' has a dimension '" + dimension.name +
                         "', with which a pipeline is not combined",
                     "its dimensions are pp, the stages, and dp, the pipelines beside each other: "
                     "--mesh dp=2,pp=2");
  }
  if (!has_pipeline) {
    throw UsageError("strategy pipeline: mesh '" + text + "' has no dimension pp, for the stages",
                     "--mesh dp=2,pp=2 makes two pipelines of two stages each");
  }
  return dimensions;
}

/// Of an option, which schedules count with.
int small_number(const char* option, int64_t value) {
  constexpr int64_t kMost = 1'000'000;
  if (value >= 0 && value <= kMost) return static_cast<int>(value);
  throw UsageError(std::string("strategy pipeline: ") + option + " is " + std::to_string(value) +
                   ", expected at most " + std::to_string(kMost) + ", and no less than 0");
}

PipelineShape shape_of(const StrategyOptions& options, int ranks) {
  return {ranks, small_number("num_micro_batches", options.num_micro_batches),
          small_number("pipeline_stages_per_rank", options.pipeline_stages_per_rank)};
}

/// What layers cost, and by what that is known.
struct LayerCosts {
  std::vector<double> costs;
  std::string by;
};

LayerCosts costs_of(const StrategySetup& setup) {
  const StrategyOptions& options = setup.options;
  const bool by_time = options.pipeline_balance == "time" && setup.example_input;
  const at::Tensor batch = by_time ? setup.example_input() : at::Tensor();
  if (!batch.defined()) return {estimate_layer_costs(setup.layers), "parameters"};
  const int64_t rows =
      std::max<int64_t>(1, batch.size(0) / std::max<int64_t>(1, options.num_micro_batches));
  return {measure_layer_costs(setup.layers, batch.narrow(0, 0, rows).to(setup.device),
                              options.forward_context),
          "time"};
}

/// "stage 0 on rank 0: layers.0 (61% of time), stage 1 on rank 1: layers.1 to layers.4 (39%)".
std::string text_of(const std::vector<size_t>& starts, const std::vector<Layer>& layers,
                    const LayerCosts& known, int ranks) {
  const double all = std::accumulate(known.costs.begin(), known.costs.end(), 0.0);
  std::vector<std::string> stages;
  for (size_t stage = 0; stage < starts.size(); ++stage) {
    const size_t first = starts[stage];
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : layers.size();
    const auto cost = known.costs.begin();
    const double part = std::accumulate(cost + static_cast<std::ptrdiff_t>(first),
                                        cost + static_cast<std::ptrdiff_t>(end), 0.0);
    const std::string percent = std::to_string(std::lround(100 * part / all)) + "%";
    stages.push_back("stage " + std::to_string(stage) + " on rank " +
                     std::to_string(stage % static_cast<size_t>(ranks)) + ": " +
                     layers[first].name + (end == first + 1 ? "" : " to " + layers[end - 1].name) +
                     " (" + percent + (stage == 0 ? " of " + known.by : "") + ")");
  }
  return "pipeline: " + join(stages, ", ");
}

/// Rank 0's cut, for all.
std::vector<size_t> choose_stages(const StrategySetup& setup, int num_stages, int ranks) {
  const StrategyOptions& options = setup.options;
  expect_one_of("strategy pipeline: pipeline_balance", options.pipeline_balance,
                pipeline_balance_names());
  if (!options.pipeline_plan.empty()) {
    return planned_stages(setup.layers, options.pipeline_plan, num_stages);
  }
  std::vector<size_t> starts;
  // Before anyone waits for rank 0: all ranks know when there are too many stages.
  (void)balance_stages(std::vector<double>(setup.layers.size(), 1), num_stages);
  if (setup.group.rank() == 0) {
    const LayerCosts known = costs_of(setup);
    starts = balance_stages(known.costs, num_stages);
    if (setup.group.size() > 1) log_info(text_of(starts, setup.layers, known, ranks));
  }
  return setup.group.broadcast_object(starts, 0).get<std::vector<size_t>>();
}

class PipelineStrategy final : public detail::BaseStrategy {
 public:
  explicit PipelineStrategy(const StrategySetup& setup)
      : BaseStrategy("pipeline", setup),
        setup_((expect_layers(setup), setup)),
        mesh_(setup.group, dimensions_of(setup.options, setup.group.size())),
        pipeline_(mesh_.get_group("pp")),
        schedule_(make_pipeline_schedule(setup.options.pipeline_schedule,
                                         shape_of(setup.options, pipeline_.size()))),
        tensors_(*setup.module, setup.layers, agreed_stages(), pipeline_.rank(), pipeline_.size()),
        model_(tensors_.spread_model(*setup.module, pipeline_)),
        spread_(tensors_.spread_optimizer(pipeline_)),
        exchange_(tensors_, pipeline_, mesh_.has("dp") ? mesh_.get_group("dp") : ProcessGroup()),
        link_(pipeline_, setup.device) {
    runner_ = std::make_unique<detail::ScheduleRunner>(
        pipeline_.rank(), pipeline_.size(), setup_.layers, starts_,
        detail::StageOptions{setup.device, setup.options.recompute_activations,
                             setup.options.forward_context},
        link_);
    tensors_.free_others();
    parameters_ = tensors_.own_parameters();
    optimizer_ = setup.make_optimizer(optimized());
    detail::refuse_closure(
        *optimizer_, name(),
        "looks at all parameters as one vector, of which a rank has those of its stages only");
    setup_.layers.clear();
    setup_.example_input = nullptr;
  }

  DataShare data_share() const override {
    if (!mesh_.has("dp")) return {};
    return {mesh_.get_local_rank("dp"), mesh_.size("dp")};
  }

  void run_batch(const BatchWork& work) override {
    const detail::MicroBatches batches = cut_.cut(work, schedule_);
    exchange_.begin();
    // A smaller batch at the end of an epoch may have fewer micro-batches.
    const bool whole = batches.size() == schedule_.num_micro_batches;
    const PipelineSchedule shorter = whole ? PipelineSchedule() : schedule_of(batches.size());
    runner_->run(whole ? schedule_ : shorter, batches.inputs(),
                 [&](int micro_batch, const at::Tensor& output) {
                   return batches.loss(micro_batch, output);
                 });
    adding_up_ = !work.last_of_step;
    if (!work.last_of_step) return;
    exchange_.run();
    ++steps_;
    for (const ProcessGroup& waits : {setup_.group, pipeline_}) waits.note_steps(steps_);
  }

  std::optional<at::Tensor> predict(const std::function<at::Tensor()>&,
                                    const at::Tensor& input) override {
    if (!input.defined()) {
      throw UsageError("strategy pipeline: predict needs the input, not only a forward");
    }
    at::Tensor output = runner_->predict(input);
    return output.defined() ? std::optional(std::move(output)) : std::nullopt;
  }

  void share_buffers() override {
    if (!mesh_.has("dp") || mesh_.size("dp") == 1) return;
    std::vector<at::Tensor> buffers;
    for (const detail::StageTensor& buffer : tensors_.buffers()) {
      if (buffer.is_on(pipeline_.rank())) buffers.push_back(buffer.tensor);
    }
    detail::broadcast_tensors(buffers, mesh_.get_group("dp"));
  }

  std::vector<at::Tensor> gradients() const override { return detail::gradients_of(parameters_); }
  bool has_sharded_gradients() const override { return pipeline_.size() > 1; }
  double clip_grad_norm(double max_norm) override {
    return exchange_.clip_grad_norm(setup_.device, max_norm);
  }

  void zero_grad() override {
    adding_up_ = false;
    exchange_.forget();
    lockstep::zero_grad(parameters_);
  }

  StateDict model_state() override {
    return is_first_pipeline() ? model_.gather("strategy pipeline") : StateDict();
  }
  StateDict optimizer_state() override {
    if (!is_first_pipeline()) return {};
    return spread_.gather(optimizer_->state(), "strategy pipeline");
  }
  std::vector<TensorShard> model_shards() override {
    return is_first_pipeline() ? model_.shards() : std::vector<TensorShard>();
  }
  std::vector<TensorShard> optimizer_shards() override {
    if (!is_first_pipeline()) return {};
    return spread_.shards(optimizer_->state());
  }
  std::map<std::string, std::vector<TensorBox>> needed_of_model() override {
    return model_.needed();
  }
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() override {
    return spread_.needed();
  }
  void load_model_state(const StateDict& state) override {
    model_.load(state, "the checkpoint's model.safetensors");
  }
  void load_optimizer_state(const StateDict& state) override {
    optimizer_->load_state(spread_.own_part(state, "strategy pipeline").first);
    cut_.expect_any_size();
  }
  StateBytes state_bytes() const override {
    return {detail::bytes_of(parameters_), detail::bytes_of(gradients()),
            detail::bytes_of(optimizer_->state())};
  }

 private:
  bool is_first_pipeline() const { return !mesh_.has("dp") || mesh_.get_local_rank("dp") == 0; }

  Optimizer& optimizer() const override { return *optimizer_; }

  /// Optimizers want at least one tensor. A stage of layers without parameters gives an empty one.
  std::vector<at::Tensor> optimized() const {
    if (!parameters_.empty()) return parameters_;
    return {at::empty({0}, at::TensorOptions(setup_.device)).requires_grad_()};
  }

  /// The first layers of the stages, once all ranks have rank 0's model.
  const std::vector<size_t>& agreed_stages() {
    if (setup_.group.size() > 1) {
      const detail::ModuleState state =
          detail::find_module_state(*setup_.module, {}, "strategy pipeline");
      detail::check_same_state(state, setup_.group, "strategy pipeline");
      std::vector<at::Tensor> tensors;
      for (const auto& item : state.parameters) tensors.push_back(item.tensor);
      for (const auto& item : state.buffers) tensors.push_back(item.tensor);
      detail::broadcast_tensors(tensors, setup_.group);
    }
    return starts_ = choose_stages(setup_, schedule_.num_stages, pipeline_.size());
  }

  PipelineSchedule schedule_of(int64_t micro_batches) const {
    PipelineShape shape = shape_of(setup_.options, pipeline_.size());
    shape.num_micro_batches = static_cast<int>(micro_batches);
    return make_pipeline_schedule(setup_.options.pipeline_schedule, shape);
  }

  StrategySetup setup_;
  DeviceMesh mesh_;
  ProcessGroup pipeline_;
  PipelineSchedule schedule_;
  std::vector<size_t> starts_;
  detail::StageTensors tensors_;
  detail::SpreadModel model_;
  detail::SpreadOptimizer spread_;
  detail::GradientExchange exchange_;
  detail::GroupLink link_;
  std::unique_ptr<detail::ScheduleRunner> runner_;
  std::vector<at::Tensor> parameters_;  ///< Of this rank's stages.
  std::unique_ptr<Optimizer> optimizer_;
  detail::BatchCutter cut_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline_strategy(const StrategySetup& setup) {
  return std::make_unique<PipelineStrategy>(setup);
}

DataShare pipeline_data_share(const StrategyOptions& options, int rank, int size) {
  // As DeviceMesh lays ranks out: row by row.
  DataShare share;
  int rest = rank;
  const auto dimensions = dimensions_of(options, size);
  for (auto dimension = dimensions.rbegin(); dimension != dimensions.rend(); ++dimension) {
    if (dimension->name == "dp") share = {rest % dimension->size, dimension->size};
    rest /= dimension->size;
  }
  return share;
}

}  // namespace lockstep
