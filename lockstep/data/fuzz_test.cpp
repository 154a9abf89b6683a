// Random damage to small files of each format: a reader gives tensors or throws DataError, and
// never crashes, hangs or asks for memory that the file could not fill.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <sys/resource.h>

#include <functional>
#include <map>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"
#include "lockstep/base/random.h"
#include "lockstep/data/idx.h"
#include "lockstep/data/npy.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/data/tensor_reader.h"
#include "lockstep/data/zip.h"
#include "tests/support/damaged.h"
#include "tests/support/test_files.h"

namespace lockstep {
namespace fuzz_test {

namespace fs = std::filesystem;

class Fuzz : public testing::Test {
 protected:
  Fuzz()
      : seed_(
            static_cast<uint64_t>(env_int("LOCKSTEP_TEST_SEED").value_or(std::random_device{}()))) {
    std::printf("seed %llu (set LOCKSTEP_TEST_SEED to repeat)\n",
                static_cast<unsigned long long>(seed_));
  }

  void run(const std::string& whole, const std::function<void(const fs::path&)>& load) {
    const TemporaryDirectory folder;
    const fs::path path = folder.path() / "x";
    test_files::write(path, whole);
    ASSERT_NO_THROW(load(path));
    int refused = 0;
    constexpr uint64_t kRounds = 1500;
    for (uint64_t round = 0; round < kRounds; ++round) {
      KeyedRandom random(seed_, round);
      test_files::write(path, damaged(whole, random));
      try {
        load(path);
      } catch (const DataError& error) {
        ++refused;
        ASSERT_THAT(error.what(), testing::HasSubstr(path.string())) << "round " << round;
      } catch (const std::exception& error) {
        FAIL() << "round " << round << ": " << error.what();
      }
    }
    EXPECT_GT(refused, static_cast<int>(kRounds / 4)) << "most damage shows";
    struct rusage usage {};
    ::getrusage(RUSAGE_SELF, &usage);
    EXPECT_LT(usage.ru_maxrss, 2'000'000) << "KB; deflate's bound lets a file of 1 KB ask for 1 MB";
  }

  uint64_t seed_;
};

void load_idx_file(const fs::path& path) {
  load_idx(path);
}
void load_npy_file(const fs::path& path) {
  load_npy(path);
}
void load_npz_file(const fs::path& path) {
  load_npz(path);
}
void load_safetensors_file(const fs::path& path) {
  load_safetensors(path);
}

const std::string kNpyHeader = "{'descr': '<f4', 'fortran_order': True, 'shape': (5, 4), }";

TEST_F(Fuzz, Idx) {
  run(test_files::idx(8, {5, 4, 3}, std::string(60, 'x')), load_idx_file);
}

TEST_F(Fuzz, IdxGzip) {
  run(test_files::deflated(test_files::idx(8, {5, 4, 3}, std::string(60, 'x'))), load_idx_file);
}

TEST_F(Fuzz, Npy) {
  run(test_files::npy(kNpyHeader, std::string(80, 'x')), load_npy_file);
}

TEST_F(Fuzz, Npz) {
  const std::string array = test_files::npy(kNpyHeader, std::string(80, 'x'));
  run(test_files::zip({{"x.npy", array, true}, {"y.npy", array, false}}), load_npz_file);
}

TEST_F(Fuzz, Safetensors) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / "whole";
  save_safetensors(path,
                   {{"weight", at::ones({3, 4})},
                    {"bias", at::arange(3, at::kHalf)},
                    {"flags", at::ones({5}, at::kBool)},
                    {"empty", at::ones({0, 7})}},
                   {{"format", "pt"}});
  run(read_file(path), load_safetensors_file);
}

StateDict some_tensors() {
  const at::Tensor tied = at::ones({3, 4});
  return {{"weight", tied},
          {"again", tied},
          {"bias", at::arange(3, at::kHalf)},
          {"empty", at::ones({0, 7})}};
}

TEST_F(Fuzz, Pt) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / "whole";
  save_pt(path, some_tensors());
  run(read_file(path), [](const fs::path& file) { load_pt(file); });
}

TEST_F(Fuzz, ThePickleOfAPt) {
  const TemporaryDirectory folder;
  const fs::path path = folder.path() / "whole";
  save_pt(path, some_tensors());
  const ZipArchive archive(path);
  std::map<std::string, std::string> contents;
  for (const ZipMember& member : archive.members()) {
    contents[member.name].resize(member.size);
    ContentReader(path, archive.place_of(member))
        .read_exact(contents[member.name].data(), member.size, "a member");
  }
  // The damage is not found by the archive's checksums.
  run(contents.at("archive/data.pkl"), [&](const fs::path& file) {
    std::vector<test_files::ZipEntry> entries;
    for (const auto& [name, content] : contents) {
      entries.push_back({name, name == "archive/data.pkl" ? read_file(file) : content, false});
    }
    const fs::path damaged_file = file.string() + ".pt";
    test_files::write(damaged_file, test_files::zip(entries));
    load_pt(damaged_file);
  });
}

}  // namespace fuzz_test
}  // namespace lockstep
