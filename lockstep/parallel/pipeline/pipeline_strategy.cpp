#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/device_mesh.h"
#include "lockstep/parallel/pipeline/micro_batches.h"
#include "lockstep/parallel/pipeline/schedule_runner.h"
#include "lockstep/parallel/pipeline/stage_state.h"
#include "lockstep/parallel/training_mesh.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

void expect_layers(const StrategySetup& setup) {
  if (!setup.layers.empty()) return;
  throw UsageError("strategy pipeline: the model is not known as a chain of layers",
                   "override layers() of a Trainer's module, give StrategySetup::layers, or take a "
                   "strategy that needs none, such as fsdp");
}

/// Of an option, which schedules count with.
int small_number(const char* option, int64_t value) {
  constexpr int64_t kMost = 1'000'000;
  if (value >= 0 && value <= kMost) return static_cast<int>(value);
  throw UsageError(std::string("strategy pipeline: ") + option + " is " + std::to_string(value) +
                   ", expected at most " + std::to_string(kMost) + ", and no less than 0");
}

PipelineOptions options_of(const StrategySetup& setup) {
  return setup.options.pipeline.value_or(PipelineOptions());
}

PipelineShape shape_of(const PipelineOptions& options, int ranks) {
  return {ranks, small_number("num_micro_batches", options.num_micro_batches),
          small_number("stages_per_rank", options.stages_per_rank)};
}

/// What layers cost, and by what that is known.
struct LayerCosts {
  std::vector<double> costs;
  std::string by;
};

LayerCosts costs_of(const StrategySetup& setup) {
  const PipelineOptions options = options_of(setup);
  const bool by_time = options.balance == "time" && setup.example_input;
  const at::Tensor batch = by_time ? setup.example_input() : at::Tensor();
  if (!batch.defined()) return {estimate_layer_costs(setup.layers), "parameters"};
  const int64_t rows =
      std::max<int64_t>(1, batch.size(0) / std::max<int64_t>(1, options.num_micro_batches));
  return {measure_layer_costs(setup.layers, batch.narrow(0, 0, rows).to(setup.device),
                              setup.options.forward_context),
          "time"};
}

/// "stage 0 on rank 0: layers.0 (61% of time), stage 1 on rank 1: layers.1 to layers.4 (39%)".
/// `on`: " on rank ", or that of a dimension of the mesh.
std::string text_of(const std::vector<size_t>& starts, const std::vector<Layer>& layers,
                    const LayerCosts& known, int ranks, const char* on) {
  const double all = std::accumulate(known.costs.begin(), known.costs.end(), 0.0);
  std::vector<std::string> stages;
  for (size_t stage = 0; stage < starts.size(); ++stage) {
    const size_t first = starts[stage];
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : layers.size();
    const auto cost = known.costs.begin();
    const double part = std::accumulate(cost + static_cast<std::ptrdiff_t>(first),
                                        cost + static_cast<std::ptrdiff_t>(end), 0.0);
    const std::string percent = std::to_string(std::lround(100 * part / all)) + "%";
    stages.push_back("stage " + std::to_string(stage) + on +
                     std::to_string(stage % static_cast<size_t>(ranks)) + ": " +
                     layers[first].name + (end == first + 1 ? "" : " to " + layers[end - 1].name) +
                     " (" + percent + (stage == 0 ? " of " + known.by : "") + ")");
  }
  return "pipeline: " + join(stages, ", ");
}

/// Rank 0's cut, for all.
std::vector<size_t> choose_stages(const StrategySetup& setup, int num_stages, int ranks) {
  const PipelineOptions options = options_of(setup);
  expect_one_of("strategy pipeline: balance", options.balance, pipeline_balance_names());
  if (!options.plan.empty()) return planned_stages(setup.layers, options.plan, num_stages);
  std::vector<size_t> starts;
  // Before anyone waits for rank 0: all ranks know when there are too many stages.
  (void)balance_stages(std::vector<double>(setup.layers.size(), 1), num_stages);
  if (setup.group.rank() == 0) {
    const LayerCosts known = costs_of(setup);
    starts = balance_stages(known.costs, num_stages);
    const char* const on = setup.group.size() == ranks ? " on rank " : " on pp rank ";
    if (setup.group.size() > 1) log_info(text_of(starts, setup.layers, known, ranks, on));
  }
  return setup.group.broadcast_object(starts, 0).get<std::vector<size_t>>();
}

/// Apart from the tags of the stages' own messages.
constexpr int kTiedTag = 1 << 21;

/// In which norms are added up. A norm of float16 gradients need not fit into float16.
at::ScalarType norm_dtype(const detail::StageTensors& tensors) {
  std::optional<at::ScalarType> widest;
  for (const detail::StageTensor& parameter : tensors.parameters()) {
    if (!parameter.tensor.requires_grad()) continue;
    const at::ScalarType own = parameter.tensor.scalar_type();
    const at::ScalarType dtype = own == at::kHalf ? at::kFloat : own;
    widest = widest ? c10::promoteTypes(*widest, dtype) : dtype;
  }
  return widest.value_or(at::kFloat);
}

/// What stages do with their gradients after the last micro-batch: those of tied parameters are
/// summed over the stages that use them.
class GradientExchange {
 public:
  GradientExchange(const detail::StageTensors& tensors, ProcessGroup pipeline)
      : tensors_(tensors), pipeline_(std::move(pipeline)) {}

  /// Before a batch whose gradients add to those that are there.
  void begin() {
    if (!std::exchange(summed_, false)) return;
    const int me = pipeline_.rank();
    for (const detail::StageTensor& parameter : tensors_.parameters()) {
      if (parameter.ranks.size() > 1 && parameter.is_on(me) && parameter.owner() != me)
        parameter.tensor.mutable_grad().reset();
    }
  }
  /// The first rank that has a tied parameter sums in the order of ranks, so all get the same bits.
  void sum_tied() {
    const at::NoGradGuard no_grad;
    summed_ = true;
    const int me = pipeline_.rank();
    for (size_t i = 0; i < tensors_.parameters().size(); ++i) {
      const detail::StageTensor& parameter = tensors_.parameters()[i];
      if (parameter.ranks.size() == 1 || !parameter.is_on(me) ||
          !parameter.tensor.requires_grad()) {
        continue;
      }
      const int tag = kTiedTag + static_cast<int>(i);
      const at::Tensor& own = parameter.tensor.grad();
      at::Tensor sum = (own.defined() ? own : at::zeros_like(parameter.tensor)).contiguous();
      if (me != parameter.owner()) {
        pipeline_.send(sum, parameter.owner(), tag);
        pipeline_.recv(sum, parameter.owner(), tag);
      } else {
        at::Tensor other = at::empty_like(sum);
        for (const int rank : parameter.ranks) {
          if (rank == me) continue;
          pipeline_.recv(other, rank, tag);
          sum.add_(other);
        }
        for (const int rank : parameter.ranks) {
          if (rank != me) pipeline_.send(sum, rank, tag);
        }
      }
      parameter.tensor.mutable_grad() = sum;
    }
  }
  /// lockstep::clip_grad_norm over the parameters of all stages, each counted once, with the bits
  /// that one process gets. A collective of the pipeline.
  double clip_grad_norm(c10::Device device, double max_norm) const {
    if (pipeline_.size() == 1) return lockstep::clip_grad_norm(tensors_.own_parameters(), max_norm);
    constexpr int64_t kCountedElsewhere = -1;
    std::vector<at::Tensor> gradients;
    std::vector<int64_t> numbers;
    for (const size_t i : tensors_.own()) {
      const detail::StageTensor& parameter = tensors_.parameters()[i];
      if (!parameter.tensor.grad().defined()) continue;
      gradients.push_back(parameter.tensor.grad());
      const bool is_owner = parameter.owner() == pipeline_.rank();
      numbers.push_back(is_owner ? static_cast<int64_t>(i) : kCountedElsewhere);
    }
    // Each rank puts its own norms into a table of zeros, and a sum over the ranks, which changes
    // no bit, puts them together. Row 0: the norms. Row 1: whether there is one.
    return detail::clip_gradients(gradients, max_norm, [&](const auto& norms, const auto& places) {
      const auto count = static_cast<int64_t>(tensors_.parameters().size());
      at::Tensor table = at::zeros({2, count}, at::TensorOptions(device).dtype(at::kDouble));
      for (size_t i = 0; i < norms.size(); ++i) {
        const int64_t number = numbers[places[i]];
        if (number == kCountedElsewhere) continue;
        table[0][number].copy_(norms[i]);
        table[1][number].fill_(1);
      }
      pipeline_.all_reduce(table);
      const at::Tensor all = table[0].masked_select(table[1].gt(0)).to(norm_dtype(tensors_));
      return at::linalg_vector_norm(all, 2.0);
    });
  }
  /// The gradients were dropped.
  void forget() { summed_ = false; }

 private:
  const detail::StageTensors& tensors_;
  ProcessGroup pipeline_;
  bool summed_ = false;  ///< Tied parameters' gradients are the sums of all their stages.
};

class PipelineStrategy final : public detail::BaseStrategy {
 public:
  PipelineStrategy(const std::string& name, const StrategySetup& setup, const DeviceMesh& mesh,
                   detail::MakeRow make_row)
      : BaseStrategy(name, setup),
        setup_((expect_layers(setup), setup)),
        share_(detail::data_share_of(mesh.dimensions(), setup.group.rank())),
        pipeline_(mesh.get_group("pp")),
        schedule_(make_pipeline_schedule(options_of(setup).schedule,
                                         shape_of(options_of(setup), pipeline_.size()))),
        tensors_(*setup.module, setup.layers, agreed_stages(), pipeline_.rank(), pipeline_.size()),
        exchange_(tensors_, pipeline_),
        link_(detail::make_group_link(pipeline_, setup.device)) {
    runner_ = std::make_unique<detail::ScheduleRunner>(
        pipeline_.rank(), pipeline_.size(), setup_.layers, starts_,
        detail::StageOptions{setup.device, options_of(setup).recompute_activations,
                             setup.options.forward_context},
        *link_);
    tensors_.free_others();
    make_row_on(mesh, make_row);
    detail::refuse_closure(
        optimizer(), this->name(),
        "looks at all parameters as one vector, of which a rank has those of its stages only");
    setup_.layers.clear();
    setup_.example_input = nullptr;
  }

  DataShare data_share() const override { return share_; }

  void run_batch(const BatchWork& work) override {
    const detail::MicroBatches batches(work, schedule_);
    exchange_.begin();
    row_->begin_schedule();
    // A smaller batch at the end of an epoch may have fewer micro-batches.
    batches.size() == schedule_.num_micro_batches
        ? runner_->run(schedule_, batches)
        : runner_->run(detail::schedule_for(batches, schedule_), batches);
    adding_up_ = !work.last_of_step;
    if (work.last_of_step) {
      exchange_.sum_tied();
      row_->reduce_accumulated();
      ++steps_;
      for (const ProcessGroup& waits : {setup_.group, pipeline_}) waits.note_steps(steps_);
    }
    row_->end_schedule();
  }

  std::optional<at::Tensor> predict(const std::function<at::Tensor()>&,
                                    const at::Tensor& input) override {
    if (!input.defined()) {
      throw UsageError("strategy " + name() +
                       " with a pipeline: predict needs the input, not only "
                       "a forward");
    }
    row_->begin_schedule();
    at::Tensor output = runner_->predict(input);
    row_->end_schedule();
    return output.defined() ? std::optional(std::move(output)) : std::nullopt;
  }

  void share_buffers() override { row_->share_buffers(); }
  void check_equal() override { row_->check_equal(); }

  std::vector<at::Tensor> gradients() const override { return row_->gradients(); }
  bool has_sharded_gradients() const override { return pipeline_.size() > 1 || has_shards_; }
  double clip_grad_norm(double max_norm) override {
    if (has_shards_) return clip_shards(max_norm);
    return exchange_.clip_grad_norm(setup_.device, max_norm);
  }

  void update(const StepScale& scale) override { row_->update(scale); }
  void zero_grad() override {
    adding_up_ = false;
    exchange_.forget();
    row_->zero_grad();
  }
  Optimizer& optimizer() const override { return row_->optimizer(); }

  detail::SpreadModel spread_model() override {
    return tensors_.spread_model(*setup_.module, row_->spread_model(), whole_);
  }
  detail::SpreadOptimizer spread_optimizer() override {
    return tensors_.spread_optimizer(row_->spread_optimizer(), whole_);
  }
  void load_optimizer_state(const StateDict& state) override {
    row_->load_optimizer_state(tensors_.stage_state(state, row_->spread_optimizer()));
  }
  StateBytes state_bytes() const override { return row_->state_bytes(); }

 private:
  bool gives_states() const override { return first_replica_; }
  void compare_ranks() override {
    BaseStrategy::compare_ranks();
    row_->check_equal();
  }

  /// The row has the stages of this rank, over the ranks that have the same.
  void make_row_on(const DeviceMesh& mesh, detail::MakeRow make_row) {
    StrategySetup setup = detail::on_data_dimensions(setup_, mesh);
    setup.module = stages_ = detail::module_of_stages(setup_.module, own_layers());
    const auto needs_gradient = [](const at::Tensor& one) { return one.requires_grad(); };
    const bool trains = std::ranges::any_of(tensors_.own_parameters(), needs_gradient);
    row_ = (trains ? make_row : detail::make_ddp_row)(setup, /*micro_batches=*/true);
    whole_ = mesh.has("dp_shard") ? mesh.flatten({"pp", "dp_shard"}) : pipeline_;
    first_replica_ = !mesh.has("dp_replicate") || mesh.get_local_rank("dp_replicate") == 0;
    int sharded = row_->has_sharded_gradients() ? 1 : 0;
    pipeline_.all_reduce_values(sharded);
    has_shards_ = sharded > 0;
  }

  std::vector<std::shared_ptr<torch::nn::Module>> own_layers() const {
    std::vector<std::shared_ptr<torch::nn::Module>> own;
    for (size_t i = 0, stage = 0; i < setup_.layers.size(); ++i) {
      if (stage + 1 < starts_.size() && starts_[stage + 1] == i) ++stage;
      const bool is_here = static_cast<int>(stage) % pipeline_.size() == pipeline_.rank();
      if (is_here && setup_.layers[i].module) own.push_back(setup_.layers[i].module);
    }
    return own;
  }

  /// Each part is on one rank of `whole_`, but for tied parameters, which count once.
  double clip_shards(double max_norm) {
    const std::vector<at::Tensor> updated = row_->updated();
    const detail::SpreadOptimizer spread = tensors_.spread_optimizer(row_->spread_optimizer(), {});
    std::vector<at::Tensor> gradients;
    std::vector<bool> counts;
    for (size_t i = 0; i < updated.size(); ++i) {
      if (!updated[i].grad().defined() || spread.indices[i] == detail::SpreadOptimizer::kNone)
        continue;
      gradients.push_back(updated[i].grad());
      counts.push_back(tensors_.parameters()[spread.indices[i]].owner() == pipeline_.rank());
    }
    return detail::clip_shards(gradients, max_norm, whole_, counts);
  }

  /// The first layers of the stages, once all ranks have rank 0's model.
  const std::vector<size_t>& agreed_stages() {
    if (setup_.group.size() > 1)
      detail::start_alike(detail::whole_module_state(*setup_.module), setup_.group,
                          "strategy " + name());
    return starts_ = choose_stages(setup_, schedule_.num_stages, pipeline_.size());
  }

  StrategySetup setup_;
  DataShare share_;
  ProcessGroup pipeline_;
  PipelineSchedule schedule_;
  std::vector<size_t> starts_;
  detail::StageTensors tensors_;
  GradientExchange exchange_;
  std::unique_ptr<detail::StageLink> link_;
  std::unique_ptr<detail::ScheduleRunner> runner_;
  std::shared_ptr<torch::nn::Module> stages_;  ///< Of this rank: the row's module.
  std::unique_ptr<detail::RowStrategy> row_;
  ProcessGroup whole_;  ///< The ranks that have one model together.
  bool first_replica_ = true;
  bool has_shards_ = false;  ///< A rank of the pipeline has gradients in shards.
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline_strategy(const StrategySetup& setup) {
  if (!setup.group) throw UsageError("strategy pipeline: the process group is null");
  const auto mesh =
      detail::training_mesh({"pipeline", false, true}, setup.options.mesh, setup.group.size());
  return detail::make_pipeline("pipeline", setup, DeviceMesh(setup.group, mesh),
                               detail::make_ddp_row);
}

std::unique_ptr<Strategy> detail::make_pipeline(const std::string& name, const StrategySetup& setup,
                                                const DeviceMesh& mesh, MakeRow make_row) {
  return std::make_unique<PipelineStrategy>(name, setup, mesh, make_row);
}

}  // namespace lockstep
