#include "lockstep/rpc/sent_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <sstream>
#include <unordered_map>

#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {
namespace {

bool is_dense_of_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_nested() &&
         tensor.has_storage();
}

/// Whether all elements lie in its memory. An empty tensor has none, wherever it begins.
bool lies_in_its_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return true;
  const size_t needed =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                       static_cast<size_t>(tensor.storage_offset()));
  return needed <= tensor.storage().nbytes();
}

/// One that has its own memory, or null where the tensor may stay as it is.
at::Tensor readable(const at::Tensor& tensor,
                    std::unordered_map<const void*, at::ScalarType>& types_of_memory) {
  const auto plain = at::TensorOptions().dtype(tensor.scalar_type());
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), plain);
  if (tensor.numel() == 0 && tensor.storage_offset() != 0 && !tensor.is_quantized()) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), plain);
  }
  const void* const memory = tensor.storage().unsafeGetStorageImpl();
  const auto [first, is_new] = types_of_memory.try_emplace(memory, tensor.scalar_type());
  if (is_new || first->second == tensor.scalar_type()) return {};
  return tensor.detach().clone();
}

/// Empty: it can be sent.
std::string why_unsendable(const at::Tensor& tensor) {
  std::ostringstream why;
  if (!is_dense_of_cpu(tensor)) {
    why << "a tensor of the layout ";
    if (tensor.is_nested()) {
      why << "Nested";
    } else {
      why << tensor.layout();
    }
    why << " on " << tensor.device() << "; expected a dense one on the CPU";
  } else if (!lies_in_its_memory(tensor)) {
    why << "a tensor of the sizes " << tensor.sizes() << ", the strides " << tensor.strides()
        << " and the offset " << tensor.storage_offset() << ", whose memory has only "
        << tensor.storage().nbytes() << " bytes";
  }
  return why.str();
}

}  // namespace

void make_readable(std::vector<at::Tensor>& tensors) {
  const c10::InferenceMode off(false);  // Else the copies could not require a gradient.
  std::unordered_map<const void*, at::ScalarType> types_of_memory;
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (const auto why = why_unsendable(tensor); !why.empty()) {
      throw UsageError(
          "rpc: cannot send " + why,
          "send a dense copy of the CPU, or what it is made of: indices() and values()");
    }
    at::Tensor made = readable(tensor, types_of_memory);
    if (made.defined()) tensor = made.set_requires_grad(tensor.requires_grad());
  }
}

}  // namespace lockstep::rpc::detail
