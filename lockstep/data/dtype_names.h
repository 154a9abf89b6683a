#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

/// What formats call a dtype. A name is empty where the format does not have the dtype.
struct DtypeNames {
  at::ScalarType dtype;
  std::string_view torch;        ///< Python's torch.NAME: "float32".
  std::string_view storage;      ///< The class of torch that .pt files name: "FloatStorage".
  std::string_view safetensors;  ///< "F32".
  std::string_view npy;          ///< "f4", without the byte order.
};

using DtypeFormat = std::string_view DtypeNames::*;

std::optional<at::ScalarType> dtype_of_name(DtypeFormat format, std::string_view name);
std::string_view name_of_dtype(DtypeFormat format, at::ScalarType dtype);
/// "BOOL, U8, ...", for messages.
std::string known_dtypes(DtypeFormat format);

}  // namespace lockstep
