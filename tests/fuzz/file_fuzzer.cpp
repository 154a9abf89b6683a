// The readers of tensors' files under libFuzzer; test_file_fuzz.py builds and runs it.
//   LOCKSTEP_FUZZ_FORMAT: pickle, or the name in LOCKSTEP_FUZZ_FOLDER, a copy of whose files is
//   read, of the file that the input replaces.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/data/pickle.h"
#include "lockstep/data/tensor_reader.h"

namespace {

using namespace lockstep;

void read_all(const std::filesystem::path& path) {
  const TensorReader reader(path);
  for (const TensorInfo& tensor : reader.tensors()) reader.read(tensor.name);
  reader.damage();
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
    std::ofstream(file, std::ios::binary) << bytes;
    const bool is_single = format.ends_with(".pt");
    read_all(is_single ? file : folder->path());
  } catch (const Error&) {  // As promised.
  }
  return 0;
}
