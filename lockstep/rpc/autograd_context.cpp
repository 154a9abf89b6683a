#include "lockstep/rpc/autograd_context.h"

#include <torch/csrc/distributed/autograd/autograd.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/rpc/remote_failure.h"
#include "lockstep/rpc/rpc_worker.h"

namespace lockstep::rpc {
namespace {

namespace native = torch::distributed::autograd;

native::DistAutogradContainer& container() {
  return native::DistAutogradContainer::getInstance();
}

native::ContextPtr context_of(int64_t id) {
  try {
    return container().retrieveContext(id);
  } catch (const c10::Error&) {
    throw UsageError("rpc: worker '" + detail::this_worker("rpc::gradients_of")->name() +
                     "' knows no autograd context " + std::to_string(id));
  }
}

}  // namespace

AutogradContext::AutogradContext() {
  detail::this_worker("rpc::AutogradContext");
  if (container().hasValidContext()) {
    throw UsageError("rpc::AutogradContext: within another one on the same thread");
  }
  id_ = container().newContext()->contextId();
}

AutogradContext::~AutogradContext() {
  try {
    container().releaseContext(id_);
  } catch (const std::exception&) {  // The agent is gone, and the context with it.
  }
}

void AutogradContext::backward(const std::vector<at::Tensor>& roots, bool retain_graph) {
  const detail::HandlerThreads::Waiting waiting;
  try {
    native::backward(id_, roots, retain_graph);
  } catch (const std::exception&) {
    std::rethrow_exception(
        detail::decode_failure(std::current_exception(), "rpc: distributed backward", ""));
  }
}

std::vector<std::pair<at::Tensor, at::Tensor>> AutogradContext::gradients() const {
  return gradients_of(id_);
}

at::Tensor AutogradContext::gradient(const at::Tensor& leaf) const {
  return gradients_of(id_, {leaf}).front();
}

std::vector<std::pair<at::Tensor, at::Tensor>> gradients_of(int64_t context_id) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (const auto& entry : context_of(context_id)->getGradients()) {
    pairs.emplace_back(entry.key(), entry.value());
  }
  return pairs;
}

std::vector<at::Tensor> gradients_of(int64_t context_id, const std::vector<at::Tensor>& leaves) {
  const auto all = context_of(context_id)->getGradients();
  std::vector<at::Tensor> gradients;
  for (const auto& leaf : leaves) {
    const auto found = all.find(leaf);
    gradients.push_back(found == all.end() ? at::Tensor() : found->value());
  }
  return gradients;
}

}  // namespace lockstep::rpc
