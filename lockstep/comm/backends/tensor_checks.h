#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

/// What callers may pass to a backend for CPU tensors; each throws UsageError naming the operation.
namespace lockstep::backends {

/// A dense tensor of the CPU.
void check_dense(const char* operation, const at::Tensor& tensor);
/// One such tensor.
const at::Tensor& only(const char* operation, const std::vector<at::Tensor>& tensors);
/// One list of such tensors, one a rank.
const std::vector<at::Tensor>& only_list(const char* operation,
                                         const std::vector<std::vector<at::Tensor>>& lists,
                                         int size);
/// Others of one's shape and dtype.
void expect_alike(const char* operation, const at::Tensor& one,
                  const std::vector<at::Tensor>& others);
/// Two dense tensors of the CPU, the first `size` times the second.
void expect_multiple(const char* operation, const at::Tensor& large, const at::Tensor& small,
                     int size);
void check_root(const char* operation, int64_t root, int size);
void check_peer(const char* operation, int peer, int size);

}  // namespace lockstep::backends
