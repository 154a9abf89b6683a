#include "lockstep/train/weights.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/data/tensor_reader.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep {
namespace {

/// "PREFIXstate.PARAMETER.FIELD", taken apart.
struct StateName {
  std::string prefix;
  std::string parameter;  ///< Its number, or its name.
  std::string field;
};

/// None for a name of something else, such as a model's.
std::optional<StateName> parse_state_name(const std::string& name) {
  static const std::set<std::string> fields = {
      "step",       "exp_avg",  "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer",
      "square_avg", "grad_avg", "sum"};
  constexpr std::string_view kState = "state.";
  const size_t begin = name.starts_with(kState) ? 0 : name.find(".state.") + 1;
  const size_t last = name.rfind('.');
  if (begin == 0 && !name.starts_with(kState)) return std::nullopt;
  const size_t parameter = begin + kState.size();
  if (last == std::string::npos || last <= parameter || !fields.contains(name.substr(last + 1)))
    return std::nullopt;
  return StateName{name.substr(0, begin), name.substr(parameter, last - parameter),
                   name.substr(last + 1)};
}

class PythonOptimizer {
 public:
  PythonOptimizer(const std::filesystem::path& path, const torch::nn::Module& module)
      : path_(path.string()), source_(path) {
    std::set<const c10::TensorImpl*> seen;
    for (const auto& parameter : module.named_parameters()) {
      if (seen.insert(parameter.value().unsafeGetTensorImpl()).second)
        numbers_.emplace(parameter.key(), numbers_.size());
    }
  }

  StateDict state() {
    StateDict state;
    for (const TensorInfo& tensor : source_.tensors()) {
      const auto name = parse_state_name(tensor.name);
      if (!name) continue;
      check_prefix(name->prefix);
      const at::Tensor value = source_.read(tensor.name);
      state.emplace_back(key_of(*name),
                         name->field == kStep ? value.to(at::kLong).reshape({1}) : value);
    }
    if (!state.empty()) return state;
    throw DataError(path_ + " holds no optimizer's state",
                    "save it with torch.save({\"model\": model.state_dict(), \"optimizer\": "
                    "optimizer.state_dict()}, FILE) after a step");
  }

  void warn_of_differences(const std::map<std::string, double>& settings) const {
    for (const auto& [name, wanted] : settings) {
      const auto saved = number(prefix_.value_or("") + "param_groups.0." + name);
      if (saved && std::abs(*saved - wanted) > 1e-9 * std::abs(wanted))
        log_warning(path_ + ": the optimizer was saved with " + name + " " +
                    std::to_string(*saved) + ", this run has " + std::to_string(wanted));
    }
  }

 private:
  void check_prefix(const std::string& prefix) {
    if (!prefix_) {
      prefix_ = prefix;
      read_groups();
    }
    if (*prefix_ == prefix) return;
    throw DataError(
        path_ + " holds several optimizers: " + *prefix_ + "state and " + prefix + "state",
        "save the one of this model alone");
  }

  /// Python numbers parameters in the order of the groups. With one group that is the module's.
  void read_groups() {
    const std::string groups = *prefix_ + "param_groups.";
    for (const auto& [name, value] : source_.values()) {
      const auto* text = std::get_if<std::string>(&value);
      if (!name.starts_with(groups) || name.find(".param_names.") == std::string::npos || !text)
        continue;
      std::string number_name = name;
      number_name.replace(name.find(".param_names."), 13, ".params.");
      if (const auto saved = number(number_name)) names_[static_cast<int64_t>(*saved)] = *text;
    }
    const bool several =
        std::any_of(source_.values().begin(), source_.values().end(),
                    [&](const auto& value) { return value.first.starts_with(groups + "1."); });
    if (several && names_.empty())
      throw DataError(path_ + ": the optimizer has several groups of parameters without names",
                      "make it from model.named_parameters() in Python (PyTorch 2.6 or later)");
  }

  std::optional<double> number(const std::string& name) const {
    const auto found = source_.values().find(name);
    if (found == source_.values().end()) return std::nullopt;
    if (const auto* real = std::get_if<double>(&found->second)) return *real;
    if (const auto* whole = std::get_if<int64_t>(&found->second))
      return static_cast<double>(*whole);
    if (const auto* flag = std::get_if<bool>(&found->second)) return *flag ? 1 : 0;
    return std::nullopt;
  }

  std::string key_of(const StateName& name) const {
    std::string parameter = name.parameter;
    if (const auto index = parse_int(parameter)) {
      const auto named = names_.find(*index);
      if (named == names_.end()) return name.field + "." + parameter;
      parameter = named->second;
    }
    for (const char* wrapper : {"module.", "_orig_mod."}) {
      if (parameter.starts_with(wrapper)) parameter.erase(0, std::string_view(wrapper).size());
    }
    const auto found = numbers_.find(parameter);
    if (found == numbers_.end())
      throw CheckpointError(path_ + " holds an optimizer's state of parameter '" + parameter +
                                "', which the model does not have",
                            "it is of another model");
    return state_key(name.field, found->second);
  }

  std::string path_;
  TensorReader source_;
  std::map<std::string, size_t> numbers_;  ///< Of the module's parameters.
  std::map<int64_t, std::string> names_;   ///< Of the numbers in the file, where it has them.
  std::optional<std::string> prefix_;
};

}  // namespace

StateDict load_python_optimizer(const std::filesystem::path& path, const torch::nn::Module& module,
                                const std::map<std::string, double>& settings) {
  if (std::filesystem::is_directory(path)) {
    if (const auto own = detail::checkpoint_at(path)) {
      StateDict state = with_prefix_removed(own->state, "optimizer.");
      if (!state.empty()) return state;
      throw DataError("the checkpoint in " + path.string() + " has no optimizer's state");
    }
  }
  PythonOptimizer optimizer(path, module);
  StateDict state = optimizer.state();
  optimizer.warn_of_differences(settings);
  return state;
}

}  // namespace lockstep
