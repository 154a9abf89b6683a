#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

class TensorReader;

/// "safetensors", "pt" and "hf", a folder of safetensors files with an index.
std::vector<std::string> tensor_formats();

/// By the extension: .safetensors, or .pt, .pth or .bin. Empty for another one.
std::string format_of_name(const std::filesystem::path& path);

/// Writes all tensors into a file, atomically, or into a new folder ("hf"), in files of at most
/// 5 GB. safetensors and hf take the memory of one tensor, pt of two copies of all. An hf folder is
/// read by Python's HuggingFaceStorageReader, which reshards, and by Hugging Face's libraries.
/// Throws UsageError for a folder that is there and not empty, SystemError, and what reading
/// throws.
void convert_tensors(const TensorReader& source, const std::filesystem::path& target,
                     const std::string& format);

}  // namespace lockstep
