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

/// Whether a file's prefix is of what wraps a module or names a part of a checkpoint.
bool is_wrapper(const std::string& prefix) {
  static const std::set<std::string> known = {
      "module",      "_orig_mod",        "model",      "net", "state_dict",
      "model_state", "model_state_dict", "MODEL_STATE"};
  size_t begin = 0;
  for (size_t dot = 0; (dot = prefix.find('.', begin)) != std::string::npos; begin = dot + 1) {
    if (!known.contains(prefix.substr(begin, dot - begin))) return false;
  }
  return begin == prefix.size();
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

/// What stands in `names` before the names of `wanted`. Empty where nothing that is known does.
std::string prefix_of(const std::vector<std::string>& names, const StateDict& wanted) {
  if (wanted.empty()) return {};
  const std::string& first = wanted.front().first;
  std::string shortest;
  for (const std::string& name : names) {
    if (name == first) return {};
    if (!name.ends_with("." + first)) continue;
    const std::string prefix = name.substr(0, name.size() - first.size());
    if (is_wrapper(prefix) && (shortest.empty() || prefix.size() < shortest.size())) {
      shortest = prefix;
    }
  }
  return shortest;
}

/// The tensors of a source, which `read` gives one by one, by the model's names.
template <class Read>
StateDict read_named(const std::vector<std::string>& found, const fs::path& path,
                     const StateDict& wanted, const WeightsSelection& selection, const Read& read) {
  Renames renames(selection.rename);
  std::vector<std::string> names;
  for (const std::string& name : found) names.push_back(renames.of(name));
  renames.check_all_used(path.string());
  const std::string prefix = prefix_of(names, wanted);
  std::set<std::string> own;
  for (const auto& [name, tensor] : wanted) own.insert(name);
  std::map<std::string, const std::string*> taken;
  StateDict tensors;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!names[i].starts_with(prefix)) continue;
    const std::string name = names[i].substr(prefix.size());
    if (!own.contains(name) && !selection.only.empty()) continue;
    const auto [other, is_new] = taken.emplace(name, &found[i]);
    if (!is_new) {
      throw UsageError(path.string() + ": " + *other->second + " and " + found[i] +
                       " would both become " + name);
    }
    tensors.emplace_back(name, read(i));
  }
  return tensors;
}

StateDict read_weights(const fs::path& path, const StateDict& wanted,
                       const WeightsSelection& selection) {
  std::vector<std::string> names;
  if (fs::is_directory(path)) {
    if (const auto checkpoint = detail::checkpoint_at(path)) {
      for (const auto& [name, tensor] : checkpoint->model) names.push_back(name);
      return read_named(names, path, wanted, selection,
                        [&](size_t i) { return checkpoint->model[i].second; });
    }
  }
  const TensorReader source(weights_in(path));
  for (const TensorInfo& tensor : source.tensors()) names.push_back(tensor.name);
  return read_named(names, path, wanted, selection,
                    [&](size_t i) { return source.read(names[i]); });
}

}  // namespace

std::optional<Checkpoint> detail::checkpoint_at(const fs::path& folder) {
  if (fs::exists(folder / "state.json")) return read_checkpoint(folder);
  auto newest = CheckpointFolder(folder).read_newest();
  if (!newest) return std::nullopt;
  log_info("reading checkpoint " + newest->first.string());
  return std::move(newest->second);
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
  StateDict tensors = read_weights(path, wanted, selection);
  std::set<std::string> names;
  for (const auto& [name, tensor] : wanted) names.insert(name);
  std::vector<std::string> kept;
  for (const auto& item : own) {
    const auto read = std::find_if(tensors.begin(), tensors.end(),
                                   [&](const auto& one) { return one.first == item.first; });
    const bool is_other_head = selection.new_head && read != tensors.end() &&
                               is_of_head(item.first, module) &&
                               has_other_classes(item.second, read->second);
    if (!is_other_head && names.contains(item.first)) continue;
    if (is_other_head) tensors.erase(read);
    tensors.push_back(item);  // It is copied to itself.
    kept.push_back(item.first);
  }
  load_state_dict(module, tensors, path.string());
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
