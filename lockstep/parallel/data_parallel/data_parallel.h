#pragma once

#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/parallel/data_parallel/parallel_apply.h"
#include "lockstep/parallel/data_parallel/replicate.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

struct DataParallelOptions {
  /// One device per replica; a device may be listed twice. Empty: for a module on the CPU one
  /// replica per core of the process, else all devices of the module's type.
  std::vector<c10::Device> devices = {};
  std::optional<c10::Device> output_device = {};  ///< Where outputs are gathered. None: the first.
  int64_t dim = 0;                                ///< Along which inputs are cut.
  /// LibTorch threads per replica on the CPU. 0: an equal part of the constructing thread's number,
  /// at least 1. More threads in total than cores slow all of them down.
  int threads_per_replica = 0;
};

/// What a DataParallel has done so far.
struct DataParallelStatistics {
  int64_t forwards = 0;  ///< That used several replicas.
  /// Tensors whose values were copied into replicas. Parameters on the module's own device are
  /// never copied.
  int64_t copied_tensors = 0;
};

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
  /// Runs each part on a replica, which `typed` makes of the copied module, and gathers the
  /// outputs. `members` are the bytes of the module's object: where they, or what the module
  /// prints, are others than before, the replicas are made anew. Throws UsageError where the module
  /// is not on the first device.
  template <class Inputs, class Typed>
  auto run(std::vector<Inputs>& parts, std::string_view members, const Typed& typed) {
    prepare(parts.size(), members);
    std::vector<decltype(typed(module_))> replicas;
    for (const auto& replica : replicas_->replicas()) replicas.push_back(typed(replica));
    return lockstep::gather(apply_modules(threads_, replicas, parts), output_device(), dim());
  }
  DataParallelStatistics statistics() const;
  int64_t own_bytes() const { return replicas_ ? replicas_->own_bytes() : 0; }
  void check_devices() const;

 private:
  /// Before a forward of the first `count` replicas; see ReplicaSet.
  void prepare(size_t count, std::string_view members);

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> tensors_;  ///< The module's.
  DataParallelOptions options_;
  Make make_;
  std::optional<ReplicaSet> replicas_;  ///< None for one device.
  std::string members_;                 ///< What the replicas have been made from.
  int64_t earlier_copies_ = 0;          ///< Of replicas that were made anew.
  std::shared_ptr<ReplicaThreads> threads_;
  int64_t forwards_ = 0;
};

}  // namespace detail

/// Data parallelism in one process, as torch.nn.DataParallel: each forward cuts its inputs into a
/// part for each device, runs a replica of the module on each at once, and gathers the outputs.
/// Gradients of all replicas add up in the module's own parameters: give those to the optimizer.
/// On the CPU too, where replicas run in threads, forward and backward.
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
/// form: a loss of the module is a vector of one element. With one device it is a scalar.
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
      auto output =
          std::apply([&](auto&... each) { return module_->forward(each...); }, parts.front());
      detail::replace_tensors(output, Mover{core_.output_device(), core_.devices().size() > 1,
                                            detail::tensors_of(output)});
      return output;
    }
    return core_.run(parts, members(), detail::typed_pointer<ModulePtr>);
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
  DataParallelStatistics statistics() const { return core_.statistics(); }

 private:
  /// What `gather` does of one output. With one device it is the module's own, as in Python.
  struct Mover {
    c10::Device device;
    bool gathers;
    std::vector<at::Tensor> tensors;
    size_t next = 0;
    at::Tensor operator()() {
      const at::Tensor there = tensors[next++].to(device);
      return gathers && there.dim() == 0 ? there.reshape({1}) : there;
    }
  };

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

/// DataParallel as a strategy: one process, whose replicas each take a part of every batch. The
/// criterion sees the gathered output, so a mean is that of the whole batch. One process only, and
/// batches with `input`, `target` and `criterion`: UsageError otherwise. The module must have a
/// `clone`, and the setup a `forward`. With one replica the module itself runs, as with ddp.
std::unique_ptr<Strategy> make_dp_strategy(const StrategySetup& setup);

}  // namespace lockstep
