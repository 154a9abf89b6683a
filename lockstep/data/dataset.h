#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

struct DownloadOptions {
  /// To reach the server: a live one answers within a round trip or two.
  std::chrono::seconds connect_timeout{20};
  /// A transfer without a byte for this long is given up and resumed by the next attempt.
  std::chrono::milliseconds stall_timeout{30'000};
  /// Tries at each address, for failures that may pass: a lost connection, a time-out, HTTP 408,
  /// 429 and 5xx.
  int attempts = 5;
  /// The pause before the second try. It doubles from try to try (0.5 + 1 + 2 + 4 seconds).
  std::chrono::milliseconds first_pause{500};
  /// Certificates to trust in place of the system's. Empty: CURL_CA_BUNDLE, then SSL_CERT_FILE (as
  /// the program curl has it), then the system's.
  std::filesystem::path ca_file = {};
};

/// Samples held in memory. Row i of `data` belongs to row i of `targets`. Both are CPU tensors
/// whose rows are contiguous. Rows may overlap, as windows over a text do. They are shared, never
/// written to.
struct TensorDataset {
  std::string name;  ///< "mnist", "digits", ...: used in messages.
  /// [N, ...]; images are uint8 [N, H, W] or [N, C, H, W], tokens int64 [N, T].
  at::Tensor data;
  /// int64 [N] class indices, or [N, T] for a class a token. float32 [N, K] for regression.
  at::Tensor targets;
  int64_t num_classes = 0;  ///< 0 for regression.
  /// What each class is called. For a text each token, in UTF-8. Empty where nobody has named them.
  std::vector<std::string> classes = {};

  int64_t size() const { return data.size(0); }
};

/// What training needs of a dataset: a part to learn from and a held-out part.
struct DatasetSplits {
  TensorDataset train;
  TensorDataset test;
};

struct DatasetOptions {
  /// Where the files of mnist, fashion-mnist and cifar10 lie, directly or in a folder of the set's
  /// name, and where they are downloaded to. Empty: LOCKSTEP_DATA_DIR, else "data", as most
  /// programs have it.
  std::filesystem::path data_dir = {};
  /// mnist, fashion-mnist: the content of files, for whoever has unpacked them already. The key is
  /// `dataset_folder(name, options) / FILE`, spelled as this gives it; others are not looked at.
  /// The images and labels are taken from here in place of the file. That must be there all the
  /// same, and hold this: by it a set is told from the other one. The content must outlive the
  /// data set, which lies in it and does not change it.
  std::map<std::filesystem::path, std::span<const std::byte>> unpacked = {};
  /// Fetch what is missing. Off, because a job must not reach out to the network unasked.
  bool download = false;
  /// A base URL to fetch from in place of the public mirrors. Empty: LOCKSTEP_MNIST_URL,
  /// LOCKSTEP_FASHION_MNIST_URL or LOCKSTEP_CIFAR10_URL, else the public ones.
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
  /// file, text: the share from the end that is held out when there is no test part.
  double test_fraction = 0.1;
  /// text: tokens of a sample, which are to be as many as the model looks back on.
  int64_t context = 128;
  /// text: tokens from the start of a sample to that of the next. 0: `context`, so that an epoch
  /// predicts each token once. 1: every window, as minGPT has it. That takes no more memory.
  int64_t stride = 0;
  /// folder: height and width of the images. 224: what ImageNet's models are made for.
  int64_t image_size = 224;
  /// folder: an image's shorter side is scaled to this, and the middle cut out. 0: 8/7 of
  /// `image_size`, as torchvision's recipes (256 for 224).
  int64_t image_resize = 0;
  /// folder: `image_size` of the training part, where random_crop is to cut further. 0: the same.
  int64_t train_image_size = 0;
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
///  - cifar10: the binary version's six files, in `data_dir` itself or in its cifar-10-batches-bin,
///    also below cifar10. uint8 [50000, 3, 32, 32] and [10000, 3, 32, 32], 10 classes.
///  - digits: made up on the spot, the same for the same seed everywhere. uint8 [N, 28, 28].
///  - random: the regression set of PyTorch's DDP tutorials, data [2048, 20] and targets [2048, 1],
///    uniform in [0, 1). Right after torch.manual_seed(data_seed) Python gives the same numbers:
///    `[(torch.rand(20), torch.rand(1)) for _ in range(2048)]`.
///  - file:PATH: a .safetensors or .npz file, or a folder of .npy files. Its tensors are named
///    data/targets, x/y or images/labels. A test part is named test_data/test_targets or
///    x_test/y_test and so on. Whole-numbered targets are classes, others regression.
///  - text:PATH: any file as a sequence of characters, for models that predict the next one. Tokens
///    are numbered by the order of the code points that the whole file has, as nanoGPT does.
///    Samples are windows of `context` tokens, data [N, T], and the same one token further on,
///    targets [N, T]. The last `test_fraction` of the text is held out. A file that is no UTF-8 is
///    taken byte by byte, with a warning.
///
///  - folder:PATH: images as torchvision's ImageFolder has them: a folder for each class, with JPEG
///    and PNG files. Where PATH has a folder train, that is learned from, and val, else test, is
///    held out. Otherwise the last `test_fraction` of each class is held out. An image's shorter
///    side is scaled (bilinear, with antialias), then the middle cut out: uint8 [N, 3, S, S] with S
///    of `image_size`. All of them are in memory: see open_dataset for more images than fit there.
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

/// The names that load_dataset knows, those with a path (path_dataset_names) left out.
std::vector<std::string> dataset_names();
/// "file:PATH" and the like.
std::vector<std::string> path_dataset_names();
/// Throws UsageError unless load_dataset knows the name; it does not look for files. `flag` is for
/// the message: "--dataset".
void check_dataset_name(const std::string& flag, const std::string& name);

}  // namespace lockstep
