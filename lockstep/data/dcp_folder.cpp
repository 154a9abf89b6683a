// Folders that torch.distributed.checkpoint writes: .metadata, a pickle, says which tensor's shard
// lies where in the *.distcp files. Each shard is what torch.save would write into a file.
#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/dtype_names.h"
#include "lockstep/data/pickle.h"
#include "lockstep/data/stored_tensors.h"

namespace lockstep::detail {
namespace fs = std::filesystem;
namespace {

using Kind = PickleValue::Kind;

class DcpReader {
 public:
  explicit DcpReader(fs::path folder)
      : folder_(std::move(folder)), bytes_(read_file(folder_ / ".metadata", kMostOfMetadata)) {
    pickle_ = read_pickle(bytes_, [&](size_t offset, const std::string& complaint) {
      fail("byte " + std::to_string(offset) + ": " + complaint);
    });
  }

  StoredTensors read() {
    const PickleValue& metadata = object(*pickle_.root, "Metadata");
    for (const auto& [name, value] : attribute(metadata, "state_dict_metadata").entries)
      read_description(name->text, *value);
    for (const auto& [index, place] : attribute(metadata, "storage_data").entries)
      read_item(object(*index, "MetadataIndex"), object(*place, "_StorageInfo"));
    stored_.format = "dcp";
    for (auto& [name, tensor] : tensors_) {
      check_shards_cover(tensor, stored_.shards[name], folder_.string());
      stored_.tensors.push_back(std::move(tensor));
    }
    return std::move(stored_);
  }

 private:
  static constexpr size_t kMostOfMetadata = size_t{1} << 30;

  [[noreturn]] void fail(const std::string& complaint) const {
    throw DataError((folder_ / ".metadata").string() + ": " + complaint,
                    "expected what torch.distributed.checkpoint has written");
  }

  /// Only classes of torch that describe checkpoints are known, and nothing of them is run.
  const PickleValue& object(const PickleValue& value, const std::string& class_name) const {
    if (value.kind != Kind::object || !value.text.starts_with("torch.distributed.") ||
        !value.text.ends_with("." + class_name) || value.state == nullptr)
      fail("expected a " + class_name);
    return value;
  }

  const PickleValue* find(const PickleValue& of, const std::string& name) const {
    if (of.state->kind != Kind::dict) fail("expected a class with attributes");
    for (const auto& [key, value] : of.state->entries) {
      if (key->text == name) return value;
    }
    return nullptr;
  }
  const PickleValue& attribute(const PickleValue& of, const std::string& name) const {
    const PickleValue* const value = find(of, name);
    if (value == nullptr) fail("expected the attribute '" + name + "' of " + of.text);
    return *value;
  }

  std::vector<int64_t> size_of(const PickleValue& value) const {
    const bool is_size = value.kind == Kind::object && value.text == "torch.Size" &&
                         value.items.size() == 1 && value.items[0]->kind == Kind::sequence;
    if (!is_size) fail("expected a torch.Size");
    std::vector<int64_t> sizes;
    for (const PickleValue* item : value.items[0]->items) sizes.push_back(count_of(*item));
    return sizes;
  }
  int64_t count_of(const PickleValue& value) const {
    if (value.kind != Kind::integer || value.integer < 0) fail("expected a count");
    return value.integer;
  }

  void read_description(const std::string& name, const PickleValue& value) {
    if (value.text.ends_with(".BytesStorageMetadata")) return;
    object(value, "TensorStorageMetadata");
    const PickleValue& properties = object(attribute(value, "properties"), "TensorProperties");
    if (properties.state->items.empty()) fail("expected the properties of '" + name + "'");
    const std::string& dtype = properties.state->items[0]->text;
    TensorInfo& tensor = tensors_[name];
    tensor.name = name;
    const auto known = dtype.starts_with("torch.")
                           ? dtype_of_name(&DtypeNames::torch, dtype.substr(6))
                           : std::nullopt;
    if (!known) fail("'" + name + "' is of " + dtype + ", which is not known");
    tensor.dtype = *known;
    tensor.shape = size_of(attribute(value, "size"));
  }

  void read_item(const PickleValue& index, const PickleValue& place) {
    const std::string& name = attribute(index, "fqn").text;
    const PickleValue* const packing = find(place, "transform_descriptors");
    if (packing != nullptr && !packing->items.empty())
      fail("'" + name + "' is packed by an extension: save without _extensions");
    StoredTensors item =
        index_pt(file_of(attribute(place, "relative_path").text, name),
                 static_cast<uint64_t>(count_of(attribute(place, "offset"))),
                 static_cast<uint64_t>(count_of(attribute(place, "length"))), name);
    const auto tensor = tensors_.find(name);
    if (tensor == tensors_.end()) return add_values(item);
    const bool is_one = item.tensors.size() == 1 && item.tensors[0].name == name &&
                        item.tensors[0].dtype == tensor->second.dtype;
    if (!is_one) fail("the shard of '" + name + "' is no tensor of its dtype");
    const PickleValue* const offset = find(index, "offset");
    TensorShard& shard = item.shards.at(name).front();
    if (offset != nullptr && offset->kind != Kind::none) shard.offsets = size_of(*offset);
    stored_.shards[name].push_back(std::move(shard));
  }

  fs::path file_of(const std::string& relative, const std::string& name) const {
    const fs::path path = folder_ / relative;
    if (relative.empty() || relative.find('/') != std::string::npos || relative == "..")
      fail("'" + name + "' lies in '" + relative + "', which is no file of the folder");
    std::error_code ignored;
    if (!fs::is_regular_file(path, ignored))
      throw DataError(path.string() + " is missing, where '" + name + "' lies",
                      "copy the whole folder");
    return path;
  }

  void add_values(StoredTensors& item) {
    stored_.values.merge(item.values);
    for (TensorInfo& tensor : item.tensors) {
      if (!tensors_.emplace(tensor.name, tensor).second)
        fail("two tensors have the name '" + tensor.name + "'");
    }
    stored_.shards.merge(item.shards);
  }

  fs::path folder_;
  std::string bytes_;
  Pickle pickle_;
  std::map<std::string, TensorInfo> tensors_;
  StoredTensors stored_;
};

}  // namespace

StoredTensors index_dcp_folder(const fs::path& folder) {
  return DcpReader(folder).read();
}

}  // namespace lockstep::detail
