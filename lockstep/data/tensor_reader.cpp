#include "lockstep/data/tensor_reader.h"

#include "lockstep/base/error.h"
#include "lockstep/data/stored_tensors.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

using detail::StoredBytes;
using detail::StoredTensors;

StoredTensors index_of_file(const fs::path& path) {
  ContentReader reader(path, {.packing = ContentOptions::Packing::plain});
  std::string start(9, '\0');
  start.resize(reader.read_some(start.data(), start.size()));
  if (start.starts_with("PK")) return detail::index_pt(path);
  if (start.size() < 9 || start[8] == '{') return detail::index_safetensors(path);
  if (start.starts_with("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9")) {
    throw DataError(path.string() + ": this is torch.save's format of before PyTorch 1.6",
                    "write it anew in Python: torch.save(torch.load(FILE), NEW_FILE)");
  }
  throw DataError(path.string() + ": this is neither a safetensors file nor a .pt file",
                  "give one of these, or a folder of weights; a file of these that begins with "
                  "something else is damaged");
}

StoredTensors index_of(const fs::path& path, bool weights_only) {
  std::error_code ignored;
  if (!fs::exists(path, ignored))
    throw DataError(path.string() + ": there is no such file or folder");
  if (!fs::is_directory(path, ignored)) return index_of_file(path);
  if (fs::exists(path / ".metadata", ignored)) return detail::index_dcp_folder(path);
  if (fs::is_directory(path / "latest", ignored)) return index_of(path / "latest", weights_only);
  return detail::index_safetensors_folder(path, weights_only);
}

const std::vector<TensorShard>& shards_named(const StoredTensors& stored, const std::string& name) {
  const auto found = stored.shards.find(name);
  if (found == stored.shards.end()) throw DataError("there is no tensor '" + name + "'");
  return found->second;
}

void read_through(const StoredBytes& bytes) {
  ContentReader reader(bytes.path, bytes.where);
  std::vector<char> piece(1 << 20);
  uint64_t read = 0;
  while (const size_t size = reader.read_some(piece.data(), piece.size())) read += size;
  if (read != bytes.size)
    reader.fail(read, "expected " + std::to_string(bytes.size) + " bytes of content");
  reader.expect_end();
}

}  // namespace

TensorReader::TensorReader(const fs::path& path, bool weights_only)
    : stored_(std::make_shared<const StoredTensors>(index_of(path, weights_only))) {}

const std::string& TensorReader::format() const {
  return stored_->format;
}
const std::vector<TensorInfo>& TensorReader::tensors() const {
  return stored_->tensors;
}
const std::map<std::string, PtFile::Value>& TensorReader::values() const {
  return stored_->values;
}
const std::map<std::string, std::string>& TensorReader::metadata() const {
  return stored_->metadata;
}

at::Tensor TensorReader::read(const std::string& name) const {
  const auto& shards = shards_named(*stored_, name);
  const std::vector<int64_t>& sizes = shards.front().sizes;
  return detail::read_box(shards, {std::vector<int64_t>(sizes.size()), sizes});
}

at::Tensor TensorReader::read(const std::string& name, at::IntArrayRef offsets,
                              at::IntArrayRef sizes) const {
  const auto& shards = shards_named(*stored_, name);
  const TensorBox box{offsets.vec(), sizes.vec()};
  if (!detail::is_within(box, shards.front().sizes))
    throw UsageError("a box " + c10::str(sizes) + " at " + c10::str(offsets) + " of tensor '" +
                     name + "', whose shape is " + c10::str(at::IntArrayRef(shards.front().sizes)));
  return detail::read_box(shards, box);
}

std::vector<std::pair<std::string, std::string>> TensorReader::damage() const {
  std::map<const StoredBytes*, std::string> found;  // Tied tensors share their bytes.
  std::vector<std::pair<std::string, std::string>> damaged;
  for (const TensorInfo& tensor : stored_->tensors) {
    for (const TensorShard& shard : stored_->shards.at(tensor.name)) {
      const auto [place, is_new] = found.emplace(shard.file.get(), "");
      try {
        if (is_new) read_through(*shard.file);
      } catch (const Error& error) {
        place->second = error.what();
      }
      if (!place->second.empty()) damaged.emplace_back(tensor.name, place->second);
    }
  }
  return damaged;
}

}  // namespace lockstep
