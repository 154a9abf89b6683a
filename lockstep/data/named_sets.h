#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "lockstep/data/dataset.h"
#include "lockstep/data/mnist_files.h"

// The data sets of load_dataset by name. See there for what each takes.
namespace lockstep {

/// Makes the files of mnist, fashion-mnist and cifar10 be where load_dataset looks for them, by a
/// download where the options allow one. Throws as load_dataset does where some are missing. Does
/// nothing for other names. Starts no thread that lives on.
void fetch_dataset(const std::string& name, const DatasetOptions& options);

/// The files of a set that `find` finds. Where some are missing and the options allow a download,
/// `fill` gets them into `folder` first, on one process of this host. Throws DataError, which names
/// what is missing and what to do.
FoundFiles fetch_files(const std::string& name, const DatasetOptions& options,
                       const std::filesystem::path& folder, const std::function<FoundFiles()>& find,
                       const std::function<void(const FoundFiles&)>& fill);

/// mnist and fashion-mnist. The first gives where the files are, see fetch_dataset.
FoundFiles fetch_mnist(const MnistLike& source, const DatasetOptions& options);
DatasetSplits load_mnist(const MnistLike& source, const DatasetOptions& options);

/// Where the archive of CIFAR-10's binary version comes from.
struct Cifar10Source {
  /// As the set's own page gives it.
  std::string archive_md5 = "c32a1d4ab5d03f1284b67883e8d87530";
  std::string mirror = "https://www.cs.toronto.edu/~kriz/";
};
FoundFiles fetch_cifar10(const DatasetOptions& options, const Cifar10Source& source = {});
DatasetSplits load_cifar10(const DatasetOptions& options, const Cifar10Source& source = {});
/// The six files of CIFAR-10's binary version at or below `data_dir`.
FoundFiles find_cifar10(const std::filesystem::path& data_dir);

/// "text:PATH".
DatasetSplits load_text(const std::filesystem::path& path, const DatasetOptions& options);

/// "file:PATH". The fraction of the rows, from the end and at least one, is held out when there is
/// no test part.
DatasetSplits load_tensor_dataset(const std::filesystem::path& path, const DatasetOptions& options);

/// DatasetOptions::test_fraction of a set without a test part. Throws UsageError unless it is
/// between 0 and 1.
double test_fraction_of(const DatasetOptions& options);
/// For one that has a test part. Throws UsageError, which names the set, where the options ask for
/// a fraction.
void expect_no_test_fraction(const std::string& name, const DatasetOptions& options);

}  // namespace lockstep
