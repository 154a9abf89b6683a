
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "lockstep/parallel/pipeline/micro_batches.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/pipeline/schedule_runner.h"
#include "lockstep/parallel/pipeline/stage_link.h"

namespace lockstep {
namespace {

using detail::ParcelId;

/// Stages in threads of one process hand parcels to each other. Any thread.
class LocalLink final : public detail::StageLink {
 public:
  void send(const ParcelId& id, const at::Tensor& tensor) override {
    {
      const std::lock_guard lock(mutex_);
      parcels_[id] = tensor;
    }
    changed_.notify_all();
  }
  /// Throws what a stage has failed with.
  at::Tensor take(const ParcelId& id) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failure_ || parcels_.contains(id); });
    if (failure_) std::rethrow_exception(failure_);
    return parcels_.extract(id).mapped();
  }
  /// The first failure counts.
  void fail(const std::exception_ptr& failure) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = failure;
    }
    changed_.notify_all();
  }
  std::exception_ptr failure() const { return failure_; }
  /// Before a batch: forgets what is left of one that failed.
  void reset() {
    const std::lock_guard lock(mutex_);
    parcels_.clear();
    failure_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<ParcelId, at::Tensor> parcels_;
  std::exception_ptr failure_;
};

}  // namespace

struct LocalPipeline::Impl {
  Impl(std::vector<Layer> layers, std::vector<c10::Device> given, LocalPipelineOptions wanted)
      : devices(std::move(given)), options(std::move(wanted)) {
    if (devices.empty()) throw UsageError("LocalPipeline: it needs at least one device");
    schedule =
        make_pipeline_schedule(options.schedule, {static_cast<int>(devices.size()),
                                                  static_cast<int>(options.num_micro_batches),
                                                  static_cast<int>(options.stages_per_device)});
    starts = options.plan.empty()
                 ? balance_stages(estimate_layer_costs(layers), schedule.num_stages)
                 : planned_stages(layers, options.plan, schedule.num_stages);
    for (size_t i = 0; i < layers.size(); ++i) {
      if (!layers[i].module) continue;
      const auto stage = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
      layers[i].module->to(devices[static_cast<size_t>(stage) % devices.size()]);
      for (const at::Tensor& parameter : layers[i].module->parameters())
        parameters.push_back(parameter);
    }
    parameters = unique_parameters(parameters);
    const auto one_forward = devices.size() > 1 ? std::make_shared<std::mutex>() : nullptr;
    for (size_t at = 0; at < devices.size(); ++at) {
      runners.push_back(std::make_unique<detail::ScheduleRunner>(
          static_cast<int>(at), static_cast<int>(devices.size()), layers, starts,
          detail::StageOptions{devices[at], options.recompute_activations, options.forward_context,
                               one_forward},
          link));
    }
    threads = std::make_unique<detail::ReplicaThreads>(devices, at::get_num_threads());
  }

  /// Runs `task` for each device in its thread. Rethrows what failed first.
  void on_all(const std::function<void(size_t)>& task) {
    link.reset();
    threads->run(devices.size(), [&](size_t at) {
      try {
        task(at);
      } catch (...) {
        link.fail(std::current_exception());
      }
    });
    if (link.failure()) std::rethrow_exception(link.failure());
  }

  std::vector<c10::Device> devices;
  LocalPipelineOptions options;
  PipelineSchedule schedule;
  std::vector<size_t> starts;
  std::vector<at::Tensor> parameters;
  LocalLink link;
  std::vector<std::unique_ptr<detail::ScheduleRunner>> runners;
  std::unique_ptr<detail::ReplicaThreads> threads;
};

LocalPipeline::LocalPipeline(std::vector<Layer> layers, std::vector<c10::Device> devices,
                             LocalPipelineOptions options)
    : impl_(std::make_unique<Impl>(std::move(layers), std::move(devices), std::move(options))) {}
LocalPipeline::~LocalPipeline() = default;

void LocalPipeline::run_batch(const BatchWork& work) {
  BatchWork on_last = work;
  if (work.target.defined()) {
    on_last.target = work.target.to(impl_->devices.back());
  }
  const detail::MicroBatches batches(on_last, impl_->schedule);
  const PipelineSchedule schedule = detail::schedule_for(batches, impl_->schedule);
  const c10::AutoGradMode with_grad(true);
  impl_->on_all([&](size_t at) { impl_->runners[at]->run(schedule, batches); });
}

at::Tensor LocalPipeline::predict(const at::Tensor& input) {
  std::vector<at::Tensor> outputs(impl_->devices.size());
  impl_->on_all([&](size_t at) { outputs[at] = impl_->runners[at]->predict(input); });
  return outputs.back();
}

const std::vector<at::Tensor>& LocalPipeline::parameters() const {
  return impl_->parameters;
}

}  // namespace lockstep
