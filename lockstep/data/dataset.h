#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

struct DownloadOptions {
  /// Time to connect to the server. A live one answers within a round trip or two.
  std::chrono::seconds connect_timeout{20};
  /// A transfer that receives no byte for this long is aborted.
  std::chrono::seconds stall_timeout{30};
  /// Attempts at each address. Only failures that may pass are tried again: a lost connection, a
  /// time-out, HTTP 408, 429 and 5xx.
  int attempts = 5;
  /// The pause before the second try. It doubles from try to try (0.5 + 1 + 2 + 4 seconds).
  std::chrono::milliseconds first_pause{500};
  /// Certificates to trust instead of the system's. Empty: CURL_CA_BUNDLE, then SSL_CERT_FILE (as
  /// the curl program does), then the system's.
  std::filesystem::path ca_file = {};
};

/// Samples held in memory. Row i of `data` belongs to row i of `targets`. Both are CPU tensors
/// whose rows are contiguous. Rows may overlap, as windows over a text do. The tensors are shared
/// and never written to.
struct TensorDataset {
  std::string name;  ///< "mnist", "digits", ...: used in messages.
  /// [N, ...]; images are uint8 [N, H, W] or [N, C, H, W], tokens int64 [N, T].
  at::Tensor data;
  /// int64 [N] class indices, or [N, T] for one class per token. float32 [N, K] for regression.
  at::Tensor targets;
  int64_t num_classes = 0;  ///< 0 for regression.
  /// The name of each class. For a text: each token, in UTF-8. Empty when the classes have no
  /// names.
  std::vector<std::string> classes = {};

  int64_t size() const { return data.size(0); }
};

/// The two parts of a dataset: one to train on, and one that is held out for evaluation.
struct DatasetSplits {
  TensorDataset train;
  TensorDataset test;
};

struct DatasetOptions {
  /// The folder of the files of mnist, fashion-mnist and cifar10, and the destination of downloads.
  /// The files are in it directly, or in a subfolder named after the set. Empty: LOCKSTEP_DATA_DIR,
  /// else "data".
  std::filesystem::path data_dir = {};
  /// mnist, fashion-mnist: the content of files that the program has already unpacked. The key is
  /// `dataset_folder(name, options) / FILE`, spelled exactly so. Other keys are ignored. Images and
  /// labels are taken from here instead of the file. The file itself must still exist with this
  /// content, because it tells which of the two sets this is. The content must outlive the dataset,
  /// which refers to it and does not change it.
  std::map<std::filesystem::path, std::span<const std::byte>> unpacked = {};
  /// Download files that are missing, from the base URL in LOCKSTEP_MNIST_URL,
  /// LOCKSTEP_FASHION_MNIST_URL or LOCKSTEP_CIFAR10_URL, else from the public mirrors. Off by
  /// default, because a job must not use the network unasked.
  bool download = false;
  /// The seed of digits and random. It is separate from the seeds of the model and of shuffling, so
  /// that runs with different seeds use the same data.
  uint64_t data_seed = 0;
  /// digits: the number of samples. The default is enough for the mlp to reach 97% in a few
  /// seconds.
  int64_t digits_train = 10000;
  int64_t digits_test = 2000;
  /// random: the number of samples; 2048 as in PyTorch's DDP tutorials. The held-out part continues
  /// the same random stream.
  int64_t random_train = 2048;
  int64_t random_test = 256;
  /// file, text, folder: the fraction that is held out, from the end, when there is no test part.
  /// Unset: 0.1. With a test part, and for the other sets, it must be unset.
  std::optional<double> test_fraction = {};
  /// text: tokens per sample. It should equal the model's context length.
  int64_t context = 128;
  /// text: tokens from the start of one sample to the start of the next. 0: `context`, so that an
  /// epoch predicts each token once. 1: every window, as in minGPT; this needs no more memory.
  int64_t stride = 0;
  /// folder: height and width of the images. 224 is the usual size for ImageNet models. An image's
  /// shorter side is resized to 8/7 of it, as in torchvision's recipes, then the centre is cropped.
  int64_t image_size = 224;
  /// folder: `image_size` of the training part, if random_crop will crop it further. 0: the same.
  int64_t train_image_size = 0;
  /// Time-outs and attempts of the download.
  DownloadOptions transfer = {};
};

/// Loads a dataset by name:
///  - mnist, fashion-mnist: the four IDX files, plain or gzip. They lie in `data_dir` itself, in
///    `data_dir`/mnist (fashion-mnist) or in torchvision's `data_dir`/MNIST/raw (FashionMNIST/raw).
///    uint8 [60000, 28, 28] and [10000, 28, 28], 10 classes.
///  - cifar10: the six files of the binary version, in `data_dir` itself, in cifar-10-batches-bin,
///    or in cifar10/cifar-10-batches-bin. uint8 [50000, 3, 32, 32] and [10000, 3, 32, 32], 10
///    classes. The program tar unpacks a downloaded archive.
///  - digits: generated images; the same seed gives the same images on every machine. uint8 [N, 28,
///    28].
///  - random: the regression set of PyTorch's DDP tutorials, data [2048, 20] and targets [2048, 1],
///    uniform in [0, 1). Right after torch.manual_seed(data_seed) Python gives the same numbers:
///    `[(torch.rand(20), torch.rand(1)) for _ in range(2048)]`.
///  - file:PATH: a .safetensors or .npz file, or a folder of .npy files. Its tensors are named
///    data/targets, x/y or images/labels. A test part is named test_data/test_targets or
///    x_test/y_test and so on. Integer targets are classes, others are for regression.
///  - text:PATH: any file as a sequence of characters, for models that predict the next one. As in
///    nanoGPT, tokens are the file's distinct code points, numbered in sorted order. Data [N, T]
///    are windows of `context` tokens. Targets [N, T] are the same windows, shifted by one token.
///    The last `test_fraction` of the text is held out. A file that is not UTF-8 is read byte by
///    byte, with a warning.
///  - folder:PATH: images in the layout of torchvision's ImageFolder: one folder per class, with
///    JPEG and PNG files. If PATH has a folder `train`, that is the training part, and `val`, else
///    `test`, is held out. Otherwise the last `test_fraction` of each class is held out. An image's
///    shorter side is resized (bilinear, with antialias), then the centre is cropped: uint8 [N, 3,
///    S, S], where S is `image_size`. All images are in memory: see open_dataset for more images
///    than fit there.
///
/// Blocks on disk and, with `download`, on the network. No group is needed: of several processes on
/// one host, one downloads and the others wait for it. Throws UsageError for an unknown name, and
/// suggests the nearest one. Throws DataError for files that are missing, truncated, damaged, of
/// another format, or that do not belong together. The error names the file, the offset and what
/// was expected.
DatasetSplits load_dataset(const std::string& name, const DatasetOptions& options = {});

/// The folder in which load_dataset would find all files of mnist or fashion-mnist with these
/// options. Empty when it would have to download some. Throws UsageError for any other dataset.
std::optional<std::filesystem::path> dataset_folder(const std::string& name,
                                                    const DatasetOptions& options = {});

/// The names that load_dataset knows, without those that take a path (path_dataset_names).
std::vector<std::string> dataset_names();
/// "file:PATH" and the like.
std::vector<std::string> path_dataset_names();
/// Throws UsageError unless load_dataset knows the name; it does not look for files. `flag` is
/// named in the message: "--dataset".
void check_dataset_name(const std::string& flag, const std::string& name);

/// Shape and dtype of one sample, without the batch dimension.
struct SampleSpec {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;

  /// The spec of one row of a tensor [rows, shape...].
  static SampleSpec of_rows(const at::Tensor& rows);
  int64_t numel() const;
  /// [rows, shape...].
  std::vector<int64_t> batch_shape(int64_t rows) const;
  /// A new CPU tensor [rows, shape...], whose elements are not set.
  at::Tensor empty_batch(int64_t rows, bool pinned = false) const;
  /// "float32 [1, 28, 28]".
  std::string describe() const;
  bool operator==(const SampleSpec&) const = default;
};

/// Where a loader takes samples from. A loader gives each of its threads a clone, so `read` needs
/// no lock.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  virtual std::string name() const = 0;
  virtual int64_t size() const = 0;
  virtual SampleSpec data_spec() const = 0;
  virtual SampleSpec target_spec() const = 0;
  /// As in TensorDataset: 0 for regression, or when it is not known.
  virtual int64_t num_classes() const { return 0; }
  virtual std::vector<std::string> classes() const { return {}; }
  virtual std::unique_ptr<SampleSource> clone() const = 0;

  /// Writes the samples of `indices` into `data` [n, ...] and `target` [n, ...], contiguous CPU
  /// tensors of the specs above.
  virtual void read(std::span<const int64_t> indices, const at::Tensor& data,
                    const at::Tensor& target) = 0;
};

/// Reads all samples of a source into memory. If the source does not know `num_classes`, it becomes
/// the largest target plus 1 for int64 targets [N], else 0.
TensorDataset read_all(SampleSource& source);

/// A TensorDataset as a source. It shares the tensors. Throws DataError unless they are CPU tensors
/// with contiguous rows and one target per sample.
std::unique_ptr<SampleSource> tensor_source(TensorDataset dataset);

/// A dataset's two parts as sources, which need not be in memory.
struct DatasetSources {
  std::unique_ptr<SampleSource> train;
  std::unique_ptr<SampleSource> test;
};

/// Like load_dataset, but the images of folder:PATH are not kept in memory: the loader's threads
/// decode them when a batch needs them. All other datasets are in memory. Takes the same names and
/// throws the same errors as load_dataset.
DatasetSources open_dataset(const std::string& name, const DatasetOptions& options = {});

}  // namespace lockstep
