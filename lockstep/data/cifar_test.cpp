#include "lockstep/data/named_sets.h"

#include <httplib.h>

#include <algorithm>
#include <thread>

#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "tests/support/test_files.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace cifar_test {

namespace fs = std::filesystem;
using test_files::complaint;
using testing::AllOf;
using testing::HasSubstr;

/// `count` images of a file of the set: labels and pixels differ from image to image.
std::string records(int64_t count, int first) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    bytes += static_cast<char>((first + i) % 10);
    for (int64_t k = 0; k < 3072; ++k) bytes += static_cast<char>(first + 7 * i + k % 251);
  }
  return bytes;
}

std::vector<std::pair<std::string, std::string>> small_set() {
  std::vector<std::pair<std::string, std::string>> files;
  for (int i = 1; i <= 5; ++i) {
    files.emplace_back("data_batch_" + std::to_string(i) + ".bin", records(2, 10 * i));
  }
  files.emplace_back("test_batch.bin", records(3, 100));
  return files;
}

void write_set(const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& [name, content] : small_set()) test_files::write(folder / name, content);
}

/// The packed archive of these files in the set's folder.
std::string archive_of(const std::vector<std::pair<std::string, std::string>>& files) {
  const TemporaryDirectory folder;
  fs::create_directories(folder.path() / "cifar-10-batches-bin");
  for (const auto& [name, content] : files)
    test_files::write(folder.path() / "cifar-10-batches-bin" / name, content);
  const fs::path archive = folder.path() / "a.tar.gz";
  const std::string command =
      "tar -czf " + archive.string() + " -C " + folder.path().string() + " cifar-10-batches-bin";
  EXPECT_EQ(std::system(command.c_str()), 0);
  return read_file(archive);
}

TEST(Cifar10, ReadsLabelsAndPlanesInTheirOrder) {
  for (const std::string below :
       {"", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"}) {
    SCOPED_TRACE(below);
    const TemporaryDirectory folder;
    write_set(folder.path() / below);
    const DatasetSplits splits = load_dataset("cifar10", {.data_dir = folder.path()});
    ASSERT_EQ(splits.train.data.sizes(), at::IntArrayRef({10, 3, 32, 32}));
    ASSERT_EQ(splits.test.data.sizes(), at::IntArrayRef({3, 3, 32, 32}));
    EXPECT_EQ(splits.train.num_classes, 10);
    EXPECT_EQ(splits.train.classes.at(3), "cat");
    EXPECT_EQ(splits.train.targets[3].item<int64_t>(), 1);  // the second of data_batch_2
    const auto pixel = [](int first, int64_t i, int64_t k) {
      return static_cast<uint8_t>(first + 7 * i + k % 251);
    };
    EXPECT_EQ(splits.train.data[3][2][31][5].item<uint8_t>(), pixel(20, 1, 2 * 1024 + 31 * 32 + 5));
    EXPECT_EQ(splits.test.data[2][1][0][9].item<uint8_t>(), pixel(100, 2, 1024 + 9));
    EXPECT_TRUE(fs::equivalent(*dataset_folder("cifar10", {.data_dir = folder.path()}),
                               folder.path() / below));
  }
}

TEST(Cifar10, WhatIsMissingIsNamed) {
  const TemporaryDirectory folder;
  const DatasetOptions options{.data_dir = folder.path()};
  EXPECT_THAT(complaint<DataError>([&] { load_dataset("cifar10", options); }),
              AllOf(HasSubstr("cifar10 not found"), HasSubstr("--download fetches it")));
  write_set(folder.path());
  fs::remove(folder.path() / "data_batch_4.bin");
  EXPECT_THAT(complaint<DataError>([&] { load_dataset("cifar10", options); }),
              HasSubstr("lacks data_batch_4.bin"));
}

TEST(Cifar10, DamagedFilesAreNamed) {
  const TemporaryDirectory folder;
  const DatasetOptions options{.data_dir = folder.path()};
  write_set(folder.path());
  std::string wrong = records(2, 0);
  wrong[3073] = 10;
  test_files::write(folder.path() / "data_batch_2.bin", wrong);
  EXPECT_THAT(complaint<DataError>([&] { load_dataset("cifar10", options); }),
              HasSubstr("data_batch_2.bin has the label 10"));
  wrong.pop_back();
  test_files::write(folder.path() / "data_batch_2.bin", wrong);
  EXPECT_THAT(complaint<DataError>([&] { load_dataset("cifar10", options); }),
              HasSubstr("6,145 bytes; expected images of 3,073 bytes each"));
}

class Cifar10Download : public ::testing::Test {
 protected:
  void serve(const std::string& archive) {
    server_.Get("/cifar-10-binary.tar.gz",
                [archive](const httplib::Request&, httplib::Response& to) {
                  to.set_content(archive, "application/gzip");
                });
    const int port = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    test_wait::wait_until([&] { return server_.is_running(); }, "the server to answer");
    options_.data_dir = folder_.path() / "new";
    options_.download = true;
    ::setenv("LOCKSTEP_CIFAR10_URL", ("http://127.0.0.1:" + std::to_string(port)).c_str(), 1);
    options_.transfer.attempts = 1;
  }
  ~Cifar10Download() override {
    server_.stop();
    if (thread_.joinable()) thread_.join();
    ::unsetenv("LOCKSTEP_CIFAR10_URL");
  }
  /// What lies in the data folder, in order.
  std::vector<std::string> found() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(options_.data_dir)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  TemporaryDirectory folder_;
  DatasetOptions options_;
  httplib::Server server_;
  std::thread thread_;
};

TEST_F(Cifar10Download, FetchesVerifiesAndUnpacks) {
  const std::string archive = archive_of(small_set());
  serve(archive);
  const DatasetSplits splits = load_cifar10(options_, {.archive_md5 = md5_hex(archive)});
  EXPECT_EQ(splits.train.size(), 10);
  EXPECT_THAT(found(), testing::ElementsAre("cifar-10-batches-bin", "cifar-10-binary.tar.gz"));
  server_.stop();
  EXPECT_EQ(load_cifar10(options_).test.size(), 3) << "what is there is not fetched again";
}

TEST_F(Cifar10Download, AnotherChecksumIsRefusedAndNothingIsUnpacked) {
  serve(archive_of(small_set()));
  EXPECT_THAT(complaint<DataError>([&] { load_cifar10(options_); }),
              HasSubstr("expected c32a1d4ab5d03f1284b67883e8d87530"));
  EXPECT_FALSE(fs::exists(options_.data_dir / "cifar-10-batches-bin"));
}

TEST_F(Cifar10Download, AnArchiveThatLacksAFileLeavesNoFolder) {
  auto files = small_set();
  files.erase(files.begin() + 2);
  const std::string archive = archive_of(files);
  serve(archive);
  EXPECT_THAT(
      complaint<DataError>([&] { load_cifar10(options_, {.archive_md5 = md5_hex(archive)}); }),
      HasSubstr("lacks data_batch_3.bin"));
  EXPECT_THAT(found(), testing::ElementsAre("cifar-10-binary.tar.gz"));
}

TEST_F(Cifar10Download, ADamagedArchiveLeavesNoFolder) {
  std::string archive = archive_of(small_set());
  archive.resize(archive.size() / 2);
  serve(archive);
  EXPECT_THAT(
      complaint<DataError>([&] { load_cifar10(options_, {.archive_md5 = md5_hex(archive)}); }),
      HasSubstr("tar failed"));
  EXPECT_THAT(found(), testing::ElementsAre("cifar-10-binary.tar.gz"));
}

}  // namespace cifar_test
}  // namespace lockstep
