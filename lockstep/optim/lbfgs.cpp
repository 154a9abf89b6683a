#include <ATen/Functions.h>
#include <torch/optim/lbfgs.h>

#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/optim/torch_optimizer.h"

namespace lockstep {
namespace {

constexpr const char* kHint =
    "call step_with(closure), where the closure drops the gradients, computes new ones and gives "
    "the loss";

torch::optim::LBFGSOptions torch_options(const OptimizerOptions& o) {
  if (o.max_iter < 1 || o.history_size < 1) {
    throw UsageError("lbfgs: max_iter and history_size must be at least 1, got " +
                     std::to_string(o.max_iter) + " and " + std::to_string(o.history_size));
  }
  torch::optim::LBFGSOptions options(o.lr);
  options.max_iter(o.max_iter).history_size(o.history_size);
  if (o.line_search_fn.empty()) return options;
  expect_one_of("lbfgs: line_search_fn", o.line_search_fn, line_search_names());
  return options.line_search_fn(o.line_search_fn);
}

at::Tensor number(double value) {
  return at::full({1}, value, at::kDouble);
}

at::Tensor count(int64_t value) {
  return at::full({1}, value, at::kLong);
}

at::Tensor stacked(const std::deque<at::Tensor>& rows) {
  return at::stack(std::vector<at::Tensor>(rows.begin(), rows.end()));
}

std::deque<at::Tensor> rows_of(const at::Tensor& table) {
  std::deque<at::Tensor> rows;
  for (int64_t i = 0; i < table.size(0); ++i) rows.push_back(table[i].clone());
  return rows;
}

CheckpointError wrong(const std::string& what) {
  return CheckpointError("lbfgs: the optimizer state " + what,
                         "the checkpoint is damaged, of another optimizer or of another model");
}

class Lbfgs final : public Optimizer {
 public:
  Lbfgs(std::vector<at::Tensor> parameters, const OptimizerOptions& options)
      : parameters_(std::move(parameters)), torch_(parameters_, torch_options(options)) {}

  void step() override {
    throw UsageError("lbfgs: a step evaluates the loss several times, and step() cannot", kHint);
  }
  void step_scaled(const StepScale&) override {
    throw UsageError(
        "lbfgs: a step evaluates the loss several times, which a gradient scaler cannot",
        "train without a loss scale, in 32-true or bf16-mixed");
  }
  bool needs_closure() const override { return true; }
  double step_with(const LossClosure& closure) override {
    const at::Tensor loss = torch_.step([&] {
      const double value = closure();
      // LibTorch looks at a gradient's memory as one vector. One in channels-last is none.
      for (const at::Tensor& parameter : parameters_) {
        at::Tensor& gradient = parameter.mutable_grad();
        if (gradient.defined() && gradient.layout() == at::kStrided && !gradient.is_contiguous()) {
          gradient = gradient.contiguous();
        }
      }
      return at::scalar_tensor(value, at::kDouble);
    });
    return loss.item<double>();
  }
  void set_lr(double lr) override { torch_.param_groups()[0].options().set_lr(lr); }
  double lr() const override { return torch_.param_groups()[0].options().get_lr(); }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  const std::string& name() const override { return name_; }

  StateDict state() const override {
    StateDict out;
    const State* const state = own_state();
    if (state == nullptr) return out;
    const auto add = [&](const char* name, at::Tensor tensor) {
      out.emplace_back(state_key(name, 0), std::move(tensor));
    };
    add("func_evals", count(state->func_evals()));
    add("n_iter", count(state->n_iter()));
    if (!state->d().defined()) return out;
    add("t", number(state->t()));
    add("prev_loss", number(state->prev_loss()));
    add("d", state->d());
    add("H_diag", state->H_diag().reshape({1}));
    add("prev_flat_grad", state->prev_flat_grad());
    if (state->old_dirs().empty()) return out;
    add("old_dirs", stacked(state->old_dirs()));
    add("old_stps", stacked(state->old_stps()));
    add("ro", stacked(state->ro()));
    return out;
  }

  void load_state(const StateDict& state) override {
    const at::Tensor like = parameters_.front().detach();
    int64_t elements = 0;
    for (const at::Tensor& parameter : parameters_) elements += parameter.numel();
    std::map<std::string, at::Tensor> given(state.begin(), state.end());
    // Takes an entry out. A first size of -1 stands for any.
    const auto take = [&](const char* name, std::vector<int64_t> sizes) {
      const auto entry = given.extract(state_key(name, 0));
      if (entry.empty()) throw wrong("lacks '" + state_key(name, 0) + "'");
      const at::Tensor tensor = entry.mapped();
      if (sizes[0] < 0 && tensor.dim() > 0) sizes[0] = tensor.size(0);
      if (tensor.sizes() == at::IntArrayRef(sizes)) return tensor;
      throw wrong("has '" + state_key(name, 0) + "' of shape " + c10::str(tensor.sizes()) +
                  ", expected " + c10::str(at::IntArrayRef(sizes)));
    };
    const auto rows = [&](const char* name, const std::vector<int64_t>& sizes) {
      if (!given.contains(state_key(name, 0))) return std::deque<at::Tensor>();
      return rows_of(take(name, sizes).to(like.options()));
    };
    auto loaded = std::make_unique<State>();
    if (!state.empty()) {
      loaded->func_evals(take("func_evals", {1}).item<int64_t>());
      loaded->n_iter(take("n_iter", {1}).item<int64_t>());
    }
    if (loaded->n_iter() > 0) {
      loaded->t(take("t", {1}).item<double>());
      loaded->prev_loss(take("prev_loss", {1}).item<double>());
      loaded->d(take("d", {elements}).to(like.options()).clone());
      loaded->H_diag(take("H_diag", {1}).reshape({}).to(like.device()).clone());
      loaded->prev_flat_grad(take("prev_flat_grad", {elements}).to(like.options()).clone());
      loaded->old_dirs(rows("old_dirs", {-1, elements}));
      loaded->old_stps(rows("old_stps", {-1, elements}));
      loaded->ro(rows("ro", {-1}));
      if (loaded->old_dirs().size() != loaded->old_stps().size() ||
          loaded->old_dirs().size() != loaded->ro().size()) {
        throw wrong("has old_dirs, old_stps and ro of different lengths");
      }
    }
    if (!given.empty()) throw wrong("has an unknown entry '" + given.begin()->first + "'");
    torch_.state().clear();
    if (!state.empty()) {
      torch_.state()[parameters_.front().unsafeGetTensorImpl()] = std::move(loaded);
    }
  }

 private:
  using State = torch::optim::LBFGSParamState;

  const State* own_state() const {
    const auto found = torch_.state().find(parameters_.front().unsafeGetTensorImpl());
    return found == torch_.state().end() ? nullptr : static_cast<const State*>(found->second.get());
  }

  std::string name_ = "lbfgs";
  std::vector<at::Tensor> parameters_;
  mutable torch::optim::LBFGS torch_;  ///< Its const access to state is not const all the way.
};

}  // namespace

std::unique_ptr<Optimizer> make_lbfgs(std::vector<at::Tensor> parameters,
                                      const OptimizerOptions& options) {
  return std::make_unique<Lbfgs>(std::move(parameters), options);
}

}  // namespace lockstep
