#include "lockstep/checkpoint/checkpoint.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/random.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/data/safetensors.h"
#include "tests/support/damaged.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace checkpoint_test {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr char kModel[] = "model-00001-of-00001.safetensors";
constexpr char kState[] = "state-00001-of-00001.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

class CheckpointFiles : public testing::Test {
 protected:
  void SetUp() override {
    checkpoint_.info.step = 1234;
    checkpoint_.info.epoch = 2;
    checkpoint_.info.batches = 17;
    checkpoint_.info.identity = {{"model", "mlp"}, {"world_size", "2"}};
    checkpoint_.info.settings = {{"lr", "0.1"}};
    checkpoint_.info.values = {{"early_stop.best", 0.1 + 0.2},
                               {"unset", std::numeric_limits<double>::infinity()}};
    checkpoint_.model = {{"0.weight", at::randn({3, 5})}, {"0.bias", at::randn({3})}};
    checkpoint_.state = {{"optimizer.step", at::arange(1)}, {"rank0.rng", at::arange(9)}};
    folder_ = CheckpointFolder(directory_.path()).write(checkpoint_);
  }

  std::string content(const std::string& name) { return read_file(folder_ / name); }
  void put(const std::string& name, const std::string& text) {
    fs::remove(folder_ / name);  // The disk is waited for when a file is cut and written anew.
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  void expect_damaged(const std::string& what) {
    EXPECT_THAT([&] { read_checkpoint(folder_); },
                ThrowsMessage<DamagedCheckpointError>(
                    testing::AllOf(HasSubstr(folder_.string()), HasSubstr(what))));
  }

  /// A warning names the file of the newest one.
  void expect_the_one_before(const std::string& file) {
    testing::internal::CaptureStderr();
    const auto found = CheckpointFolder(directory_.path()).read_newest();
    const std::string told = testing::internal::GetCapturedStderr();
    ASSERT_TRUE(found);
    ASSERT_EQ(found->second.info.step, 1000);
    ASSERT_THAT(told, testing::AllOf(HasSubstr(folder_.string()), HasSubstr(file)));
  }

  /// Makes it one of another version of Lockstep.
  void set_version(const fs::path& folder, int version) {
    auto document = nlohmann::json::parse(read_file(folder / "state.json"));
    document.erase("checksum");
    document["version"] = version;
    document["checksum"] = sha256_hex(document.dump());
    std::ofstream(folder / "state.json") << document.dump() << "\n";
  }

  TemporaryDirectory directory_;
  fs::path folder_;
  Checkpoint checkpoint_;
};

TEST_F(CheckpointFiles, ComeBackAsTheyWere) {
  const Checkpoint read = read_checkpoint(folder_);
  EXPECT_EQ(read.info.step, 1234);
  EXPECT_EQ(read.info.epoch, 2);
  EXPECT_EQ(read.info.batches, 17);
  EXPECT_EQ(read.info.identity, checkpoint_.info.identity);
  EXPECT_EQ(read.info.settings, checkpoint_.info.settings);
  EXPECT_EQ(read.info.values, (std::map<std::string, double>{{"early_stop.best", 0.1 + 0.2}}));
  ASSERT_EQ(read.model.size(), 2u);
  for (const auto& [name, tensor] : read.model) {
    const auto same = [&](const auto& item) { return item.first == name; };
    const auto wanted = std::find_if(checkpoint_.model.begin(), checkpoint_.model.end(), same);
    ASSERT_NE(wanted, checkpoint_.model.end()) << name;
    EXPECT_TRUE(at::equal(tensor, wanted->second)) << name;
  }
  EXPECT_EQ(read.state.size(), 2u);
}

/// What is found is named, and the one before is taken.
TEST_F(CheckpointFiles, EveryFlippedBitAndTruncationIsFound) {
  checkpoint_.info.step = 1000;
  CheckpointFolder(directory_.path()).write(checkpoint_);
  size_t corruptions = 0;
  for (const std::string name : {kModel, kState, kIndex, "state.json"}) {
    const std::string good = content(name);
    for (size_t bit = 0; bit < good.size() * 8; ++bit) {
      std::string bad = good;
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
      put(name, bad);
      ASSERT_NO_FATAL_FAILURE(expect_the_one_before(name)) << "bit " << bit;
      if (bit % 8 != 0) continue;
      put(name, good.substr(0, bit / 8));
      ASSERT_NO_FATAL_FAILURE(expect_the_one_before(name)) << "cut to " << bit / 8 << " bytes";
      ++corruptions;
    }
    corruptions += good.size() * 8;
    put(name, good);
  }
  EXPECT_GE(corruptions, 10'000u);
  EXPECT_EQ(CheckpointFolder(directory_.path()).read_newest()->second.info.step, 1234);
}

TEST_F(CheckpointFiles, RandomDamageIsFound) {
  checkpoint_.info.step = 1000;
  CheckpointFolder(directory_.path()).write(checkpoint_);
  const auto seed =
      static_cast<uint64_t>(env_int("LOCKSTEP_TEST_SEED").value_or(std::random_device{}()));
  std::printf("seed %llu (set LOCKSTEP_TEST_SEED to repeat)\n",
              static_cast<unsigned long long>(seed));
  const uint64_t rounds = env_flag("LOCKSTEP_LONG_TESTS") ? 1'000'000 : 1000;
  const std::string names[] = {kModel, kState, kIndex, "state.json"};
  const std::string goods[] = {content(names[0]), content(names[1]), content(names[2]),
                               content(names[3])};
  for (uint64_t round = 0; round < rounds; ++round) {
    KeyedRandom random(seed, round);
    const size_t file = round % 4;
    const std::string bad = damaged(goods[file], random);
    if (bad == goods[file]) continue;
    put(names[file], bad);
    ASSERT_NO_FATAL_FAILURE(expect_the_one_before(names[file])) << "round " << round;
    put(names[file], goods[file]);
  }
}

TEST_F(CheckpointFiles, MissingOrTruncatedOnesAreNamed) {
  fs::remove(folder_ / kState);
  expect_damaged(std::string(kState) + " is missing");
  fs::resize_file(folder_ / kModel, 10);
  expect_damaged(std::string(kModel) + " has 10 bytes in place of");
  put("state.json", "{");
  expect_damaged("state.json is not the description");
  fs::remove(folder_ / "state.json");
  expect_damaged("state.json is missing");
}

TEST_F(CheckpointFiles, AnotherVersionNamesBoth) {
  set_version(folder_, 5);
  EXPECT_THAT([&] { read_checkpoint(folder_); },
              ThrowsMessage<CheckpointError>(
                  HasSubstr("has version 5 of the layout; this Lockstep reads versions 3 and 4")));
  set_version(folder_, 3);
  EXPECT_EQ(read_checkpoint(folder_).info.step, 1234);
}

TEST_F(CheckpointFiles, Sha256IsWrittenWhereItIsWanted) {
  const auto files = nlohmann::json::parse(content("state.json")).at("files");
  EXPECT_EQ(files.at(kModel).at("xxh3").get<std::string>().size(), 32u);
  checkpoint_.info.step = 5;
  folder_ = CheckpointFolder(directory_.path(), 0, checkpoint_hash("sha256")).write(checkpoint_);
  const auto other = nlohmann::json::parse(content("state.json")).at("files");
  EXPECT_EQ(other.at(kModel).at("sha256"), sha256_hex(content(kModel)));
  EXPECT_FALSE(other.at(kModel).contains("xxh3"));
  EXPECT_EQ(read_checkpoint(folder_).info.step, 5);
  std::string bad = content(kState);
  bad.back() ^= 1;
  put(kState, bad);
  expect_damaged(std::string(kState) + " has the sha256");
  EXPECT_THROW(checkpoint_hash("md5"), UsageError);
}

TEST_F(CheckpointFiles, ADescriptionWithoutAnEndIsDamaged) {
  fs::remove(folder_ / "state.json");
  fs::create_symlink("/dev/zero", folder_ / "state.json");
  expect_damaged("/state.json has more than");
}

TEST(ChangedSettings, NamesWhatBothSidesHave) {
  EXPECT_EQ(changed_settings({{"lr", "0.1"}, {"decay", "0"}, {"old", "1"}},
                             {{"lr", "0.2"}, {"decay", "0"}, {"new", "1"}}),
            "lr '0.1' in the checkpoint, '0.2' in this run");
  EXPECT_EQ(changed_settings({}, {{"lr", "0.2"}}), "");
}

TEST(CheckIdentity, NamesEveryDifferenceWithBothValues) {
  EXPECT_NO_THROW(check_identity("d", {{"model", "mlp"}}, {{"model", "mlp"}, {"new", "none"}}));
  EXPECT_THAT(
      [] {
        check_identity("d", {{"model", "mlp"}, {"seed", "1"}, {"world_size", "2"}},
                       {{"model", "convnet"}, {"seed", "1"}, {"world_size", "4"}});
      },
      ThrowsMessage<CheckpointError>(
          HasSubstr("model 'mlp' in the checkpoint, 'convnet' in this run; world_size '2' in the "
                    "checkpoint, '4' in this run")));
}

}  // namespace checkpoint_test
}  // namespace lockstep
