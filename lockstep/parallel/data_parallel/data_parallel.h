#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/thread_pool.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/parallel/data_parallel/output_tensors.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/parallel/wrapped_module.h"

namespace lockstep {
namespace detail {

template <class ModulePtr>
using ModuleOf = std::remove_cvref_t<decltype(*std::declval<const ModulePtr&>())>;

template <class ModulePtr>
ModulePtr typed_pointer(const std::shared_ptr<torch::nn::Module>& module) {
  return ModulePtr(std::dynamic_pointer_cast<ModuleOf<ModulePtr>>(module));
}

/// Of its first tensor.
c10::Device device_of(const torch::nn::Module& module);

/// Another module of the same structure on `device`, made by `clone`, or by `make` where it is
/// given. Leaves the random numbers of the CPU as they were. Throws UsageError where the module
/// cannot be cloned, or the copy has other tensors.
std::shared_ptr<torch::nn::Module> copy_module(
    const std::shared_ptr<torch::nn::Module>& module, c10::Device device,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make = {});

/// A module and copies of it, whose tensors are kept equal to the module's. On the device of the
/// module a copy's parameters are the module's own memory. Of buffers that holds for the first
/// copy; the others have their own, so that what they write is lost.
class ReplicaSet {
 public:
  ReplicaSet(std::shared_ptr<torch::nn::Module> module,
             std::vector<std::shared_ptr<torch::nn::Module>> replicas);

  /// Before a forward of the first `count` replicas: brings over what has changed in the module,
  /// and its training modes. With `link` backward goes on from the replicas' parameters to the
  /// module's, where it adds the replicas' gradients in their order.
  void refresh(size_t count, bool link);
  const std::vector<std::shared_ptr<torch::nn::Module>>& replicas() const { return replicas_; }
  /// Tensors of replicas into which values were copied, so far.
  int64_t copies() const { return copies_; }

  /// A tensor of a replica and what it was made equal to.
  struct Own {
    at::Tensor tensor;
    int64_t source_version = -1;  ///< Nothing was copied yet.
    int64_t own_version = 0;
  };

 private:
  struct Row {
    at::Tensor source;
    bool is_buffer;
    std::vector<Own> own = {};  ///< By replica.
  };
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::shared_ptr<torch::nn::Module>> replicas_;
  std::vector<Row> rows_;
  int64_t copies_ = 0;
};

}  // namespace detail

/// A copy of the module on each device, as torch.nn.parallel.replicate. A device may be named
/// twice. Unless `detach` is set, backward through a copy reaches the module's parameters. On the
/// module's own device a copy's parameters share their memory. The copies are for one forward: make
/// new ones after the parameters have changed, or use DataParallel, which updates them.
///
/// The module must be torch::nn::Cloneable, as LibTorch's own modules are, or override `clone`.
/// Throws UsageError where it is not.
template <class ModulePtr>
std::vector<ModulePtr> replicate(const ModulePtr& module, const std::vector<c10::Device>& devices,
                                 bool detach = !c10::GradMode::is_enabled()) {
  const auto pointer = detail::module_pointer(module);
  std::vector<std::shared_ptr<torch::nn::Module>> copies;
  std::vector<ModulePtr> replicas;
  for (const c10::Device device : devices) {
    copies.push_back(detail::copy_module(pointer, device));
    replicas.push_back(detail::typed_pointer<ModulePtr>(copies.back()));
  }
  detail::ReplicaSet(pointer, std::move(copies)).refresh(devices.size(), !detach);
  return replicas;
}

namespace detail {

/// What each device gets of a value's tensors; for fewer devices where there are fewer rows. Throws
/// UsageError where tensors do not give equally many parts.
std::vector<std::vector<at::Tensor>> scatter_tensors(const std::vector<at::Tensor>& tensors,
                                                     const std::vector<c10::Device>& devices,
                                                     int64_t dim);
/// The other way round. Throws UsageError where replicas gave different numbers of tensors.
std::vector<at::Tensor> gather_tensors(const std::vector<std::vector<at::Tensor>>& of_replicas,
                                       c10::Device device, int64_t dim);
[[noreturn]] void throw_other_keys(size_t replica);

}  // namespace detail

/// Cuts the tensors in `value` along `dim` into a part for each device, as torch.Tensor.chunk does,
/// and moves each part there. Everything else is copied for each. `value` is a tensor, or what
/// OutputTensors knows: tuples, vectors, maps, types of your own. A tensor without dimensions goes
/// to each device whole. Where there are fewer rows than devices, there are fewer parts. On the
/// device where a tensor lies its parts share its memory. Gradients flow back into the tensors.
///
/// Throws UsageError where the tensors give different numbers of parts. (Python drops the rows that
/// are left over.)
template <class T>
std::vector<T> scatter(const T& value, const std::vector<c10::Device>& devices, int64_t dim = 0) {
  T copy = value;
  const auto tensors = detail::scatter_tensors(detail::collect_tensors(copy), devices, dim);
  std::vector<T> parts(tensors.size(), value);
  for (size_t i = 0; i < parts.size(); ++i) detail::replace_tensors(parts[i], tensors[i]);
  return parts;
}

/// Concatenates the replicas' output tensors along `dim`, on `device`. Tensors without dimensions
/// become a vector of one element per replica. Everything that is not a tensor is taken from the
/// first replica. Gradients flow back. Throws UsageError where the replicas gave different numbers
/// of tensors or maps with different keys, and for no outputs.
template <class T>
T gather(const std::vector<T>& outputs, c10::Device device, int64_t dim = 0) {
  std::vector<T> copies = outputs;
  std::vector<std::vector<at::Tensor>> tensors;
  for (T& copy : copies) tensors.push_back(detail::collect_tensors(copy));
  const auto joined = detail::gather_tensors(tensors, device, dim);
  if constexpr (requires { typename T::key_type; }) {
    for (size_t i = 1; i < copies.size(); ++i) {
      for (const auto& [key, item] : copies[0]) {
        if (!copies[i].contains(key)) detail::throw_other_keys(i);
      }
    }
  }
  detail::replace_tensors(copies.front(), joined);
  return std::move(copies.front());
}

/// What a replica of a DataParallel threw, in forward or in backward. The message names the replica
/// and its device, and holds the message of the cause.
class ReplicaError : public Error {
 public:
  ReplicaError(size_t replica, c10::Device device, const std::string& message,
               std::exception_ptr cause, int exit_code);
  size_t replica() const { return replica_; }
  c10::Device device() const { return device_; }
  /// The exception itself, of its own type.
  const std::exception_ptr& cause() const { return cause_; }
  /// The cause's.
  int exit_code() const noexcept override { return exit_code_; }

 private:
  size_t replica_;
  c10::Device device_;
  std::exception_ptr cause_;
  int exit_code_;
};

namespace detail {

/// A thread for each replica, which stay from call to call.
class ReplicaThreads {
 public:
  /// `threads_each`: LibTorch's threads for the operations of one replica, where devices are CPUs.
  /// 0: those of the caller in equal parts, at least 1.
  explicit ReplicaThreads(std::vector<c10::Device> devices, int threads_each = 0);

  const std::vector<c10::Device>& devices() const { return devices_; }

  /// Calls `work(i)` on the thread of replica i for all i below `count`, and waits for all. The
  /// threads have the caller's thread-local state: grad mode, autocast, current streams. When some
  /// have failed, the first one's failure is thrown as a ReplicaError. Any thread may call, except
  /// these.
  void run(size_t count, const std::function<void(size_t)>& work);

 private:
  std::vector<c10::Device> devices_;
  std::mutex one_caller_;
  std::vector<std::unique_ptr<c10::ThreadPool>> threads_;  ///< Of one thread each.
};

/// Makes what replicas computed on the CPU one node of the caller's graph. Its backward runs each
/// replica's part on the thread of that replica, where LibTorch's engine would run all of them on
/// one thread. `parameters[i]`: where replica i's graph begins. `outputs[i]`: the tensors that it
/// gave, which are replaced. Inputs with a graph of their own are one with the caller's: then
/// nothing is replaced, nor with other devices than CPUs, of which the engine has a thread each.
void join_graphs(const std::shared_ptr<ReplicaThreads>& threads,
                 const std::vector<std::vector<at::Tensor>>& parameters,
                 const std::vector<std::vector<at::Tensor>>& inputs,
                 std::vector<std::vector<at::Tensor>>& outputs);

/// Calls a module's forward with a tuple of arguments.
template <class ModulePtr, class Inputs>
auto call_forward(ModulePtr module, Inputs& inputs) {
  return std::apply([&](auto&... args) { return module->forward(args...); }, inputs);
}

/// What `call(modules[i], inputs[i])` gives for each of the inputs, all at once.
template <class ModulePtr, class Inputs, class Call>
auto apply_modules(const std::shared_ptr<ReplicaThreads>& threads,
                   const std::vector<ModulePtr>& modules, std::vector<Inputs>& inputs,
                   const Call& call) {
  using Output = std::decay_t<decltype(call(modules.front(), inputs.front()))>;
  std::vector<std::vector<at::Tensor>> parameters, given, tensors;
  for (Inputs& input : inputs) given.push_back(collect_tensors(input));
  std::vector<std::optional<Output>> made(inputs.size());
  threads->run(inputs.size(), [&](size_t i) { made[i].emplace(call(modules[i], inputs[i])); });
  std::vector<Output> outputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    outputs.push_back(std::move(*made[i]));
    parameters.push_back(modules[i]->parameters());
    tensors.push_back(collect_tensors(outputs[i]));
  }
  join_graphs(threads, parameters, given, tensors);
  for (size_t i = 0; i < outputs.size(); ++i) replace_tensors(outputs[i], tensors[i]);
  return outputs;
}

}  // namespace detail

/// Calls `modules[i]->forward(inputs[i]...)` for all i at once, each on a thread of its own, as
/// torch.nn.parallel.parallel_apply, and returns what they gave. `inputs[i]` is the tuple of the
/// arguments. The threads have the caller's grad mode, autocast and streams. Their LibTorch threads
/// are the caller's in equal parts, at least 1. On the CPU backward of the outputs runs on a thread
/// per module as well, unless an input needs a gradient. `devices` names the modules' devices in
/// errors, and says where streams are taken from. Empty: those of their first tensors.
///
/// Throws ReplicaError when a module throws, and UsageError for lists of different lengths.
template <class ModulePtr, class... Args>
auto parallel_apply(const std::vector<ModulePtr>& modules,
                    const std::vector<std::tuple<Args...>>& inputs,
                    std::vector<c10::Device> devices = {}) {
  if (devices.empty()) {
    for (const ModulePtr& module : modules) devices.push_back(detail::device_of(*module));
  }
  if (modules.empty() || modules.size() != inputs.size() || modules.size() != devices.size()) {
    throw UsageError("parallel_apply: " + std::to_string(modules.size()) + " modules, " +
                     std::to_string(inputs.size()) + " inputs and " +
                     std::to_string(devices.size()) +
                     " devices; expected equally many, at least one");
  }
  auto arguments = inputs;
  return detail::apply_modules(std::make_shared<detail::ReplicaThreads>(std::move(devices)),
                               modules, arguments,
                               detail::call_forward<ModulePtr, std::tuple<Args...>>);
}

/// The same for modules of one argument, a tensor.
template <class ModulePtr>
auto parallel_apply(const std::vector<ModulePtr>& modules, const std::vector<at::Tensor>& inputs,
                    std::vector<c10::Device> devices = {}) {
  std::vector<std::tuple<at::Tensor>> tuples(inputs.begin(), inputs.end());
  return lockstep::parallel_apply(modules, tuples, std::move(devices));
}

namespace detail {

/// The part of DataParallel that does not depend on the module's type.
class DataParallelCore {
 public:
  using Make = std::function<std::shared_ptr<torch::nn::Module>()>;
  DataParallelCore(std::shared_ptr<torch::nn::Module> module, DataParallelOptions options,
                   Make make);

  const std::vector<c10::Device>& devices() const { return options_.devices; }
  c10::Device output_device() const { return *options_.output_device; }
  int64_t dim() const { return options_.dim; }
  void make_replicas(std::string_view members);
  /// Calls `call(replica, part)` for each part at once, and gathers the outputs. `members` are the
  /// bytes of the module's object: where they, or what the module prints, are others than before,
  /// the replicas are made anew. Throws UsageError where the module is not on the first device.
  template <class Inputs, class Call>
  auto run(std::vector<Inputs>& parts, std::string_view members, const Call& call) {
    prepare(parts.size(), members);
    return lockstep::gather(apply_modules(threads_, replicas_->replicas(), parts, call),
                            output_device(), dim());
  }
  void check_devices() const;

 private:
  /// Before a forward of the first `count` replicas; see ReplicaSet.
  void prepare(size_t count, std::string_view members);

  std::shared_ptr<torch::nn::Module> module_;
  StateDict tensors_;  ///< The module's.
  DataParallelOptions options_;
  Make make_;
  std::optional<ReplicaSet> replicas_;  ///< None for one device.
  std::string members_;                 ///< What the replicas have been made from.
  std::shared_ptr<ReplicaThreads> threads_;
};

}  // namespace detail

/// Data parallelism in one process, as torch.nn.DataParallel: each forward cuts its inputs into a
/// part for each device, runs a replica of the module on each at once, and gathers the outputs.
/// Gradients of all replicas add up in the module's own parameters: give those to the optimizer.
/// On the CPU too, where replicas run in threads, forward and backward. (Backward runs on one
/// thread where an input needs a gradient.)
///
/// `ModulePtr` is a std::shared_ptr of a module or a torch ModuleHolder. The module must be
/// torch::nn::Cloneable, as LibTorch's own are, or override `clone`, or `make_replica` makes
/// modules of the same structure (UsageError otherwise). Their values are overwritten. Forward may
/// take and return what `scatter` and `gather` handle.
///
/// Replicas are kept from forward to forward. A parameter is copied again only if its version
/// counter in the module has changed. On the module's own device nothing is copied: replicas use
/// the module's memory. What a forward writes into buffers is kept for the first replica and lost
/// for the others, as in Python: batch norm's running statistics are those of the first part of the
/// batch. Changes that forward makes to other members never reach the module.
///
/// Members and options that the program changes between forwards (`dropout->options.p(0)`, a number
/// of the module's own type) are noticed, and the replicas are made again. This covers everything
/// that LibTorch's modules print, and all direct members of the module's own object. It does not
/// cover memory that members point to (the elements of a vector), nor your own submodules that do
/// not print the member (`pretty_print`). After such a change call `remake_replicas`.
///
/// If the inputs suffice for only one replica, the module itself runs. The outputs have the same
/// form: a loss of the module is a vector of one element. With one device outputs are the module's
/// own, as in Python: a loss is a scalar.
///
/// The sums of gradients have Python's order: replica 0's and 1's, then 2's, and so on. A parameter
/// that no replica used has no gradient. Random numbers (dropout) come from one generator in the
/// order in which the threads ask, so such runs differ. On the CPU double backward needs only
/// `create_graph` in backward, as usual. One backward of the outputs and of such gradients together
/// needs `retain_graph` as well. Hooks of the module itself are not called on replicas.
///
/// The module must be on the first device (UsageError). What a replica throws is a ReplicaError
/// with its device, in forward and backward. One thread at a time.
template <class ModulePtr>
class DataParallel {
 public:
  explicit DataParallel(ModulePtr module, DataParallelOptions options = {},
                        const std::function<ModulePtr()>& make_replica = {})
      : module_(std::move(module)),
        core_(detail::module_pointer(module_), std::move(options), untyped(make_replica)) {
    remake_replicas();
  }

  template <class... Args>
  auto forward(Args&&... args) {
    using Inputs = std::tuple<std::decay_t<Args>...>;
    Inputs inputs(std::forward<Args>(args)...);
    std::vector<Inputs> parts;
    if (sizeof...(Args) == 0) {
      parts.push_back(inputs);
    } else {
      parts = lockstep::scatter(inputs, core_.devices(), core_.dim());
    }
    if (parts.size() < 2) {
      core_.check_devices();
      auto output = detail::call_forward(module_, parts.front());
      if (core_.devices().size() == 1) return output;
      return lockstep::gather(std::vector<decltype(output)>{std::move(output)},
                              core_.output_device(), core_.dim());
    }
    const auto call = [](const std::shared_ptr<torch::nn::Module>& replica, Inputs& part) {
      return detail::call_forward(detail::typed_pointer<ModulePtr>(replica), part);
    };
    return core_.run(parts, members(), call);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// Makes the replicas from the module as it is now.
  void remake_replicas() { core_.make_replicas(members()); }

  /// The wrapped module: what to optimize and to save, without any prefix in its names.
  auto& module() { return *module_; }
  const auto& module() const { return *module_; }
  const std::vector<c10::Device>& devices() const { return core_.devices(); }

 private:
  std::string_view members() const {
    using Object = std::remove_cvref_t<decltype(*module_)>;
    return {reinterpret_cast<const char*>(std::addressof(*module_)), sizeof(Object)};
  }

  static detail::DataParallelCore::Make untyped(const std::function<ModulePtr()>& make) {
    if (!make) return {};
    return [make] { return detail::module_pointer(make()); };
  }

  ModulePtr module_;
  detail::DataParallelCore core_;
};

/// DataParallel as a strategy: one process, whose replicas each take a part of every batch. The
/// criterion sees the gathered output, so a mean is that of the whole batch. One process only, and
/// batches with `input`, `target` and `criterion`: UsageError otherwise. The module must have a
/// `clone`, and the setup a `forward`. With one replica the module itself runs, as with ddp.
/// state_bytes() counts the module's own parameters, not those of replicas on further devices.
std::unique_ptr<Strategy> make_dp_strategy(const StrategySetup& setup);

/// One forward of a module over several devices, as torch.nn.parallel.data_parallel. It makes the
/// replicas again each time: for several forwards keep a DataParallel.
template <class ModulePtr, class... Args>
auto data_parallel(const ModulePtr& module, std::tuple<Args...> inputs,
                   const DataParallelOptions& options = {}) {
  DataParallel<ModulePtr> parallel(module, options);
  return std::apply([&](auto&... each) { return parallel.forward(each...); }, inputs);
}
template <class ModulePtr>
auto data_parallel(const ModulePtr& module, const at::Tensor& input,
                   const DataParallelOptions& options = {}) {
  return lockstep::data_parallel(module, std::tuple<at::Tensor>(input), options);
}

}  // namespace lockstep
