#include "lockstep/train/weights.h"

#include <ATen/ops/full.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
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

at::Tensor whole_number(double value) {
  return at::full({1}, static_cast<int64_t>(value), at::kLong);
}

class PythonOptimizer {
 public:
  PythonOptimizer(const std::filesystem::path& path, const torch::nn::Module& module)
      : path_(path.string()), source_(path) {
    std::map<const c10::TensorImpl*, size_t> seen;
    for (const auto& parameter : module.named_parameters()) {
      const auto [place, is_new] =
          seen.emplace(parameter.value().unsafeGetTensorImpl(), seen.size());
      numbers_.emplace(parameter.key(), place->second);
      if (!is_new) continue;
      all_.push_back(place->second);
      if (parameter.value().requires_grad()) trained_.push_back(place->second);
    }
  }

  StateDict state() {
    std::map<std::string, std::map<std::string, at::Tensor>> entries;  // Fields by parameter.
    for (const TensorInfo& tensor : source_.tensors()) {
      if (const auto name = state_name(tensor.name))
        entries[name->parameter][name->field] = source_.read(tensor.name);
    }
    for (const auto& item : source_.values()) {
      const auto name = parse_state_name(item.first);
      const auto step = number(item.first);
      if (name && step && name->field == kStep && name->prefix == prefix_)
        entries[name->parameter][kStep] = whole_number(*step);
    }
    const auto is_of_group = [](const auto& item) {
      return item.first.find("param_groups.") != std::string::npos;
    };
    // That of SGD without momentum has settings alone.
    if (entries.empty() && std::ranges::any_of(source_.values(), is_of_group)) return {};
    if (entries.empty())
      throw DataError(path_ + " holds no optimizer's state",
                      "save it with torch.save({\"model\": model.state_dict(), \"optimizer\": "
                      "optimizer.state_dict()}, FILE) after a step");
    // A file of tensors alone has no groups.
    count_ = group_of_.empty() ? entries.size() : group_of_.size();
    StateDict state;
    for (auto& [parameter, fields] : entries) {
      add_step_of_group(parameter, fields);
      const size_t place = place_of(parameter);
      for (const auto& [field, value] : fields)
        state.emplace_back(state_key(field, place),
                           field == kStep ? value.to(at::kLong).reshape({1}) : value);
    }
    log_info(path_ + ": the optimizer's state of " +
             counted(static_cast<int64_t>(entries.size()), "parameter") +
             (by_order_
                  ? " is taken in the order of the model's, as the file has no names of them; "
                    "Python's optimizer must have had the same order"
                  : " is taken by name"));
    return state;
  }

  /// Of each group, once for each value.
  void warn_of_differences(const std::map<std::string, double>& settings) const {
    const std::string groups = prefix_.value_or("") + "param_groups.";
    std::set<std::pair<std::string, double>> warned;
    for (const auto& item : source_.values()) {
      const std::string& name = item.first;
      const auto wanted = settings.find(name.substr(name.rfind('.') + 1));
      const auto saved = number(name);
      if (!name.starts_with(groups) || wanted == settings.end() || !saved) continue;
      const bool differs = std::abs(*saved - wanted->second) > 1e-9 * std::abs(wanted->second);
      if (differs && warned.emplace(wanted->first, *saved).second)
        log_warning(path_ + ": the optimizer was saved with " + wanted->first + " " +
                    std::to_string(*saved) + ", this run has " + std::to_string(wanted->second));
    }
  }

 private:
  /// None for what is no optimizer's.
  std::optional<StateName> state_name(const std::string& text) {
    const auto name = parse_state_name(text);
    if (!name) return std::nullopt;
    if (!prefix_) {
      prefix_ = name->prefix;
      read_groups();
    }
    if (*prefix_ == name->prefix) return name;
    throw DataError(
        path_ + " holds several optimizers: " + *prefix_ + "state and " + name->prefix + "state",
        "save the one of this model alone");
  }

  /// "param_groups.GROUP.params.PLACE" is a parameter's number, or its name; with a number
  /// "param_names" may have the name.
  void read_groups() {
    const std::string groups = *prefix_ + "param_groups.";
    for (const auto& [key, value] : source_.values()) {
      if (!key.starts_with(groups)) continue;
      const auto way = split(key.substr(groups.size()), '.');
      if (way.size() != 3 || way[1] != "params") continue;
      const std::string* text = std::get_if<std::string>(&value);
      const auto index = number(key);
      if (!text && !index) continue;
      const std::string parameter = text ? *text : std::to_string(static_cast<int64_t>(*index));
      group_of_[parameter] = groups + way[0];
      const auto named = source_.values().find(groups + way[0] + ".param_names." + way[2]);
      if (named == source_.values().end()) continue;
      if (const auto* name = std::get_if<std::string>(&named->second)) names_[parameter] = *name;
    }
  }

  /// Fused optimizers of apex and DeepSpeed count in the group.
  void add_step_of_group(const std::string& parameter,
                         std::map<std::string, at::Tensor>& fields) const {
    const auto group = group_of_.find(parameter);
    if (fields.contains(kStep) || group == group_of_.end()) return;
    if (const auto step = number(group->second + ".step")) fields[kStep] = whole_number(*step);
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

  /// The place of a parameter among the module's.
  size_t place_of(const std::string& parameter) {
    const auto named = names_.find(parameter);
    const auto index = parse_int(parameter);
    if (index && named == names_.end()) return place_in_order(*index);
    const std::string name =
        detail::without_layer_wrappers(named == names_.end() ? parameter : named->second);
    for (size_t begin = 0;;) {
      const auto found = numbers_.find(name.substr(begin));
      if (found != numbers_.end()) return found->second;
      begin = name.find('.', begin) + 1;
      if (begin == 0 || !detail::is_wrapper(name.substr(0, begin))) break;
    }
    throw CheckpointError(path_ + " holds an optimizer's state of parameter '" + name +
                              "', which the model does not have",
                          "it is of another model");
  }

  /// Python numbers parameters in the order of the groups. With one group that is the module's, of
  /// all parameters or of the trained ones.
  size_t place_in_order(int64_t index) {
    by_order_ = true;
    constexpr const char* kHint =
        "make it from model.named_parameters() in Python (PyTorch 2.6 or later)";
    std::set<std::string> groups;
    for (const auto& [parameter, group] : group_of_) groups.insert(group);
    if (groups.size() > 1)
      throw DataError(path_ + ": the optimizer has several groups of parameters without names",
                      kHint);
    const auto& order = count_ == all_.size() ? all_ : trained_;
    if (count_ == order.size() && index >= 0 && static_cast<size_t>(index) < count_)
      return order[static_cast<size_t>(index)];
    throw CheckpointError(path_ + ": the optimizer has " +
                              counted(static_cast<int64_t>(count_), "parameter") +
                              " without names, the model " + std::to_string(all_.size()) +
                              ", of which " + std::to_string(trained_.size()) + " are trained",
                          std::string(kHint) + ", or --freeze what it did not train");
  }

  std::string path_;
  TensorReader source_;
  std::map<std::string, size_t> numbers_;     ///< Of the module's parameters, by name.
  std::vector<size_t> all_, trained_;         ///< Numbers in the module's order.
  std::map<std::string, std::string> names_;  ///< Of the numbers in the file, where it has them.
  std::map<std::string, std::string>
      group_of_;  ///< "param_groups.0" of each parameter in the file.
  std::optional<std::string> prefix_;
  size_t count_ = 0;  ///< Parameters of Python's optimizer.
  bool by_order_ = false;
};

}  // namespace

StateDict load_python_optimizer(const std::filesystem::path& path, const torch::nn::Module& module,
                                const std::map<std::string, double>& settings) {
  if (const auto own = detail::checkpoint_at(path)) {
    StateDict state = read_tensors(*own, own->state, "optimizer.");
    if (!state.empty()) return state;
    throw DataError("the checkpoint in " + path.string() + " has no optimizer's state");
  }
  PythonOptimizer optimizer(path, module);
  StateDict state = optimizer.state();
  optimizer.warn_of_differences(settings);
  return state;
}

}  // namespace lockstep
