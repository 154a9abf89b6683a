#include "lockstep/models/script_model.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace jit = torch::jit;

/// LibTorch's errors have the script's own lines and the interpreter's stack; the last line that
/// says
/// "...Error: what" is the cause.
std::string cause_of(const std::string& text) {
  std::string first, cause;
  for (const std::string& line : split(text, '\n')) {
    if (line.empty()) continue;
    if (first.empty()) first = line;
    if (line.find("Error: ") != std::string::npos) cause = line;
  }
  return cause.empty() ? first : cause;
}

/// torch.save's archives have no constants.
bool is_script(const std::string& path) {
  try {
    return caffe2::serialize::PyTorchStreamReader(path).hasRecord("constants.pkl");
  } catch (const c10::Error&) {
    return false;
  }
}

jit::Module read_script(const std::string& path) {
  expect_script_file(path);
  try {
    return jit::load(path, c10::kCPU);
  } catch (const c10::Error& error) {
    throw UsageError(
        "model '" + path + "' is no TorchScript" +
            (is_script(path) ? " that can be read: " + cause_of(error.what_without_backtrace())
                             : ", or a damaged one"),
        "in Python torch.jit.script(module).save(FILE) writes a module; give the weights that "
        "torch.save wrote to --load-weights as they are");
  }
}

/// What stands in a script for the tensors that it had. Names of one tensor get one again: so tied
/// weights stay tied.
using Replacements = std::map<const c10::TensorImpl*, at::Tensor>;

/// Puts a tensor into the place of the one of this name in a script.
void replace(jit::Module script, const std::string& name, const at::Tensor& value,
             Replacements& replacements) {
  auto path = split(name, '.');
  const std::string leaf = path.back();
  path.pop_back();
  for (const std::string& child : path) script = script.attr(child).toModule();
  const at::Tensor own = script.attr(leaf).toTensor();
  at::Tensor& replacement = replacements[own.unsafeGetTensorImpl()];
  if (!replacement.defined())
    replacement = value.detach().to(at::kCPU, false, true).set_requires_grad(own.requires_grad());
  script.setattr(leaf, replacement);
}

/// The same tree of names as the script's. The tensors are the script's own.
void mirror(const jit::Module& from, torch::nn::Module& to) {
  for (const auto& item : from.named_parameters(/*recurse=*/false)) {
    to.register_parameter(item.name, item.value, item.value.requires_grad());
  }
  for (const auto& item : from.named_buffers(/*recurse=*/false)) {
    to.register_buffer(item.name, item.value);
  }
  for (const auto& item : from.named_children()) {
    mirror(item.value,
           *to.register_module(item.name, std::make_shared<torch::nn::Module>(item.name)));
  }
}

class ScriptModel : public Model {
 public:
  explicit ScriptModel(const std::string& path)
      : Model(path), path_(path), script_(read_script(path)) {
    mirror(script_, *this);
    bool trainable = false;
    for (const at::Tensor& parameter : parameters()) trainable |= parameter.requires_grad();
    if (!trainable) {
      throw UsageError("model '" + path + "' has no parameter to train",
                       "save the module before torch.jit.freeze, with requires_grad");
    }
    check_form();
    script_.train();
  }

  at::Tensor forward(at::Tensor input) override {
    jit::IValue output;
    try {
      output = script_.forward({input});
    } catch (const c10::Error& error) {
      refuse(input, cause_of(error.what_without_backtrace()));
    } catch (const std::runtime_error& error) {  // what the interpreter makes of it
      refuse(input, cause_of(error.what()));
    }
    if (output.isTensor()) return output.toTensor();
    throw UsageError("model '" + path_ + "': forward gives " + output.tagKind() +
                     ", expected one tensor");
  }

  void train(bool on) override {
    Model::train(on);
    script_.train(on);
  }

  void save(const StateDict& state, const std::filesystem::path& path) const {
    jit::Module copy = script_.clone(/*inplace=*/true);  // The tensors are shared until replaced.
    Replacements replacements;
    for (const auto& [name, tensor] : state) replace(copy, name, tensor, replacements);
    copy.eval();
    std::ostringstream bytes;
    copy.save(bytes);
    write_file_atomically(path, bytes.view());
  }

 private:
  void check_form() {
    const auto method = script_.find_method("forward");
    if (!method) throw UsageError("model '" + path_ + "' has no forward");
    size_t needed = 0;
    for (const auto& argument : method->function().getSchema().arguments()) {
      needed += !argument.default_value();
    }
    if (needed != 2) {  // self and the input
      throw UsageError("model '" + path_ + "': forward takes " + std::to_string(needed - 1) +
                           " inputs without a default, expected one",
                       "wrap it in a module whose forward has one input");
    }
  }

  [[noreturn]] void refuse(const at::Tensor& input, const std::string& cause) const {
    throw UsageError(
        "model '" + path_ + "' cannot take a batch " + c10::str(input.sizes()) + " of " +
            c10::toString(input.scalar_type()) + ": " + cause,
        "the model gets the data set's samples as they are; begin it with Flatten if it "
        "takes rows");
  }

  std::string path_;
  jit::Module script_;
};

}  // namespace

void expect_script_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) return;
  throw UsageError("model '" + path + "': there is no such file",
                   "name a file of torch.jit.script(module).save(FILE), or one of the models");
}

bool names_script_file(const std::string& name) {
  if (name.find('/') != std::string::npos) return true;
  for (const char* ending : {".pt", ".pth", ".ts"}) {
    if (name.ends_with(ending)) return true;
  }
  return false;
}

std::shared_ptr<Model> load_script_model(const std::string& path) {
  return std::make_shared<ScriptModel>(path);
}

void save_script_model(const Model& model, const StateDict& state,
                       const std::filesystem::path& path) {
  const auto* script = dynamic_cast<const ScriptModel*>(&model);
  if (!script) throw UsageError("model " + model.name() + " is no TorchScript");
  script->save(state, path);
}

}  // namespace lockstep
