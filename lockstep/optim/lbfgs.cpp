#include "lockstep/optim/lbfgs.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/optim/optimizer_state.h"

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

/// The entries of a given state, by name.
class Given {
 public:
  Given(const StateDict& state, const at::Tensor& like, int64_t elements)
      : like_(like), elements_(elements) {
    static const std::vector<std::string> kNames{
        "func_evals", "n_iter",   "t",        "prev_loss", "d",
        "H_diag",     "old_dirs", "old_stps", "ro",        "prev_flat_grad"};
    for (const auto& [key, tensor] : state) {
      const auto known = std::find_if(kNames.begin(), kNames.end(), [&, &own = key](const auto& n) {
        return own == state_key(n, 0);
      });
      if (known == kNames.end()) throw wrong("has an unknown entry '" + key + "'");
      entries_[*known] = tensor;
    }
  }

  bool has(const std::string& name) const { return entries_.contains(name); }

  at::Tensor one(const std::string& name) const { return sized(name, {1}); }
  at::Tensor vector(const std::string& name) const {
    return sized(name, {elements_}).to(like_.options()).clone();
  }
  std::deque<at::Tensor> vectors(const std::string& name) const {
    if (!has(name)) return {};
    return rows_of(sized(name, {at(name).size(0), elements_}).to(like_.options()));
  }
  std::deque<at::Tensor> numbers(const std::string& name) const {
    if (!has(name)) return {};
    return rows_of(sized(name, {at(name).size(0)}).to(like_.options()));
  }
  static CheckpointError wrong(const std::string& what) {
    return CheckpointError("lbfgs: the optimizer state " + what,
                           "the checkpoint is damaged, of another optimizer or of another model");
  }

 private:
  const at::Tensor& at(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) throw wrong("lacks '" + state_key(name, 0) + "'");
    if (found->second.dim() == 0) throw wrong("has '" + state_key(name, 0) + "' without elements");
    return found->second;
  }
  at::Tensor sized(const std::string& name, std::vector<int64_t> sizes) const {
    const at::Tensor& tensor = at(name);
    if (tensor.sizes() == at::IntArrayRef(sizes)) return tensor;
    throw wrong("has '" + state_key(name, 0) + "' of shape " + c10::str(tensor.sizes()) +
                ", expected " + c10::str(at::IntArrayRef(sizes)));
  }

  at::Tensor like_;
  int64_t elements_;
  std::map<std::string, at::Tensor> entries_;
};

}  // namespace

Lbfgs::Lbfgs(std::vector<at::Tensor> parameters, const OptimizerOptions& options)
    : parameters_(std::move(parameters)), torch_(parameters_, torch_options(options)) {}

void Lbfgs::step() {
  throw UsageError("lbfgs: a step evaluates the loss several times, and step() cannot", kHint);
}

void Lbfgs::step_scaled(const StepScale&) {
  throw UsageError("lbfgs: a step evaluates the loss several times, which a gradient scaler cannot",
                   "train without a loss scale, in 32-true or bf16-mixed");
}

double Lbfgs::step_with(const LossClosure& closure) {
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

void Lbfgs::set_lr(double lr) {
  torch_.param_groups()[0].options().set_lr(lr);
}

double Lbfgs::lr() const {
  return torch_.param_groups()[0].options().get_lr();
}

const Lbfgs::State* Lbfgs::own_state() const {
  const auto found = torch_.state().find(parameters_.front().unsafeGetTensorImpl());
  return found == torch_.state().end() ? nullptr : static_cast<const State*>(found->second.get());
}

StateDict Lbfgs::state() const {
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

void Lbfgs::load_state(const StateDict& state) {
  int64_t elements = 0;
  for (const at::Tensor& parameter : parameters_) elements += parameter.numel();
  const Given given(state, parameters_.front().detach(), elements);
  auto loaded = std::make_unique<State>();
  if (!state.empty()) {
    loaded->func_evals(given.one("func_evals").item<int64_t>());
    loaded->n_iter(given.one("n_iter").item<int64_t>());
  }
  if (loaded->n_iter() > 0) {
    loaded->t(given.one("t").item<double>());
    loaded->prev_loss(given.one("prev_loss").item<double>());
    loaded->d(given.vector("d"));
    loaded->H_diag(given.one("H_diag").reshape({}).to(parameters_.front().device()).clone());
    loaded->prev_flat_grad(given.vector("prev_flat_grad"));
    loaded->old_dirs(given.vectors("old_dirs"));
    loaded->old_stps(given.vectors("old_stps"));
    loaded->ro(given.numbers("ro"));
    if (loaded->old_dirs().size() != loaded->old_stps().size() ||
        loaded->old_dirs().size() != loaded->ro().size()) {
      throw Given::wrong("has old_dirs, old_stps and ro of different lengths");
    }
  }
  torch_.state().clear();
  if (!state.empty()) {
    torch_.state()[parameters_.front().unsafeGetTensorImpl()] = std::move(loaded);
  }
}

}  // namespace lockstep
