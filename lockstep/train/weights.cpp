#include "lockstep/train/weights.h"

#include <fnmatch.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/data/tensor_reader.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

/// What a folder of files has its weights in.
fs::path weights_in(const fs::path& path) {
  const fs::path file = path / "model.safetensors";
  return fs::is_directory(path) && fs::exists(file) ? file : path;
}

std::string first_part(const std::string& name) {
  return name.substr(0, name.find('.'));
}

/// Whether a name is of what a training saves beside its model.
bool is_training_state(const std::string& name) {
  static const std::set<std::string> known = {"optimizer",     "optimizers", "optim",
                                              "train_state",   "dataloader", "lr_scheduler",
                                              "lr_schedulers", "scheduler",  "scaler"};
  return name.find('.') != std::string::npos && known.contains(first_part(name));
}

/// What batch norm counts, or "" for another name: the name of its statistics.
std::string statistics_of(const std::string& name) {
  constexpr std::string_view kCount = "num_batches_tracked";
  if (name != kCount && !name.ends_with("." + std::string(kCount))) return {};
  return name.substr(0, name.size() - kCount.size()) + "running_mean";
}

/// The rules of WeightsSelection::rename.
class Renames {
 public:
  explicit Renames(const std::vector<std::string>& rules) {
    for (const std::string& rule : rules) {
      const auto sides = split(rule, '=');
      const auto stars = [&](size_t side) {
        return std::count(sides[side].begin(), sides[side].end(), '*');
      };
      if (sides.size() != 2 || stars(0) != stars(1) || stars(0) > 1) {
        throw UsageError("'" + rule + "' does not say how to rename weights",
                         "expected OLD=NEW, with one * in each or in none: encoder.*=backbone.*");
      }
      rules_.push_back({rule, sides[0], sides[1]});
    }
  }

  std::string of(const std::string& name) {
    for (Rule& rule : rules_) {
      const auto result = applied(rule, name);
      if (!result) continue;
      rule.used = true;
      return *result;
    }
    return name;
  }

  void check_all_used(const std::string& source) const {
    for (const Rule& rule : rules_) {
      if (rule.used) continue;
      throw UsageError(source + " has no tensor to rename by '" + rule.text + "'",
                       "lockstep checkpoint inspect lists the names");
    }
  }

 private:
  struct Rule {
    std::string text, from, to;
    bool used = false;
  };

  static std::optional<std::string> applied(const Rule& rule, const std::string& name) {
    const size_t star = rule.from.find('*');
    if (star == std::string::npos) return name == rule.from ? std::optional(rule.to) : std::nullopt;
    const std::string before = rule.from.substr(0, star), after = rule.from.substr(star + 1);
    const bool fits = name.size() >= before.size() + after.size() && name.starts_with(before) &&
                      name.ends_with(after);
    if (!fits) return std::nullopt;
    const std::string kept = name.substr(star, name.size() - before.size() - after.size());
    return std::string(rule.to).replace(rule.to.find('*'), 1, kept);
  }

  std::vector<Rule> rules_;
};

/// Those of `names` that match one of the patterns. `kind` is what the names are of.
std::set<std::string> matching(const std::vector<std::string>& names,
                               const std::vector<std::string>& patterns, const std::string& kind) {
  std::set<std::string> found;
  for (const std::string& pattern : patterns) {
    bool used = false;
    for (const std::string& name : names) {
      if (::fnmatch(pattern.c_str(), name.c_str(), 0) != 0) continue;
      found.insert(name);
      used = true;
    }
    if (!used)
      throw UsageError(
          "the model has no " + kind + " whose name matches '" + pattern + "'",
          names.empty() ? "" : "its names are like " + names.front() + " and " + names.back());
  }
  return found;
}

/// Of the model's tensors those that are to be loaded.
StateDict selected(const StateDict& own, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return own;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : own) names.push_back(name);
  const std::set<std::string> found = matching(names, patterns, "tensor");
  StateDict wanted;
  for (const auto& item : own) {
    if (found.contains(item.first)) wanted.push_back(item);
  }
  return wanted;
}

/// Whether the tensor is of the layer that has the model's last parameters.
bool is_of_head(const std::string& name, const torch::nn::Module& module) {
  const auto parameters = module.named_parameters();
  const std::string last = parameters.is_empty() ? "" : parameters.back().key();
  const size_t dot = last.rfind('.');
  return dot != std::string::npos && name.starts_with(last.substr(0, dot + 1));
}

/// Whether only the number of classes differs.
bool has_other_classes(const at::Tensor& own, const at::Tensor& read) {
  return own.dim() > 0 && own.dim() == read.dim() && own.size(0) != read.size(0) &&
         own.sizes().slice(1) == read.sizes().slice(1);
}

/// What stands in `names` before the names of `wanted`: the shortest prefix that is known, or all
/// others that have the whole of `wanted`. None where names begin with it.
std::set<std::string> prefixes_of(const std::vector<std::string>& names, const StateDict& wanted) {
  if (wanted.empty()) return {};
  const std::string& first = wanted.front().first;
  std::string shortest;
  std::set<std::string> others;
  for (const std::string& name : names) {
    if (name == first) return {};
    if (!name.ends_with("." + first)) continue;
    const std::string prefix = name.substr(0, name.size() - first.size());
    if (!detail::is_wrapper(prefix)) {
      others.insert(prefix);
    } else if (shortest.empty() || prefix.size() < shortest.size()) {
      shortest = prefix;
    }
  }
  if (!shortest.empty()) return {shortest};
  const std::set<std::string> all(names.begin(), names.end());
  std::erase_if(others, [&](const std::string& prefix) {
    return std::any_of(wanted.begin(), wanted.end(), [&](const auto& item) {
      return statistics_of(item.first).empty() && !all.contains(prefix + item.first);
    });
  });
  return others;
}

struct NamedWeights {
  StateDict tensors;  ///< By the model's names.
  std::string hint;   ///< Of the error, where they do not fit.
};

/// The prefix to take away; what else might be meant becomes the hint.
std::string choose_prefix(const std::vector<std::string>& names, const fs::path& path,
                          const StateDict& wanted, bool is_part, std::string& hint) {
  const std::set<std::string> prefixes = prefixes_of(names, wanted);
  hint =
      "give the --model that the weights were saved from; `lockstep train` also takes their other "
      "names by --load-rename 'OLD.*=NEW.*', and a part of it by --load-only";
  if (prefixes.empty()) return {};
  const std::string& first = *prefixes.begin();
  if (detail::is_wrapper(first)) return first;
  if (prefixes.size() == 1 && !is_part) {
    log_info(path.string() + ": the weights are those of '" + first +
             "*', which has all names of the model; all else is left aside");
    return first;
  }
  std::vector<std::string> rules;
  for (const std::string& prefix : prefixes) rules.push_back("'" + prefix + "*=*'");
  hint = "say which weights are meant: " + std::string(is_part ? "" : "--load-only '*' ") +
         "--load-rename " + join(rules, " or ");
  return {};
}

/// The weights of a source, which `path` names.
NamedWeights read_named(const TensorReader& source, const fs::path& path, const StateDict& wanted,
                        const WeightsSelection& selection) {
  Renames renames(selection.rename);
  std::set<std::string> own, own_parts;
  for (const auto& [name, tensor] : wanted) {
    own.insert(name);
    own_parts.insert(first_part(name));
  }
  std::vector<std::string> names;
  for (const TensorInfo& tensor : source.tensors()) {
    names.push_back(renames.of(tensor.name));
    if (!own.contains(names.back())) names.back() = detail::without_layer_wrappers(names.back());
  }
  renames.check_all_used(path.string());
  NamedWeights named;
  const std::string prefix =
      choose_prefix(names, path, wanted, !selection.only.empty(), named.hint);
  std::map<std::string, const std::string*> taken;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!names[i].starts_with(prefix)) continue;
    const std::string name = names[i].substr(prefix.size());
    const bool is_beside = is_training_state(name) && !own_parts.contains(first_part(name));
    if (!own.contains(name) && (is_beside || !selection.only.empty())) continue;
    const std::string& in_source = source.tensors()[i].name;
    const auto [other, is_new] = taken.emplace(name, &in_source);
    if (!is_new) {
      throw UsageError(path.string() + ": " + *other->second + " and " + in_source +
                       " would both become " + name);
    }
    named.tensors.emplace_back(name, source.read(in_source));
  }
  return named;
}

NamedWeights read_weights(const fs::path& path, const StateDict& wanted,
                          const WeightsSelection& selection) {
  const auto checkpoint = detail::checkpoint_at(path);
  const TensorReader source(checkpoint ? checkpoint->folder : weights_in(path),
                            /*weights_only=*/checkpoint.has_value());
  return read_named(source, path, wanted, selection);
}

}  // namespace

bool detail::is_wrapper(const std::string& prefix) {
  static const std::set<std::string> known = {
      "module", "model", "net", "state_dict", "model_state", "model_state_dict", "MODEL_STATE"};
  size_t begin = 0;
  for (size_t dot = 0; (dot = prefix.find('.', begin)) != std::string::npos; begin = dot + 1) {
    if (!known.contains(prefix.substr(begin, dot - begin))) return false;
  }
  return begin == prefix.size();
}

std::string detail::without_layer_wrappers(std::string name) {
  for (const std::string wrapper :
       {"_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."}) {
    for (size_t at = 0; (at = name.find(wrapper, at)) != std::string::npos;) {
      if (at > 0 && name[at - 1] != '.') {
        at += wrapper.size();
      } else {
        name.erase(at, wrapper.size());
      }
    }
  }
  return name;
}

std::optional<StoredCheckpoint> detail::checkpoint_at(const fs::path& path) {
  const bool is_folder_of_them = !CheckpointFolder(path).list().empty();
  if (!is_folder_of_them && !fs::exists(path / "state.json")) return std::nullopt;
  StoredCheckpoint found = load_newest(path);
  if (is_folder_of_them) log_info("reading checkpoint " + found.folder.string());
  return found;
}

void check_weights_exist(const fs::path& path) {
  std::error_code ignored;
  if (fs::exists(path, ignored)) return;
  throw DataError("no weights at " + path.string() + ": there is no such file or folder",
                  "give a safetensors or .pt file, as --save-weights or torch.save writes, or a "
                  "checkpoint's folder");
}

std::vector<std::string> load_weights(torch::nn::Module& module, const std::filesystem::path& path,
                                      const WeightsSelection& selection) {
  check_weights_exist(path);
  const StateDict own = state_dict(module);
  const StateDict wanted = selected(own, selection.only);
  auto [tensors, hint] = read_weights(path, wanted, selection);
  std::set<std::string> names;
  for (const auto& [name, tensor] : wanted) names.insert(name);
  const auto find = [&tensors = tensors](const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const auto& one) { return one.first == name; });
  };
  std::vector<std::string> kept;
  for (const auto& item : own) {
    const auto read = find(item.first);
    const bool is_other_head = selection.new_head && read != tensors.end() &&
                               is_of_head(item.first, module) &&
                               has_other_classes(item.second, read->second);
    const std::string statistics = statistics_of(item.first);
    const bool is_old_count =
        read == tensors.end() && !statistics.empty() && find(statistics) != tensors.end();
    if (!is_other_head && !is_old_count && names.contains(item.first)) continue;
    if (is_other_head) tensors.erase(read);
    tensors.push_back(item);  // It is copied to itself.
    if (!is_old_count) kept.push_back(item.first);
  }
  load_state_dict(module, tensors, path.string(), hint);
  return kept;
}

int64_t freeze_parameters(torch::nn::Module& module, const std::vector<std::string>& patterns) {
  const auto parameters = module.named_parameters();
  const std::set<std::string> frozen = matching(parameters.keys(), patterns, "parameter");
  const bool all = std::all_of(parameters.begin(), parameters.end(), [&](const auto& item) {
    return frozen.contains(item.key()) || !item.value().requires_grad();
  });
  if (all) throw UsageError("all parameters would be frozen: nothing is left to train");
  int64_t elements = 0;
  for (const auto& item : parameters) {
    if (!frozen.contains(item.key())) continue;
    at::Tensor(item.value()).set_requires_grad(false);
    elements += item.value().numel();
  }
  return elements;
}

void check_weights_name(const std::string& what, const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension.empty() || !format_of_name(path).empty()) return;
  throw UsageError(what + " " + path.string() +
                       ": weights are written as safetensors or .pt, not as " + extension.substr(1),
                   "name the file " + fs::path(path).replace_extension(".safetensors").string());
}

void save_weights(const StateDict& tensors, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  if (format_of_name(path) == "pt") return save_pt(path, tensors);
  std::map<std::string, std::string> all = metadata;
  all.emplace("format", "pt");
  save_safetensors(path, tensors, all);
}

void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  StateDict tensors = state_dict(module);
  detail::require_values(tensors);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach();
  save_weights(tensors, path, metadata);
}

}  // namespace lockstep
