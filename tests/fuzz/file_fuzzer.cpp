// The readers of tensors' files under libFuzzer; test_file_fuzz.py builds and runs it.
//   LOCKSTEP_FUZZ_FORMAT: pickle, or the name in LOCKSTEP_FUZZ_FOLDER, a copy of whose files is
//   read, of the file that the input replaces. state.json is the description of a checkpoint.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/checkpoint/stored_checkpoint.h"
#include "lockstep/data/pickle.h"
#include "lockstep/data/tensor_reader.h"

namespace {

using namespace lockstep;

void read_all(const std::filesystem::path& path) {
  const TensorReader reader(path);
  for (const TensorInfo& tensor : reader.tensors()) reader.read(tensor.name);
  reader.damage();
}

/// With its own checksum: else most inputs would end at that.
std::string with_checksum(std::string_view text) {
  auto document = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) return std::string(text);
  document.erase("checksum");
  try {
    document["checksum"] = sha256_hex(document.dump());
    return document.dump() + "\n";
  } catch (const nlohmann::json::exception&) {  // Not UTF-8.
    return std::string(text);
  }
}

void read_checkpoint_in(const std::filesystem::path& folder) {
  const StoredCheckpoint checkpoint = open_checkpoint(folder);
  check_files(checkpoint, 0, 0);
  read_tensors(checkpoint, checkpoint.model);
  read_tensors(checkpoint, checkpoint.state);
  check_files(checkpoint);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string format = std::getenv("LOCKSTEP_FUZZ_FORMAT");
  static const auto folder = [] {
    auto made = std::make_unique<TemporaryDirectory>();
    std::filesystem::copy(std::getenv("LOCKSTEP_FUZZ_FOLDER"), made->path());
    return made;
  }();
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (format == "pickle") {
      read_pickle(bytes, [](size_t, const std::string& complaint) { throw DataError(complaint); });
      return 0;
    }
    const auto file = folder->path() / format;
    const bool is_checkpoint = format == "state.json";
    std::filesystem::remove(file);  // The disk is waited for when a file is cut and written anew.
    std::ofstream(file, std::ios::binary)
        << (is_checkpoint ? with_checksum(bytes) : std::string(bytes));
    if (is_checkpoint) {
      read_checkpoint_in(folder->path());
      return 0;
    }
    const bool is_single = format.ends_with(".pt");
    read_all(is_single ? file : folder->path());
  } catch (const Error&) {  // As promised.
  }
  return 0;
}
