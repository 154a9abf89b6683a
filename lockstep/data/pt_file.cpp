#include "lockstep/data/tensor_reader.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/dtype_names.h"
#include "lockstep/data/pickle.h"
#include "lockstep/data/stored_tensors.h"
#include "lockstep/data/tensor_bytes.h"
#include "lockstep/data/zip.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

using Kind = PickleValue::Kind;

constexpr std::string_view kPickle = "/data.pkl";

using detail::StoredBytes;
using detail::StoredTensor;

/// Of a storage's class, or of a dtype.
std::optional<at::ScalarType> pt_dtype_of(std::string_view name) {
  const std::string_view last = name.substr(name.rfind('.') + 1);
  if (name == "torch.storage.UntypedStorage") return at::kByte;
  if (!name.starts_with("torch.")) return std::nullopt;
  const auto of_storage = dtype_of_name(&DtypeNames::storage, last);
  return of_storage ? of_storage : dtype_of_name(&DtypeNames::torch, last);
}

class PtReader {
 public:
  PtReader(const fs::path& path, ZipArchive archive) : path_(path), archive_(std::move(archive)) {
    const auto& members = archive_.members();
    const auto pickle = std::find_if(members.begin(), members.end(), [](const ZipMember& member) {
      return member.name.ends_with(kPickle);
    });
    if (pickle == members.end())
      throw DataError(path_.string() + " is a zip archive without data.pkl",
                      "expected what torch.save has written");
    prefix_ = pickle->name.substr(0, pickle->name.size() - kPickle.size()) + "/";
    for (const ZipMember& member : members) {
      if (member.name.starts_with(prefix_))
        members_.emplace(member.name.substr(prefix_.size()), &member);
    }
    if (const auto order = members_.find("byteorder");
        order != members_.end() && content_of(*order->second) != "little")
      throw DataError(path_.string() + " has its numbers in big-endian order",
                      "save it on a little-endian machine");
    const std::string bytes = content_of(*pickle);
    pickle_ = read_pickle(bytes, [&](size_t offset, const std::string& complaint) {
      throw DataError(
          path_.string() + ", byte " + std::to_string(offset) + " of data.pkl: " + complaint,
          "expected what torch.save has written");
    });
  }

  detail::StoredTensors read(const std::string& root) {
    walk(pickle_.root, root, 0);
    return std::move(stored_);
  }

 private:
  [[noreturn]] void fail(const std::string& name, const std::string& complaint,
                         const std::string& hint = {}) const {
    throw DataError(path_.string() + ": '" + name + "' " + complaint, hint);
  }

  std::string content_of(const ZipMember& member) const {
    const auto reader = archive_.open(member);
    if (member.size > reader->remaining_limit())
      reader->fail(0, "the archive promises " + std::to_string(member.size) + " bytes of " +
                          member.name + ", of which it has less");
    std::string content(member.size, '\0');
    reader->read_exact(content.data(), content.size(), member.name);
    reader->expect_end();
    return content;
  }

  /// Values may contain themselves, and be contained many times.
  void walk(const PickleValue* value, const std::string& name, int depth) {
    constexpr size_t kMostSteps = 20'000'000;
    if (depth > 200 || ++steps_ > kMostSteps) fail(name, "holds too many values within each other");
    if (value->kind == Kind::sequence) return walk_items(*value, name, depth);
    if (value->kind == Kind::dict) return walk_entries(*value, name, depth);
    if (value->kind != Kind::object) {
      stored_.values[name] = plain_value(*value);
      return;
    }
    if (is_tensor(*value)) {
      stored_.tensors.push_back(tensor_of(*value, name));
      stored_.tensors.back().name = name;
    } else if (value->state != nullptr && !value->text.starts_with("torch._utils.")) {
      walk(value->state, name, depth + 1);
    } else if (value->text == "torch.Size") {
      for (const PickleValue* sizes : value->items) walk(sizes, name, depth + 1);
    } else {
      stored_.values[name] = value->text;
    }
  }

  static PtFile::Value plain_value(const PickleValue& value) {
    switch (value.kind) {
      case Kind::none:
        return std::monostate();
      case Kind::boolean:
        return value.integer != 0;
      case Kind::integer:
        return value.integer;
      case Kind::real:
        return value.real;
      default:
        return value.text;
    }
  }

  void walk_items(const PickleValue& value, const std::string& name, int depth) {
    for (size_t i = 0; i < value.items.size(); ++i)
      walk(value.items[i], join(name, std::to_string(i)), depth + 1);
  }

  void walk_entries(const PickleValue& value, const std::string& name, int depth) {
    for (const auto& [key, item] : value.entries) {
      const std::string word =
          key->kind == Kind::integer ? std::to_string(key->integer) : key->text;
      // How a module that was saved whole keeps its own.
      const bool is_inner = word == "_parameters" || word == "_buffers" || word == "_modules";
      walk(item, is_inner ? name : join(name, word), depth + 1);
    }
  }

  static std::string join(const std::string& name, const std::string& word) {
    return name.empty() ? word : name + "." + word;
  }

  static bool is_tensor(const PickleValue& value) {
    return value.text.starts_with("torch._utils._rebuild_") ||
           value.text.starts_with("torch._tensor._rebuild_");
  }

  StoredTensor tensor_of(const PickleValue& value, const std::string& name) {
    if (const auto known = tensors_.find(&value); known != tensors_.end()) return known->second;
    const auto is = [&](const char* function) {
      return value.text == std::string("torch._utils._rebuild_") + function;
    };
    StoredTensor tensor;
    if ((is("parameter") || is("parameter_with_state")) && !value.items.empty() &&
        value.items[0]->kind == Kind::object && !value.items[0]->text.ends_with("parameter")) {
      tensor = tensor_of(*value.items[0], name);
    } else if (is("tensor") || is("tensor_v2")) {
      tensor = dense_tensor(value, name, std::nullopt);
    } else if (is("tensor_v3") && value.items.size() > 6) {
      tensor = dense_tensor(value, name, pt_dtype_of(value.items[6]->text));
    } else {
      fail(name, "is made by " + value.text, "expected a dense tensor: save tensor.to_dense()");
    }
    tensors_.emplace(&value, tensor);
    return tensor;
  }

  /// From its storage, offset, sizes and strides.
  StoredTensor dense_tensor(const PickleValue& value, const std::string& name,
                            std::optional<at::ScalarType> dtype) {
    if (value.items.size() < 4 || value.items[0]->items.size() != 1)
      fail(name, "has not the storage, offset, sizes and strides of a tensor");
    const PickleValue& id = *value.items[0]->items[0];
    if (id.items.size() < 5) fail(name, "names no storage");
    if (!dtype) dtype = pt_dtype_of(id.items[1]->text);
    if (!dtype) fail(name, "is of " + id.items[1]->text + ", which is not known");
    StoredTensor tensor;
    tensor.dtype = *dtype;
    tensor.shape = numbers(*value.items[2], name);
    tensor.chunks.push_back({std::vector<int64_t>(tensor.shape.size()), tensor.shape,
                             numbers(*value.items[3], name), value.items[1]->integer,
                             storage(id.items[2]->text, name)});
    detail::check_chunk_fits(tensor.chunks[0], *dtype, path_.string() + ": '" + name + "'");
    return tensor;
  }

  std::vector<int64_t> numbers(const PickleValue& list, const std::string& name) const {
    std::vector<int64_t> numbers;
    for (const PickleValue* item : list.items) {
      if (item->kind != Kind::integer || item->integer < 0)
        fail(name, "has a size or stride that is no count");
      numbers.push_back(item->integer);
    }
    return numbers;
  }

  const std::shared_ptr<const StoredBytes>& storage(const std::string& key,
                                                    const std::string& name) {
    const auto known = storages_.find(key);
    if (known != storages_.end()) return known->second;
    const auto found = members_.find("data/" + key);
    if (found == members_.end()) fail(name, "lies in storage " + key + ", which is not there");
    const ZipMember& member = *found->second;
    const ContentOptions where = archive_.place_of(member);
    if (!member.deflated && member.size != member.packed_size)
      fail(name, "lies in storage " + key + ", which has two sizes: the file is damaged");
    return storages_
        .emplace(key, std::make_shared<const StoredBytes>(StoredBytes{path_, where, member.size}))
        .first->second;
  }

  const fs::path& path_;
  const ZipArchive archive_;
  std::string prefix_;
  std::map<std::string, const ZipMember*> members_;  ///< Without the prefix.
  Pickle pickle_;
  std::map<std::string, std::shared_ptr<const StoredBytes>> storages_;
  std::unordered_map<const PickleValue*, StoredTensor> tensors_;
  size_t steps_ = 0;
  detail::StoredTensors stored_;
};

/// The pickle of a state_dict, of protocol 2.
class PtWriter {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    text(name);
    const at::ScalarType dtype = tensor.scalar_type();
    std::string_view type = name_of_dtype(&DtypeNames::storage, dtype);
    const bool has_storage = !type.empty();
    if (!has_storage) type = name_of_dtype(&DtypeNames::torch, dtype);
    if (type.empty())
      throw UsageError(std::string("save_pt: a tensor is of ") + c10::toString(dtype),
                       "convert it to a dtype that torch.save knows");
    global("torch._utils", has_storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    const auto [key, values] = storage_of(tensor);
    bytes_ += "((";
    text("storage");
    has_storage ? global("torch", type) : global("torch.storage", "UntypedStorage");
    text(std::to_string(key));
    text("cpu");
    integer(has_storage ? values.numel() : static_cast<int64_t>(values.nbytes()));
    bytes_ += "tQ";
    integer(0);
    tuple(values.sizes());
    tuple(values.strides());
    bytes_ += '\x89';  // It needs no gradient.
    global("collections", "OrderedDict");
    bytes_ += ")R";
    if (!has_storage) global("torch", type);
    bytes_ += "tR";
  }
  std::string finish() { return bytes_ + "u."; }
  const std::vector<at::Tensor>& storages() const { return storages_; }

 private:
  /// A tensor of several names is there once.
  std::pair<size_t, at::Tensor> storage_of(const at::Tensor& tensor) {
    const auto [place, is_new] = keys_.emplace(tensor.unsafeGetTensorImpl(), storages_.size());
    if (is_new) storages_.push_back(tensor.detach().cpu().contiguous());
    return {place->second, storages_[place->second]};
  }
  void global(std::string_view module, std::string_view name) {
    bytes_.append("c").append(module).append("\n").append(name).append("\n");
  }
  void number(uint64_t value, size_t size) {
    for (size_t i = 0; i < size; ++i) bytes_ += static_cast<char>(value >> (8 * i));
  }
  void text(std::string_view text) {
    bytes_ += 'X';
    number(text.size(), 4);
    bytes_ += text;
  }
  void integer(int64_t value) {
    bytes_ += "\x8a\x08";
    number(static_cast<uint64_t>(value), 8);
  }
  void tuple(at::IntArrayRef values) {
    bytes_ += '(';
    for (const int64_t value : values) integer(value);
    bytes_ += 't';
  }

  std::string bytes_ = "\x80\x02}(";
  std::vector<at::Tensor> storages_;
  std::unordered_map<const c10::TensorImpl*, size_t> keys_;
};

at::Tensor whole_storage(const StoredBytes& bytes) {
  ContentReader reader(bytes.path, bytes.where);
  at::Tensor storage = read_tensor(reader, at::kByte, static_cast<int64_t>(bytes.size),
                                   std::endian::little, "a storage");
  reader.expect_end();
  return storage;
}

}  // namespace

detail::StoredTensors detail::index_pt(const fs::path& path, uint64_t begin,
                                       std::optional<uint64_t> size, const std::string& root) {
  StoredTensors stored = PtReader(path, ZipArchive(path, begin, size)).read(root);
  stored.format = "pt";
  return stored;
}

PtFile load_pt(const fs::path& path) {
  detail::StoredTensors stored = detail::index_pt(path);
  std::map<const StoredBytes*, at::Tensor> storages;
  using Part = std::tuple<const StoredBytes*, at::ScalarType, int64_t, std::vector<int64_t>,
                          std::vector<int64_t>>;
  std::map<Part, at::Tensor> known;  // What is there twice is one tensor.
  PtFile file;
  for (const StoredTensor& tensor : stored.tensors) {
    const detail::StoredChunk& chunk = tensor.chunks[0];
    at::Tensor& storage = storages[chunk.bytes.get()];
    if (!storage.defined()) storage = whole_storage(*chunk.bytes);
    at::Tensor& made =
        known[{chunk.bytes.get(), tensor.dtype, chunk.first, chunk.sizes, chunk.strides}];
    if (!made.defined()) {
      made = at::empty({0}, at::dtype(tensor.dtype))
                 .set_(storage.storage(), chunk.first, chunk.sizes, chunk.strides);
    }
    file.tensors.emplace_back(tensor.name, made);
  }
  file.values = std::move(stored.values);
  return file;
}

void save_pt(const fs::path& path, const StateDict& tensors) {
  PtWriter pickle;
  for (const auto& [name, tensor] : tensors) pickle.add(name, tensor);
  const std::string bytes = pickle.finish();
  // In memory: what a callback of this writer throws would have to leave C code.
  std::string content;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t size) {
    content.append(static_cast<const char*>(data), size);
    return size;
  });
  archive.writeRecord("data.pkl", bytes.data(), bytes.size());
  archive.writeRecord("byteorder", "little", 6);
  for (size_t key = 0; key < pickle.storages().size(); ++key) {
    const at::Tensor& values = pickle.storages()[key];
    archive.writeRecord("data/" + std::to_string(key), values.const_data_ptr(), values.nbytes());
  }
  archive.writeEndOfFile();
  write_file_atomically(path, content);
}

}  // namespace lockstep
