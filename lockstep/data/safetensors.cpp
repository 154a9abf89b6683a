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
    const Json header = read_header();
    for (const auto& [name, value] : header.items()) {
      if (name != kMetadataKey) {
        shards_.push_back(shard_of(name, value));
        continue;
      }
      try {
        value.get_to(metadata_);
      } catch (const Json::type_error&) {
        fail_entry(name, "is " + value.dump().substr(0, 100) + "; expected text by name");
      }
    }
    check_layout();
  }

  SafetensorsFile read() {
    SafetensorsFile result;
    result.metadata = metadata_;
    for (const TensorShard& shard : shards_) {
      result.tensors.emplace_back(shard.name,
                                  read_tensor(file_, shard.values.scalar_type(), shard.sizes,
                                              std::endian::little, "tensor '" + shard.name + "'"));
    }
    file_.expect_end();
    return result;
  }

  /// Python's save_model writes tied tensors once: the metadata has the written name of the others.
  detail::StoredTensors index() {
    detail::StoredTensors stored;
    stored.format = "safetensors";
    for (const TensorShard& shard : shards_) stored.add(shard);
    for (const auto& [alias, written] : metadata_) {
      const auto place = stored.shards.find(written);
      if (place == stored.shards.end() || stored.shards.contains(alias)) continue;
      TensorShard tied = place->second.front();
      tied.name = alias;
      stored.add(std::move(tied));
    }
    stored.metadata = metadata_;
    return stored;
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

  TensorShard shard_of(const std::string& name, const Json& value) const {
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
    const TensorInfo tensor{name, *dtype, shape};
    const auto bytes_of_it =
        std::make_shared<const detail::StoredBytes>(detail::StoredBytes{path_, where, *bytes});
    return detail::shard_in_file(tensor, detail::described(tensor).values.strides(), 0, bytes_of_it,
                                 path_.string() + ": '" + name + "'");
  }

  /// Orders the tensors by offset and demands that they cover the rest of the file without holes.
  void check_layout() {
    const auto place = [](const TensorShard& shard) {
      return std::pair(shard.file->where.begin, shard.file->size);
    };
    std::stable_sort(shards_.begin(), shards_.end(),
                     [&](const auto& a, const auto& b) { return place(a) < place(b); });
    uint64_t next = data_start_;
    for (const TensorShard& shard : shards_) {
      const auto [begin, bytes] = place(shard);
      if (begin != next) {
        file_.fail(std::min(begin, next),
                   "tensor '" + shard.name + "' starts at data offset " +
                       std::to_string(begin - data_start_) + "; expected " +
                       std::to_string(next - data_start_) + ", where the one before it ends (" +
                       (begin < next ? "they overlap" : "there is a hole") + ")");
      }
      next += bytes;
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
  std::vector<TensorShard> shards_;
  std::map<std::string, std::string> metadata_;
};

/// In the order of their bytes: wider elements first, which keeps all of them aligned.
std::vector<const TensorShard*> in_file_order(const std::vector<TensorShard>& shards) {
  std::set<std::string> names;
  std::vector<const TensorShard*> order;
  for (const TensorShard& shard : shards) {
    if (shard.name == kMetadataKey) throw Error("safetensors reserves the name " + shard.name);
    if (!names.insert(shard.name).second) {
      throw Error("tensor '" + shard.name + "' is given twice; expected each name once");
    }
    if (name_of_dtype(&DtypeNames::safetensors, shard.values.scalar_type()).empty()) {
      throw Error("tensor '" + shard.name + "' is " + c10::toString(shard.values.scalar_type()) +
                  ", which safetensors cannot hold");
    }
    order.push_back(&shard);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return a->values.element_size() > b->values.element_size();
  });
  return order;
}

std::string header_of(const std::vector<const TensorShard*>& shards,
                      const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  uint64_t offset = 0;
  for (const TensorShard* shard : shards) {
    const at::Tensor& values = shard->values;
    const uint64_t end = offset + values.nbytes();
    header[shard->name] = {{"dtype", name_of_dtype(&DtypeNames::safetensors, values.scalar_type())},
                           {"shape", values.sizes().vec()},
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

void detail::write_safetensors(const std::vector<TensorShard>& shards,
                               const std::map<std::string, std::string>& metadata,
                               const ReadShard& read,
                               const std::function<void(const void*, size_t)>& write) {
  const auto order = in_file_order(shards);
  const std::string header = header_of(order, metadata);
  const uint64_t length = header.size();
  write(&length, kLengthSize);
  write(header.data(), header.size());
  for (const TensorShard* shard : order) {
    const at::Tensor values = read ? read(*shard) : shard->values;
    const at::Tensor plain = values.detach().resolve_conj().resolve_neg().cpu().contiguous();
    write(plain.const_data_ptr(), plain.nbytes());
  }
}

void detail::write_safetensors(const std::filesystem::path& path,
                               const std::vector<TensorShard>& shards,
                               const std::map<std::string, std::string>& metadata,
                               const ReadShard& read) {
  AtomicFile file(path);
  write_safetensors(shards, metadata, read,
                    [&](const void* data, size_t size) { file.write(data, size); });
  file.commit();
}

void save_safetensors(const std::filesystem::path& path, const StateDict& tensors,
                      const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) throw Error("tensor '" + name + "' is undefined: nothing to save");
    if (tensor.layout() != at::kStrided)
      throw Error("tensor '" + name + "' is sparse, which safetensors cannot hold");
  }
  detail::write_safetensors(path, whole_shards(tensors), metadata);
}

}  // namespace lockstep
