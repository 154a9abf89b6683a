#include "lockstep/data/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kLengthSize = 8;
constexpr uint64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadataKey = "__metadata__";

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};
constexpr std::array<DtypeName, 16> kDtypes{{{"BOOL", at::ScalarType::Bool},
                                             {"U8", at::ScalarType::Byte},
                                             {"I8", at::ScalarType::Char},
                                             {"U16", at::ScalarType::UInt16},
                                             {"I16", at::ScalarType::Short},
                                             {"U32", at::ScalarType::UInt32},
                                             {"I32", at::ScalarType::Int},
                                             {"U64", at::ScalarType::UInt64},
                                             {"I64", at::ScalarType::Long},
                                             {"F8_E4M3", at::ScalarType::Float8_e4m3fn},
                                             {"F8_E5M2", at::ScalarType::Float8_e5m2},
                                             {"F8_E8M0", at::ScalarType::Float8_e8m0fnu},
                                             {"F16", at::ScalarType::Half},
                                             {"BF16", at::ScalarType::BFloat16},
                                             {"F32", at::ScalarType::Float},
                                             {"F64", at::ScalarType::Double}}};
constexpr DtypeName kComplex{"C64", at::ScalarType::ComplexFloat};

std::optional<at::ScalarType> dtype_of(std::string_view name) {
  if (name == kComplex.name) return kComplex.dtype;
  for (const DtypeName& known : kDtypes) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

std::optional<std::string_view> name_of(at::ScalarType dtype) {
  if (dtype == kComplex.dtype) return kComplex.name;
  for (const DtypeName& known : kDtypes) {
    if (known.dtype == dtype) return known.name;
  }
  return std::nullopt;
}

/// One tensor as the header describes it. Offsets count from the end of the header.
struct Entry {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Reads and checks the header of one file, then its tensors.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path)
      : file_(path, {.packing = ContentOptions::Packing::plain}) {}

  SafetensorsFile read() {
    const Json header = read_header();
    SafetensorsFile result;
    for (const auto& [name, value] : header.items()) {
      if (name == kMetadataKey) {
        result.metadata = metadata_of(value);
      } else {
        entries_.push_back(entry_of(name, value));
      }
    }
    check_layout();
    for (const Entry& entry : entries_) {
      result.tensors.emplace_back(entry.name,
                                  read_tensor(file_, entry.dtype, entry.shape, std::endian::little,
                                              "tensor '" + entry.name + "'"));
    }
    file_.expect_end();
    return result;
  }

 private:
  Json read_header() {
    std::array<unsigned char, kLengthSize> length_bytes;
    file_.read_exact(length_bytes.data(), length_bytes.size(), "the header's length");
    uint64_t length = 0;
    for (size_t i = 0; i < kLengthSize; ++i) length |= uint64_t{length_bytes[i]} << (8 * i);
    const uint64_t room = file_.remaining_limit();
    if (length > kLargestHeader || length > room || length < 2) {
      file_.fail(0,
                 "a header of " + std::to_string(length) + " bytes; expected at least 2, at most " +
                     std::to_string(kLargestHeader) + ", and no more than the " +
                     std::to_string(room) + " bytes that follow",
                 "the file is truncated or no safetensors file");
    }
    std::string text(length, '\0');
    file_.read_exact(text.data(), text.size(), "the header");
    if (text[0] != '{') {
      file_.fail(kLengthSize, "the header does not start with '{'; expected a JSON object",
                 "the file is damaged or no safetensors file");
    }
    data_start_ = kLengthSize + length;
    return parse(text);
  }

  Json parse(const std::string& text) const {
    std::set<std::string> names;
    const auto refuse_twice = [&](int depth, Json::parse_event_t event, Json& parsed) {
      constexpr int kDeepest = 16;
      if (depth > kDeepest) file_.fail(kLengthSize, "the header's JSON is nested too deep");
      if (depth == 1 && event == Json::parse_event_t::key &&
          !names.insert(parsed.get<std::string>()).second) {
        file_.fail(kLengthSize, "the header names '" + parsed.get<std::string>() +
                                    "' twice; expected each name once");
      }
      return true;
    };
    try {
      return Json::parse(text, refuse_twice);
    } catch (const Json::parse_error& error) {
      file_.fail(kLengthSize + (error.byte > 0 ? error.byte - 1 : 0),
                 "the header is no valid JSON there; expected an object of tensors");
    } catch (const Json::exception& error) {
      file_.fail(kLengthSize, std::string("the header is no valid JSON: ") + error.what());
    }
  }

  [[noreturn]] void fail_entry(const std::string& name, const std::string& complaint) const {
    file_.fail(kLengthSize, "the header's entry '" + name + "' " + complaint);
  }

  std::map<std::string, std::string> metadata_of(const Json& value) const {
    std::map<std::string, std::string> metadata;
    if (!value.is_object()) fail_entry(kMetadataKey, "is no object; expected text by name");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) fail_entry(kMetadataKey, "has no text for '" + key + "'");
      metadata[key] = text.get<std::string>();
    }
    return metadata;
  }

  std::vector<uint64_t> numbers_of(const std::string& name, const Json& value,
                                   const char* key) const {
    const auto found = value.find(key);
    if (found == value.end() || !found->is_array()) {
      fail_entry(name, std::string("has no list '") + key + "'");
    }
    std::vector<uint64_t> numbers;
    for (const Json& number : *found) {
      if (!number.is_number_unsigned()) {
        fail_entry(name, std::string("has something other than whole numbers in '") + key + "'");
      }
      numbers.push_back(number.get<uint64_t>());
    }
    return numbers;
  }

  Entry entry_of(const std::string& name, const Json& value) const {
    if (!value.is_object()) fail_entry(name, "is no object; expected dtype, shape, data_offsets");
    const auto dtype_name = value.find("dtype");
    if (dtype_name == value.end() || !dtype_name->is_string()) {
      fail_entry(name, "has no text 'dtype'");
    }
    const auto dtype = dtype_of(dtype_name->get<std::string>());
    if (!dtype) {
      std::vector<std::string> known;
      for (const DtypeName& each : kDtypes) known.emplace_back(each.name);
      known.emplace_back(kComplex.name);
      fail_entry(name, "has the dtype '" + dtype_name->get<std::string>() + "'; expected one of " +
                           join(known, ", "));
    }
    const std::vector<uint64_t> offsets = numbers_of(name, value, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      fail_entry(name, "has data_offsets that are no [begin, end]");
    }
    Entry entry{name, *dtype, {}, offsets[0], offsets[1]};
    check_shape(entry, numbers_of(name, value, "shape"));
    return entry;
  }

  void check_shape(Entry& entry, const std::vector<uint64_t>& shape) const {
    const std::optional<uint64_t> bytes = bytes_of_shape(entry.dtype, shape);
    if (!bytes) fail_entry(entry.name, "has a shape that is too large: " + shape_text(shape));
    entry.shape = shape;
    if (entry.end - entry.begin != *bytes) {
      fail_entry(entry.name, "has data_offsets of " + std::to_string(entry.end - entry.begin) +
                                 " bytes; expected " + std::to_string(*bytes) +
                                 " for its shape and dtype");
    }
  }

  /// Orders the entries by offset and demands that they cover the rest of the file without holes.
  void check_layout() {
    std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    uint64_t next = 0;
    for (const Entry& entry : entries_) {
      if (entry.begin != next) {
        file_.fail(data_start_ + std::min(entry.begin, next),
                   "tensor '" + entry.name + "' starts at data offset " +
                       std::to_string(entry.begin) + "; expected " + std::to_string(next) +
                       ", where the one before it ends (" +
                       (entry.begin < next ? "they overlap" : "there is a hole") + ")");
      }
      next = entry.end;
    }
    const uint64_t expected = data_start_ + next;
    const uint64_t size = data_start_ + file_.remaining_limit();
    if (size != expected) {
      file_.fail(std::min(expected, size),
                 std::string(size < expected ? "truncated" : "bytes were added at its end") +
                     ": the header says " + std::to_string(expected) + " bytes, the file has " +
                     std::to_string(size),
                 "copy, download or save the file again");
    }
  }

  ContentReader file_;
  uint64_t data_start_ = 0;
  std::vector<Entry> entries_;
};

/// The tensors in the order of their bytes: wider elements first, which keeps all of them aligned.
StateDict in_file_order(const StateDict& tensors) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) {
    if (name == kMetadataKey) throw Error("safetensors reserves the name " + name);
    if (!names.insert(name).second) {
      throw Error("tensor '" + name + "' is given twice; expected each name once");
    }
    if (!tensor.defined()) throw Error("tensor '" + name + "' is undefined: nothing to save");
    if (tensor.layout() != at::kStrided || !name_of(tensor.scalar_type())) {
      throw Error("tensor '" + name + "' is " + c10::toString(tensor.scalar_type()) +
                  (tensor.layout() == at::kStrided ? "" : " and sparse") +
                  ", which safetensors cannot hold");
    }
  }
  StateDict ordered = tensors;
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  return ordered;
}

std::string header_of(const StateDict& tensors,
                      const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", *name_of(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::type_error&) {
    throw Error("a tensor's name or the metadata is no UTF-8, which safetensors demands");
  }
  constexpr size_t kAlignment = 8;
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  if (text.size() > kLargestHeader) throw Error("too many tensors for one safetensors file");
  return text;
}

}  // namespace

SafetensorsFile load_safetensors(const std::filesystem::path& path) {
  return Reader(path).read();
}

void save_safetensors(const std::filesystem::path& path, const StateDict& tensors,
                      const std::map<std::string, std::string>& metadata) {
  const StateDict ordered = in_file_order(tensors);
  const std::string header = header_of(ordered, metadata);
  std::array<char, kLengthSize> length;
  for (size_t i = 0; i < kLengthSize; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  AtomicFile file(path);
  file.write(length.data(), length.size());
  file.write(header);
  for (const auto& [name, tensor] : ordered) {
    at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
    if constexpr (std::endian::native == std::endian::big) {
      plain = plain.clone();
      swap_bytes(plain);
    }
    file.write(plain.const_data_ptr(), plain.nbytes());
  }
  file.commit();
}

}  // namespace lockstep
