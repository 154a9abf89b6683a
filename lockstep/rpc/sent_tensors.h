#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace lockstep::rpc::detail {

/// LibTorch's RPC ends the process, on a thread of its own, that sends or gets a tensor which it
/// cannot write or read. So these look first. Any thread.

/// Why a tensor cannot be sent, or not be read: it is not a dense one of the CPU, or its elements
/// lie outside of its memory. Empty: it can.
std::string why_unsendable(const at::Tensor& tensor);

/// Puts copies in place of tensors that LibTorch's receiver could not read: of empty views with an
/// offset, of zeros without memory, and of those that share another one's memory with another
/// dtype. Throws UsageError for a tensor that cannot be sent.
void make_readable(std::vector<at::Tensor>& tensors);

}  // namespace lockstep::rpc::detail
