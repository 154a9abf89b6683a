#include "lockstep/train/callbacks.h"

#include "lockstep/train/trainer.h"
#include "lockstep/train/weights.h"

namespace lockstep {
namespace {

void load(const std::map<std::string, double>& values, const char* name, double& into) {
  const auto found = values.find(name);
  if (found != values.end()) into = found->second;
}

}  // namespace

void Checkpointer::on_start(Trainer& trainer) {
  const int64_t step = trainer.global_step();
  if (step > 0 && trainer.is_first_rank()) folder_.supersede_after(step);
}

void Checkpointer::on_step(Trainer& trainer, const StepResult& result) {
  if (every_n_steps_ > 0 && result.step % every_n_steps_ == 0) trainer.save(folder_, overlap_);
}

void Checkpointer::on_epoch_end(Trainer& trainer, const EpochResult& result) {
  trainer.save(folder_, overlap_);
}

void Checkpointer::on_interrupt(Trainer& trainer, int signal_number) {
  trainer.save(folder_);
  const auto all = folder_.list();
  if (saved_ && !all.empty()) saved_(all.front());
}

void EarlyStop::observe(const Metrics& test) {
  if (test.loss < best_) {
    best_ = test.loss;
    waited_ = 0;
  } else {
    ++waited_;
  }
}

std::map<std::string, double> EarlyStop::values() const {
  return {{"early_stop.best", best_}, {"early_stop.waited", static_cast<double>(waited_)}};
}

void EarlyStop::load_values(const std::map<std::string, double>& values) {
  double waited = 0;
  load(values, "early_stop.best", best_);
  load(values, "early_stop.waited", waited);
  waited_ = static_cast<int64_t>(waited);
}

BestModel::BestModel(std::filesystem::path path) : path_(std::move(path)) {
  check_weights_name("BestModel", path_);
}

void BestModel::on_epoch_end(Trainer& trainer, const EpochResult& result) {
  if (!(result.test.loss < best_)) return;
  best_ = result.test.loss;
  trainer.save_weights(path_, {{"epoch", std::to_string(result.epoch + 1)},
                               {"step", std::to_string(result.step)},
                               {"test_loss", std::to_string(result.test.loss)}});
}

void BestModel::load_values(const std::map<std::string, double>& values) {
  load(values, "best_model.loss", best_);
}

}  // namespace lockstep
