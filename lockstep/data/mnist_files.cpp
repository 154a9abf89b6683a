#include "lockstep/data/mnist_files.h"

#include "lockstep/base/env.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

FoundFiles files_in(const fs::path& folder, const std::vector<std::string>& names,
                    const std::string& packed) {
  FoundFiles found;
  found.folder = folder;
  for (const std::string& name : names) {
    fs::path& path = found.paths.emplace_back();
    std::error_code ignored;
    for (const fs::path& candidate : {folder / name, folder / (name + packed)}) {
      if (path.empty() && fs::exists(candidate, ignored)) path = candidate;
    }
    if (path.empty()) found.missing.push_back(packed.empty() ? name : name + "[" + packed + "]");
  }
  return found;
}

}  // namespace

FoundFiles find_files(const std::vector<fs::path>& folders, const std::vector<std::string>& names,
                      const std::string& packed) {
  FoundFiles best = files_in(folders.front(), names, packed);
  for (const fs::path& folder : folders) {
    FoundFiles found = files_in(folder, names, packed);
    if (found.missing.size() < best.missing.size()) best = std::move(found);
  }
  best.looked_in = folders;
  return best;
}

FoundFiles find_mnist(const fs::path& data_dir, const MnistLike& source) {
  std::vector<fs::path> folders;
  for (const fs::path& folder : source.folders) folders.push_back(data_dir / folder);
  folders.push_back(data_dir);
  std::vector<std::string> names;
  for (const MnistFile& file : source.files) names.push_back(file.name);
  return find_files(folders, names, ".gz");
}

fs::path data_dir_or_default(const fs::path& given) {
  return given.empty() ? fs::path(env_string("LOCKSTEP_DATA_DIR").value_or("data")) : given;
}

const MnistLike* mnist_like(const std::string& name) {
  for (const MnistLike* source : {&mnist_source(), &fashion_mnist_source()}) {
    if (source->name == name) return source;
  }
  return nullptr;
}

const MnistLike& mnist_source() {
  static const MnistLike source{
      .name = "mnist",
      .folders = {"mnist", "MNIST/raw"},
      .files = {{{"train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"},
                 {"train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"},
                 {"t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"},
                 {"t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"}}},
      .first_test_labels = {7, 2, 1, 0, 4, 1, 4, 9},
      .mirror_variable = "LOCKSTEP_MNIST_URL",
      .mirrors = {"https://ossci-datasets.s3.amazonaws.com/mnist/"}};
  return source;
}

const MnistLike& fashion_mnist_source() {
  static const MnistLike source{
      .name = "fashion-mnist",
      .folders = {"fashion-mnist", "FashionMNIST/raw"},
      .files = {{{"train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"},
                 {"train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe"},
                 {"t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79"},
                 {"t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310"}}},
      .first_test_labels = {9, 2, 1, 1, 6, 1, 4, 6},
      .mirror_variable = "LOCKSTEP_FASHION_MNIST_URL",
      .mirrors = {
          "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
          "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"}};
  return source;
}

}  // namespace lockstep
