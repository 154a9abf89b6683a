#include "lockstep/data/tensor_reader.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
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
  PtReader(const fs::path& path, uint64_t begin, std::optional<uint64_t> size)
      : path_(path), archive_(path, begin, size) {
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
    if (!left_out_.empty())
      log_warning(path_.string() + ": no dense tensors, left out: " + join(left_out_, ", "));
    return std::move(stored_);
  }

 private:
  [[noreturn]] void fail(const std::string& name, const std::string& complaint,
                         const std::string& hint = {}) const {
    throw DataError(path_.string() + ": '" + name + "' " + complaint, hint);
  }

  std::string content_of(const ZipMember& member) const {
    ContentReader reader(path_, archive_.place_of(member));
    if (member.size > reader.remaining_limit())
      reader.fail(0, "the archive promises " + std::to_string(member.size) + " bytes of " +
                         member.name + ", of which it has less");
    std::string content(member.size, '\0');
    reader.read_exact(content.data(), content.size(), member.name);
    reader.expect_end();
    return content;
  }

  /// Values may contain themselves, and be contained many times.
  void walk(const PickleValue* value, const std::string& name, int depth) {
    constexpr size_t kMostSteps = 20'000'000;
    if (depth > 200 || ++steps_ > kMostSteps)
      fail(name.substr(0, 60), "... holds too many values within each other");
    if (is_plain(*value)) return add_value(name, plain_value(*value));
    if (!open_.insert(value).second) return add_value(name, "...");
    if (is_tensor(*value)) {
      add_tensor(*value, name);
    } else {
      walk_parts(*value, name, depth);
    }
    open_.erase(value);
  }

  /// A container, an object of a class that is not known, or a module that was saved whole.
  void walk_parts(const PickleValue& value, const std::string& name, int depth) {
    const bool is_object = value.kind == Kind::object;
    const bool is_empty = value.items.empty() && value.entries.empty() && value.state == nullptr;
    if (is_object && (is_empty || value.text == "persistent")) return add_value(name, value.text);
    if (find(value, "_parameters") != nullptr && find(value, "_modules") != nullptr)
      return walk_module(value, name, depth);
    // set([1, 2]), Counter({"a": 1}): the content is one argument.
    const bool is_wrapped = is_object && value.items.size() == 1 && !is_plain(*value.items[0]) &&
                            !is_tensor(*value.items[0]);
    for (size_t i = 0; i < value.items.size(); ++i)
      walk(value.items[i], is_wrapped ? name : joined(name, std::to_string(i)), depth + 1);
    std::set<std::string> words;
    for (size_t i = 0; i < value.entries.size(); ++i) {
      const auto& [key, item] = value.entries[i];
      std::string word = key_text(*key);
      if (!words.insert(word).second) word += "#" + std::to_string(i);  // 0 and "0".
      walk(item, joined(name, word), depth + 1);
    }
    // Of a dict it is what torch calls _metadata.
    if (is_object && value.state != nullptr) walk(value.state, name, depth + 1);
  }

  /// What is in its state_dict. Of all else only values.
  void walk_module(const PickleValue& attributes, const std::string& name, int depth) {
    for (const auto& [key, item] : attributes.entries) {
      if (key->text == "_parameters" || key->text == "_modules") {
        walk(item, name, depth + 1);
      } else if (key->text == "_buffers") {
        const std::set<std::string> left_out =
            texts(find(attributes, "_non_persistent_buffers_set"));
        for (const auto& [word, buffer] : item->entries) {
          if (!left_out.contains(word->text))
            walk(buffer, joined(name, word->text), depth + 1);
          else
            add_value(joined(name, word->text), "a buffer that is not persistent");
        }
      } else if (is_plain(*item)) {
        add_value(joined(name, key->text), plain_value(*item));
      } else if (!item->items.empty() || !item->entries.empty() || item->state != nullptr) {
        add_value(joined(name, key->text), "no part of the state_dict");
      }
    }
  }

  static const PickleValue* find(const PickleValue& dict, std::string_view word) {
    if (dict.kind != Kind::dict) return nullptr;
    const auto found = std::find_if(dict.entries.begin(), dict.entries.end(),
                                    [&](const auto& entry) { return entry.first->text == word; });
    return found == dict.entries.end() ? nullptr : found->second;
  }

  /// Of a set, which older protocols make from a list.
  static std::set<std::string> texts(const PickleValue* set) {
    if (set != nullptr && set->kind == Kind::object && set->items.size() == 1) set = set->items[0];
    std::set<std::string> texts;
    if (set == nullptr) return texts;
    for (const PickleValue* item : set->items) texts.insert(item->text);
    return texts;
  }

  void add_value(const std::string& name, PtFile::Value value) {
    const auto [place, is_new] = stored_.values.emplace(name, value);
    if (!is_new)
      stored_.values.emplace(name + "#" + std::to_string(stored_.values.size()), std::move(value));
  }

  void add_tensor(const PickleValue& value, const std::string& name) {
    const auto [known, is_new] = names_.emplace(name, &value);
    if (!is_new && known->second == &value) return;
    if (!is_new)
      throw DataError(path_.string() + ": two tensors would have the name '" + name + "'",
                      "save them by other keys: a name joins keys by dots");
    auto tensor = rebuilt(value.text, value.items, name, 0);
    if (!tensor) {
      left_out_.push_back("'" + name + "' (" + value.text + ")");
      return add_value(name, value.text);
    }
    tensor->name = name;
    stored_.add(std::move(*tensor));
  }

  static bool is_plain(const PickleValue& value) {
    return value.kind != Kind::sequence && value.kind != Kind::dict && value.kind != Kind::object;
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

  /// As Python prints it.
  static std::string key_text(const PickleValue& key, int depth = 0) {
    constexpr size_t kMostItems = 16;
    char real[32] = {};
    switch (key.kind) {
      case Kind::none:
        return "None";
      case Kind::boolean:
        return key.integer != 0 ? "True" : "False";
      case Kind::integer:
        return std::to_string(key.integer);
      case Kind::real:
        return {real, std::to_chars(real, std::end(real), key.real).ptr};
      case Kind::sequence: {
        std::vector<std::string> items;
        for (size_t i = 0; depth < 3 && i < std::min(key.items.size(), kMostItems); ++i)
          items.push_back(key_text(*key.items[i], depth + 1));
        return "(" + join(items, ", ") + ")";
      }
      default:
        return key.text;
    }
  }

  static std::string joined(const std::string& name, const std::string& word) {
    return name.empty() ? word : name + "." + word;
  }

  static bool is_tensor(const PickleValue& value) {
    return value.kind == Kind::object && (value.text.starts_with("torch._utils._rebuild_") ||
                                          value.text.starts_with("torch._tensor._rebuild_"));
  }

  /// None of one that is not dense, or of a dtype that is not known.
  std::optional<TensorShard> rebuilt(const std::string& function,
                                     const std::vector<const PickleValue*>& items,
                                     const std::string& name, int depth) {
    const auto is = [&](const char* known) {
      return function == std::string("torch._utils._rebuild_") + known;
    };
    if (depth > 3 || items.empty()) return std::nullopt;
    if (is("parameter") || is("parameter_with_state"))
      return rebuilt(items[0]->text, items[0]->items, name, depth + 1);
    // With attributes, or of a subclass: a function and its arguments.
    if (function == "torch._tensor._rebuild_from_type_v2" && items.size() > 2)
      return rebuilt(items[0]->text, items[2]->items, name, depth + 1);
    if (is("tensor") || is("tensor_v2")) return dense_tensor(items, name, 6);
    if (is("tensor_v3") && items.size() > 6) return dense_tensor(items, name, 7);
    return std::nullopt;
  }

  /// From its storage, offset, sizes and strides, of `flags` items before those of metadata. The
  /// seventh may be its dtype.
  std::optional<TensorShard> dense_tensor(const std::vector<const PickleValue*>& items,
                                          const std::string& name, size_t flags) {
    if (items.size() < 4 || items[0]->items.size() != 1)
      fail(name, "has not the storage, offset, sizes and strides of a tensor");
    const PickleValue& id = *items[0]->items[0];
    if (id.items.size() < 5) fail(name, "names no storage");
    const auto dtype = pt_dtype_of(flags == 7 ? items[6]->text : id.items[1]->text);
    if (!dtype) return std::nullopt;
    const auto flag = [&](const char* word) {
      const PickleValue* value = items.size() > flags ? find(*items[flags], word) : nullptr;
      return value != nullptr && value->integer != 0;
    };
    TensorShard tensor = detail::shard_in_file(
        {name, *dtype, numbers(*items[2], name)}, numbers(*items[3], name), items[1]->integer,
        storage(id.items[2]->text, name), path_.string() + ": '" + name + "'");
    const bool can_negate = c10::isComplexType(*dtype) || *dtype == at::kHalf ||
                            *dtype == at::kBFloat16 || *dtype == at::kFloat ||
                            *dtype == at::kDouble;
    if ((flag("conj") && !c10::isComplexType(*dtype)) || (flag("neg") && !can_negate))
      fail(name, "is a lazy conjugate or negative of a dtype that has none");
    if (flag("conj")) tensor.values = tensor.values._conj();
    if (flag("neg")) tensor.values = tensor.values._neg_view();
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
  std::unordered_map<std::string, const PickleValue*> names_;
  std::set<const PickleValue*> open_;  ///< What is being walked through.
  std::vector<std::string> left_out_;
  size_t steps_ = 0;
  detail::StoredTensors stored_;
};

/// The pickle of a state_dict, of protocol 2.
class PtWriter {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    if (!names_.insert(name).second)
      throw UsageError("save_pt: tensor '" + name + "' is given twice; expected each name once");
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
    if (is_new)
      storages_.push_back(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous());
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
  std::set<std::string> names_;
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
  StoredTensors stored = PtReader(path, begin, size).read(root);
  stored.format = "pt";
  return stored;
}

PtFile load_pt(const fs::path& path) {
  detail::StoredTensors stored = detail::index_pt(path);
  std::map<const StoredBytes*, at::Tensor> storages;
  using Part = std::tuple<const StoredBytes*, at::ScalarType, int64_t, std::vector<int64_t>,
                          std::vector<int64_t>, bool, bool>;
  std::map<Part, at::Tensor> known;  // What is there twice is one tensor.
  PtFile file;
  for (const TensorInfo& tensor : stored.tensors) {
    const auto& [name, sizes, offsets, values, bytes] = stored.shards.at(tensor.name).front();
    at::Tensor& storage = storages[bytes.get()];
    if (!storage.defined()) storage = whole_storage(*bytes);
    at::Tensor& made = known[{bytes.get(), tensor.dtype, values.storage_offset(), sizes,
                              values.strides().vec(), values.is_conj(), values.is_neg()}];
    if (!made.defined()) {
      made = detail::resolved(
          values, at::empty({0}, at::dtype(tensor.dtype))
                      .set_(storage.storage(), values.storage_offset(), sizes, values.strides()));
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
