#include "lockstep/data/named_sets.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/max.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/download.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kChannels = 3, kSide = 32, kClasses = 10;
/// A label, then the image's red, green and blue planes, each row by row.
constexpr int64_t kRecord = 1 + kChannels * kSide * kSide;

constexpr const char* kFolder = "cifar-10-batches-bin";
constexpr const char* kArchive = "cifar-10-binary.tar.gz";
constexpr const char* kMirrorVariable = "LOCKSTEP_CIFAR10_URL";

/// The last is the test part's.
const std::vector<std::string>& all_files() {
  static const std::vector<std::string> files{"data_batch_1.bin", "data_batch_2.bin",
                                              "data_batch_3.bin", "data_batch_4.bin",
                                              "data_batch_5.bin", "test_batch.bin"};
  return files;
}

/// The part of these files.
TensorDataset load_part(std::span<const fs::path> paths) {
  std::vector<at::Tensor> images, labels;
  for (const fs::path& path : paths) {
    const auto bytes = static_cast<int64_t>(fs::file_size(path));
    if (bytes == 0 || bytes % kRecord != 0) {
      throw DataError(path.string() + " has " + with_thousands(bytes) +
                          " bytes; expected images of 3,073 bytes each",
                      "the file is cut short or is no part of CIFAR-10's binary version");
    }
    ContentReader reader(path);
    const at::Tensor records = read_tensor(reader, at::kByte, {bytes / kRecord, kRecord},
                                           std::endian::little, "the images");
    labels.push_back(records.select(1, 0).to(at::kLong));
    if (const auto most = labels.back().max().item<int64_t>(); most >= kClasses)
      throw DataError(path.string() + " has the label " + std::to_string(most) +
                      "; expected 0 to 9");
    images.push_back(records.slice(1, 1));
  }
  return {.name = "cifar10",
          .data = at::cat(images).view({-1, kChannels, kSide, kSide}),
          .targets = at::cat(labels),
          .num_classes = kClasses,
          .classes = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse",
                      "ship", "truck"}};
}

/// Gives the exit status, or -1 where it was killed or could not be started.
int run_tar(const fs::path& archive, const fs::path& folder) {
  std::array<std::string, 6> words{"tar", "-xzof",         archive.string(),
                                   "-C",  folder.string(), "--strip-components=1"};
  std::array<char*, words.size() + 1> argv{};
  std::transform(words.begin(), words.end(), argv.begin(), [](auto& word) { return word.data(); });
  pid_t pid = 0;
  int status = 0;
  if (::posix_spawnp(&pid, argv[0], nullptr, nullptr, argv.data(), environ) != 0) return -1;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Unpacks the archive into `folder`, which comes to be with all files or not at all.
void unpack(const fs::path& archive, const fs::path& folder) {
  const fs::path aside = make_unique_folder(folder.string() + ".part");
  try {
    if (const int status = run_tar(archive, aside); status != 0)
      throw DataError(
          archive.string() + ": tar failed to unpack it, status " + std::to_string(status),
          "is the program tar installed, and is there room on the disk?");
    if (const auto found = find_files({aside}, all_files()); !found.complete())
      throw DataError(archive.string() + " lacks " + join(found.missing, ", "));
    fs::rename(aside, folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(aside, ignored);
    throw;
  }
}

void fetch(const fs::path& folder, const DatasetOptions& options, const Cifar10Source& source) {
  const fs::path archive = folder.parent_path() / kArchive;
  std::error_code ignored;
  if (!fs::exists(archive, ignored)) {
    const auto base = mirrors(kMirrorVariable, {source.mirror}).front();
    download({base + kArchive}, archive, source.archive_md5, options.transfer, kMirrorVariable);
  }
  unpack(archive, folder);
}

}  // namespace

FoundFiles find_cifar10(const fs::path& data_dir) {
  return find_files(
      {data_dir / kFolder, data_dir / "cifar10" / kFolder, data_dir / "cifar10", data_dir},
      all_files());
}

FoundFiles fetch_cifar10(const DatasetOptions& options, const Cifar10Source& source) {
  return fetch_files(
      "cifar10", options, options.data_dir, [&] { return find_cifar10(options.data_dir); },
      [&](const FoundFiles&) { fetch(options.data_dir / kFolder, options, source); });
}

DatasetSplits load_cifar10(const DatasetOptions& options, const Cifar10Source& source) {
  const auto paths = fetch_cifar10(options, source).paths;
  const std::span<const fs::path> all(paths);
  return {load_part(all.first(5)), load_part(all.subspan(5))};
}

}  // namespace lockstep
