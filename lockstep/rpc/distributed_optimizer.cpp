#include "lockstep/rpc/distributed_optimizer.h"

#include <map>
#include <mutex>

#include "lockstep/base/error.h"

namespace lockstep {

// Beside the type, where the call looks for it.
static auto rpc_fields(OptimizerOptions& o) {
  return std::tie(o.lr, o.momentum, o.nesterov, o.dampening, o.beta1, o.beta2, o.alpha, o.amsgrad,
                  o.centered, o.lr_decay, o.weight_decay, o.eps);
}

namespace rpc {
namespace {

using References = std::vector<RRef<at::Tensor>>;

RRef<OwnerOptimizer> make_by_name(const std::string& name, const References& references,
                                  const OptimizerOptions& options) {
  return owner_optimizer(references, [&](const std::vector<at::Tensor>& parameters) {
    return std::shared_ptr<Optimizer>(make_optimizer(name, parameters, options));
  });
}

/// One step at a time on a worker: trainers' optimizers share parameters.
std::mutex& step_mutex() {
  static std::mutex mutex;
  return mutex;
}

void step_owner(const RRef<OwnerOptimizer>& reference, int64_t context) {
  const OwnerOptimizer& owner = reference.local_value();
  const std::lock_guard lock(step_mutex());
  const auto gradients = gradients_of(context, owner.parameters);
  for (size_t i = 0; i < gradients.size(); ++i) owner.updated[i].mutable_grad() = gradients[i];
  owner.step();
  for (const auto& tensor : owner.updated) tensor.mutable_grad().reset();
}

struct Functions {
  decltype(function("", make_by_name)) make = function("lockstep.rpc.make_optimizer", make_by_name);
  decltype(function("", step_owner)) step = function("lockstep.rpc.step_optimizer", step_owner);
};

const Functions& functions() {
  static const Functions all;
  return all;
}

/// Asks all owners at once. `make(owner, its parameters)` gives a future of the owner's optimizer.
template <class Make>
std::vector<RRef<OwnerOptimizer>> make_all(const References& parameters, const Make& make) {
  if (parameters.empty()) throw UsageError("rpc::DistributedOptimizer: no parameters");
  std::map<std::string, References> owners;
  for (const auto& parameter : parameters) owners[parameter.owner_name()].push_back(parameter);
  std::vector<Future<RRef<OwnerOptimizer>>> made;
  for (const auto& [owner, its] : owners) made.push_back(make(owner, its));
  return when_all(made).wait();
}

}  // namespace

namespace detail {

void register_optimizer_functions() {
  functions();
}

OwnerOptimizer updated_by_owner(const std::vector<RRef<at::Tensor>>& references) {
  OwnerOptimizer owner;
  for (const auto& reference : references) {
    owner.parameters.push_back(reference.local_value());
    owner.updated.push_back(owner.parameters.back().variable_data());
    owner.updated.back().set_requires_grad(true);
  }
  return owner;
}

}  // namespace detail

DistributedOptimizer::DistributedOptimizer(const std::string& name,
                                           const std::vector<RRef<at::Tensor>>& parameters,
                                           const OptimizerOptions& options)
    : owners_(make_all(parameters, [&](const std::string& owner, const References& its) {
        return call_async(owner, functions().make, name, its, options);
      })) {}

DistributedOptimizer::DistributedOptimizer(const OptimizerMaker& maker,
                                           const std::vector<RRef<at::Tensor>>& parameters)
    : owners_(make_all(parameters, [&](const std::string& owner, const References& its) {
        return call_async(owner, maker, its);
      })) {}

void DistributedOptimizer::step(const AutogradContext& context) {
  std::vector<Future<void>> steps;
  for (const auto& owner : owners_)
    steps.push_back(owner.rpc_async(functions().step, context.id()));
  when_all(steps).wait();
}

}  // namespace rpc
}  // namespace lockstep
