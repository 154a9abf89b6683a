#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// auto, contiguous, channels-last.
std::vector<std::string> memory_format_names();
/// "contiguous" or "channels-last".
std::string memory_format_name(at::MemoryFormat format);

/// The format that a name stands for. auto is channels-last for a model with 2-d convolutions (a
/// parameter of 4 dimensions) on a CPU whose LibTorch has oneDNN. oneDNN computes in that format,
/// and must reorder each layer's data for any other. auto is contiguous for everything else. It
/// depends on model and machine only, never on a measurement, so that a run can be repeated. Throws
/// UsageError for another word.
at::MemoryFormat memory_format_of(const std::string& word, const torch::nn::Module& module,
                                  c10::Device device);

/// Converts the module's 4-dimensional tensors to the format. Shapes, names and values do not
/// change. Call it before an optimizer or DistributedDataParallel is made of its parameters.
/// Contiguous changes nothing.
void set_memory_format(torch::nn::Module& module, at::MemoryFormat format);

/// Converts a batch for a model in that format. Only a batch of 4 dimensions is converted. Any
/// other is returned as it is, and so is every batch for contiguous. Images of one channel are not
/// copied.
at::Tensor with_memory_format(const at::Tensor& batch, at::MemoryFormat format);

}  // namespace lockstep
