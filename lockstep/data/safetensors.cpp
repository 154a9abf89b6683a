#include "lockstep/data/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/dtype_names.h"
#include "lockstep/data/stored_tensors.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kLengthSize = 8;
constexpr uint64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadataKey = "__metadata__";

/// Reads and checks the header of one file, then its tensors.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path)
      : path_(path), file_(path, {.packing = ContentOptions::Packing::plain}) {
    stored_.format = "safetensors";
    const Json header = read_header();
    for (const auto& [name, value] : header.items()) {
      if (name != kMetadataKey) {
        stored_.tensors.push_back(tensor_of(name, value));
        continue;
      }
      try {
        value.get_to(stored_.metadata);
      } catch (const Json::type_error&) {
        fail_entry(name, "is " + value.dump().substr(0, 100) + "; expected text by name");
      }
    }
    check_layout();
  }

  SafetensorsFile read() {
    SafetensorsFile result;
    result.metadata = stored_.metadata;
    for (const detail::StoredTensor& tensor : stored_.tensors) {
      result.tensors.emplace_back(
          tensor.name, read_tensor(file_, tensor.dtype, tensor.shape, std::endian::little,
                                   "tensor '" + tensor.name + "'"));
    }
    file_.expect_end();
    return result;
  }

  /// Python's save_model writes tied tensors once: the metadata has the written name of the others.
  detail::StoredTensors index() {
    std::map<std::string, size_t> places;
    for (const detail::StoredTensor& tensor : stored_.tensors)
      places.emplace(tensor.name, places.size());
    for (const auto& [alias, written] : stored_.metadata) {
      const auto place = places.find(written);
      if (place == places.end() || places.contains(alias)) continue;
      detail::StoredTensor tied = stored_.tensors[place->second];
      tied.name = alias;
      stored_.tensors.push_back(std::move(tied));
    }
    return std::move(stored_);
  }

 private:
  Json read_header() {
    uint64_t length = 0;
    file_.read_exact(&length, kLengthSize, "the header's length");
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

  detail::StoredTensor tensor_of(const std::string& name, const Json& value) const {
    const auto is_list = [&](const char* key) {
      return value.contains(key) && value[key].is_array() &&
             std::all_of(value[key].begin(), value[key].end(),
                         [](const Json& number) { return number.is_number_unsigned(); });
    };
    if (!value.contains("dtype") || !value["dtype"].is_string() || !is_list("shape") ||
        !is_list("data_offsets") || value["data_offsets"].size() != 2) {
      fail_entry(name, "is " + value.dump().substr(0, 100) + R"(; expected {"dtype": "F32", )" +
                           R"("shape": [2, 3], "data_offsets": [0, 24]})");
    }
    const std::string dtype_name = value["dtype"];
    const auto dtype = dtype_of_name(&DtypeNames::safetensors, dtype_name);
    if (!dtype) {
      fail_entry(name, "has the dtype '" + dtype_name + "'; expected one of " +
                           known_dtypes(&DtypeNames::safetensors));
    }
    const uint64_t begin = value["data_offsets"][0], end = value["data_offsets"][1];
    if (begin > end) fail_entry(name, "has data_offsets that are no [begin, end]");
    const std::vector<int64_t> shape = value["shape"];
    const std::optional<uint64_t> bytes = bytes_of_shape(*dtype, shape);
    if (!bytes) fail_entry(name, "has a shape that is too large: " + shape_text(shape));
    if (end - begin != *bytes) {
      fail_entry(name, "has data_offsets of " + std::to_string(end - begin) + " bytes; expected " +
                           std::to_string(*bytes) + " for its shape and dtype");
    }
    const ContentOptions where{
        .packing = ContentOptions::Packing::plain, .begin = data_start_ + begin, .size = *bytes};
    return {
        {name, *dtype, shape},
        {{std::vector<int64_t>(shape.size()), shape, detail::contiguous_strides(shape), 0,
          std::make_shared<const detail::StoredBytes>(detail::StoredBytes{path_, where, *bytes})}}};
  }

  /// Orders the tensors by offset and demands that they cover the rest of the file without holes.
  void check_layout() {
    const auto place = [](const detail::StoredTensor& tensor) -> const ContentOptions& {
      return tensor.chunks[0].bytes->where;
    };
    std::stable_sort(stored_.tensors.begin(), stored_.tensors.end(),
                     [&](const auto& a, const auto& b) {
                       return std::pair(place(a).begin, *place(a).size) <
                              std::pair(place(b).begin, *place(b).size);
                     });
    uint64_t next = data_start_;
    for (const detail::StoredTensor& tensor : stored_.tensors) {
      const uint64_t begin = place(tensor).begin;
      if (begin != next) {
        file_.fail(std::min(begin, next),
                   "tensor '" + tensor.name + "' starts at data offset " +
                       std::to_string(begin - data_start_) + "; expected " +
                       std::to_string(next - data_start_) + ", where the one before it ends (" +
                       (begin < next ? "they overlap" : "there is a hole") + ")");
      }
      next += *place(tensor).size;
    }
    const uint64_t expected = next;
    const uint64_t size = data_start_ + file_.remaining_limit();
    if (size != expected) {
      file_.fail(std::min(expected, size),
                 std::string(size < expected ? "truncated" : "bytes were added at its end") +
                     ": the header says " + std::to_string(expected) + " bytes, the file has " +
                     std::to_string(size),
                 "copy, download or save the file again");
    }
  }

  std::filesystem::path path_;
  ContentReader file_;
  uint64_t data_start_ = 0;
  detail::StoredTensors stored_;
};

/// The tensors in the order of their bytes: wider elements first, which keeps all of them aligned.
std::vector<size_t> in_file_order(const std::vector<TensorInfo>& tensors) {
  std::set<std::string> names;
  std::vector<size_t> order;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.name == kMetadataKey) throw Error("safetensors reserves the name " + tensor.name);
    if (!names.insert(tensor.name).second) {
      throw Error("tensor '" + tensor.name + "' is given twice; expected each name once");
    }
    if (name_of_dtype(&DtypeNames::safetensors, tensor.dtype).empty()) {
      throw Error("tensor '" + tensor.name + "' is " + c10::toString(tensor.dtype) +
                  ", which safetensors cannot hold");
    }
    order.push_back(order.size());
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return at::elementSize(tensors[a].dtype) > at::elementSize(tensors[b].dtype);
  });
  return order;
}

std::string header_of(const std::vector<TensorInfo>& tensors, const std::vector<size_t>& order,
                      const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  uint64_t offset = 0;
  for (const size_t i : order) {
    const TensorInfo& tensor = tensors[i];
    const uint64_t end = offset + bytes_of_shape(tensor.dtype, tensor.shape).value();
    header[tensor.name] = {{"dtype", name_of_dtype(&DtypeNames::safetensors, tensor.dtype)},
                           {"shape", tensor.shape},
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

detail::StoredTensors detail::index_safetensors(const std::filesystem::path& path) {
  return Reader(path).index();
}

void detail::write_safetensors(const std::vector<TensorInfo>& tensors,
                               const std::map<std::string, std::string>& metadata,
                               const std::function<at::Tensor(size_t)>& read,
                               const std::function<void(const void*, size_t)>& write) {
  const std::vector<size_t> order = in_file_order(tensors);
  const std::string header = header_of(tensors, order, metadata);
  const uint64_t length = header.size();
  write(&length, kLengthSize);
  write(header.data(), header.size());
  for (const size_t i : order) {
    const at::Tensor plain = read(i).detach().resolve_conj().resolve_neg().cpu().contiguous();
    write(plain.const_data_ptr(), plain.nbytes());
  }
}

void detail::write_safetensors(const std::filesystem::path& path,
                               const std::vector<TensorInfo>& tensors,
                               const std::map<std::string, std::string>& metadata,
                               const std::function<at::Tensor(size_t)>& read) {
  AtomicFile file(path);
  write_safetensors(tensors, metadata, read,
                    [&](const void* data, size_t size) { file.write(data, size); });
  file.commit();
}

void save_safetensors(const std::filesystem::path& path, const StateDict& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) throw Error("tensor '" + name + "' is undefined: nothing to save");
    if (tensor.layout() != at::kStrided)
      throw Error("tensor '" + name + "' is sparse, which safetensors cannot hold");
    infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  detail::write_safetensors(path, infos, metadata, [&](size_t i) { return tensors[i].second; });
}

}  // namespace lockstep
