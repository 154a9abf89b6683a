#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/optim/optim.h"
#include "lockstep/rpc/autograd_context.h"
#include "lockstep/rpc/call.h"

namespace lockstep::rpc {

/// An optimizer on the owner of its parameters.
struct OwnerOptimizer {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> updated;  ///< They share the parameters' memory, not their gradients.
  std::function<void()> step;
};

namespace detail {
OwnerOptimizer updated_by_owner(const std::vector<RRef<at::Tensor>>& references);
}

/// On the owner: an optimizer of ours or of torch::optim, any with step(). `make(parameters)` gives
/// a std::shared_ptr to it.
template <class Make>
RRef<OwnerOptimizer> owner_optimizer(const std::vector<RRef<at::Tensor>>& references, Make make) {
  OwnerOptimizer owner = detail::updated_by_owner(references);
  owner.step = [optimizer = make(owner.updated)] { optimizer->step(); };
  return RRef<OwnerOptimizer>::own(std::make_shared<OwnerOptimizer>(std::move(owner)));
}

/// A function that makes an owner's optimizer for the parameters that it owns.
using OptimizerMaker = Function<RRef<OwnerOptimizer>(std::vector<RRef<at::Tensor>>)>;

/// Updates parameters of several workers: each owner steps its own, with the gradients of an
/// autograd context. Each owner has an optimizer for this object, with a state of its own. Owners
/// step side by side. After torch.distributed.optim.DistributedOptimizer.
///
/// Several trainers may update the same parameters at once, as in HogWild. Steps on one worker run
/// one after the other, each with the gradients of its own context. Forward and backward passes do
/// not wait for them. A pass during a step continues with the new values, and autograd does not
/// report an error. `grad()` of the parameters is not changed.
class DistributedOptimizer {
 public:
  /// One of `make_optimizer`. Blocks until all owners have made theirs. Throws RemoteError when one
  /// cannot: an unknown name, options out of range.
  DistributedOptimizer(const std::string& name, const std::vector<RRef<at::Tensor>>& parameters,
                       const OptimizerOptions& options = {});

  /// Any other, such as one of torch::optim. The function is registered on all owners:
  ///
  ///     const auto adam = rpc::function("adam", [](std::vector<rpc::RRef<at::Tensor>> owned) {
  ///       return rpc::owner_optimizer(owned, [](const std::vector<at::Tensor>& parameters) {
  ///         return std::make_shared<torch::optim::Adam>(parameters);
  ///       });
  ///     });
  DistributedOptimizer(const OptimizerMaker& maker,
                       const std::vector<RRef<at::Tensor>>& parameters);

  /// Blocks until all owners have stepped. A parameter without a gradient in the context stays as
  /// it is. Throws what failed on any of them.
  void step(const AutogradContext& context);

 private:
  std::vector<RRef<OwnerOptimizer>> owners_;
};

namespace detail {
/// Registers the functions by which an optimizer reaches its owners.
void register_optimizer_functions();
}  // namespace detail

}  // namespace lockstep::rpc
