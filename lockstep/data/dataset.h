#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/download_options.h"

namespace lockstep {

/// Samples held in memory. Row i of `data` belongs to row i of `targets`. Both are contiguous CPU
/// tensors. They are shared, never written to.
struct TensorDataset {
  std::string name;         ///< "mnist", "digits", ...: used in messages.
  at::Tensor data;          ///< [N, ...]; images are uint8 [N, H, W] or [N, C, H, W].
  at::Tensor targets;       ///< int64 [N] class indices, or float32 [N, K] for regression.
  int64_t num_classes = 0;  ///< 0 for regression.

  int64_t size() const { return data.size(0); }
};

/// What training needs of a dataset: a part to learn from and a held-out part.
struct DatasetSplits {
  TensorDataset train;
  TensorDataset test;
};

struct DatasetOptions {
  /// Where the files of mnist and fashion-mnist lie, directly or in a folder of the set's name, and
  /// where they are downloaded to. Empty: LOCKSTEP_DATA_DIR, else "data", as most programs have it.
  std::filesystem::path data_dir = {};
  /// Fetch what is missing. Off, because a job must not reach out to the network unasked.
  bool download = false;
  /// A base URL to fetch from in place of the public mirrors. Empty: LOCKSTEP_MNIST_URL or
  /// LOCKSTEP_FASHION_MNIST_URL, else the mirrors that torchvision uses.
  std::string mirror = {};
  /// Seeds digits and random: fixed by itself, so that runs with other seeds of the model and of
  /// the shuffling compare on the same data.
  uint64_t data_seed = 0;
  /// digits: enough for the mlp to reach 97% in a few seconds.
  int64_t digits_train = 10000;
  int64_t digits_test = 2000;
  /// random: the seeds' size. The held-out part is the continuation of the same stream.
  int64_t random_train = 2048;
  int64_t random_test = 256;
  /// file: the share of the rows, from the end, that is held out when the file has no test part.
  double test_fraction = 0.1;
  /// How long a process waits for another one of this host that downloads the same files: a slow
  /// line takes minutes for MNIST's 12 MB.
  std::chrono::seconds lock_timeout{600};
  /// Time-outs and tries of the download.
  DownloadOptions transfer = {};
};

/// Loads a dataset by name:
///  - mnist, fashion-mnist: the four IDX files, plain or gzip. They lie in `data_dir` itself, in
///    `data_dir`/mnist (fashion-mnist) or in torchvision's `data_dir`/MNIST/raw (FashionMNIST/raw).
///    uint8 [60000, 28, 28] and [10000, 28, 28], 10 classes.
///  - digits: made up on the spot, the same for the same seed everywhere. uint8 [N, 28, 28].
///  - random: the regression set of PyTorch's DDP tutorials, data [2048, 20] and targets [2048, 1],
///    uniform in [0, 1). Right after torch.manual_seed(data_seed) Python gives the same numbers:
///    `[(torch.rand(20), torch.rand(1)) for _ in range(2048)]`.
///  - file:PATH: a .safetensors or .npz file, or a folder of .npy files. Its tensors are named
///    data/targets, x/y or images/labels. A test part is named test_data/test_targets or
///    x_test/y_test and so on. Whole-numbered targets are classes, others regression.
///
/// Blocks on disk and, with `download`, on the network. No group is needed: of several processes on
/// one host, one downloads and the others wait for it. Throws UsageError for an unknown name (with
/// the nearest one). Throws DataError for files that are missing, truncated, damaged, foreign or do
/// not belong together. The error names the file, the offset and what was expected.
DatasetSplits load_dataset(const std::string& name, const DatasetOptions& options = {});

/// The folder where load_dataset would find all files of mnist or fashion-mnist by these options.
/// None when it would have to download some. Throws UsageError for a set that is not one of them.
std::optional<std::filesystem::path> dataset_folder(const std::string& name,
                                                    const DatasetOptions& options = {});

/// The names that load_dataset knows, file:PATH left out.
std::vector<std::string> dataset_names();

}  // namespace lockstep
