#include "lockstep/data/dtype_names.h"

namespace lockstep {
namespace {

constexpr DtypeNames kDtypeNames[] = {
    {at::kBool, "bool", "BoolStorage", "BOOL", "b1"},
    {at::kByte, "uint8", "ByteStorage", "U8", "u1"},
    {at::kChar, "int8", "CharStorage", "I8", "i1"},
    {at::kUInt16, "uint16", "", "U16", "u2"},
    {at::kShort, "int16", "ShortStorage", "I16", "i2"},
    {at::kUInt32, "uint32", "", "U32", "u4"},
    {at::kInt, "int32", "IntStorage", "I32", "i4"},
    {at::kUInt64, "uint64", "", "U64", "u8"},
    {at::kLong, "int64", "LongStorage", "I64", "i8"},
    {at::kFloat8_e4m3fn, "float8_e4m3fn", "", "F8_E4M3", ""},
    {at::kFloat8_e5m2, "float8_e5m2", "", "F8_E5M2", ""},
    {at::kFloat8_e8m0fnu, "float8_e8m0fnu", "", "F8_E8M0", ""},
    {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz", "", "", ""},
    {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz", "", "", ""},
    {at::kHalf, "float16", "HalfStorage", "F16", "f2"},
    {at::kBFloat16, "bfloat16", "BFloat16Storage", "BF16", ""},
    {at::kFloat, "float32", "FloatStorage", "F32", "f4"},
    {at::kDouble, "float64", "DoubleStorage", "F64", "f8"},
    {at::kComplexFloat, "complex64", "ComplexFloatStorage", "C64", "c8"},
    {at::kComplexDouble, "complex128", "ComplexDoubleStorage", "", "c16"},
};

}  // namespace

std::optional<at::ScalarType> dtype_of_name(DtypeFormat format, std::string_view name) {
  for (const DtypeNames& known : kDtypeNames) {
    if (!name.empty() && known.*format == name) return known.dtype;
  }
  return std::nullopt;
}

std::string_view name_of_dtype(DtypeFormat format, at::ScalarType dtype) {
  for (const DtypeNames& known : kDtypeNames) {
    if (known.dtype == dtype) return known.*format;
  }
  return {};
}

std::string known_dtypes(DtypeFormat format) {
  std::string names;
  for (const DtypeNames& known : kDtypeNames) {
    const std::string_view name = known.*format;
    if (!name.empty()) names.append(names.empty() ? "" : ", ").append(name);
  }
  return names;
}

}  // namespace lockstep
