#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::rpc::detail {

/// LibTorch's RPC ends the process, on a thread of its own, that sends or gets a tensor which it
/// cannot write or read. So this looks first. Puts copies in place of tensors that LibTorch's
/// receiver could not read: of empty views with an offset, of zeros without memory, and of those
/// that share another one's memory with another dtype. Throws UsageError for a tensor that cannot
/// be sent: it is not a dense one of the CPU, or its elements lie outside of its memory.
void make_readable(std::vector<at::Tensor>& tensors);

}  // namespace lockstep::rpc::detail
