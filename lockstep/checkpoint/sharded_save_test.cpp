#include "lockstep/checkpoint/sharded_save.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace sharded_save_test {

using test::run_group;

at::Tensor numbers(const std::vector<int64_t>& sizes, double first = 0) {
  return at::arange(first, first + static_cast<double>(c10::multiply_integers(sizes)), at::kFloat)
      .reshape(sizes);
}

/// Three tensors that all ranks have, one cut over the ranks by its elements, and a number of each.
CheckpointShards shards_of(const ProcessGroup& group, int64_t step, double add = 0) {
  CheckpointShards shards;
  shards.info.step = step;
  shards.model = whole_shards({{"a", numbers({64, 8}, add)},
                               {"b", numbers({32, 8}, 1 + add)},
                               {"c", numbers({5}, 2 + add)}});
  const at::Tensor cut = numbers({10, 7}, 3 + add);
  const int64_t begin = cut.numel() * group.rank() / group.size();
  const int64_t end = cut.numel() * (group.rank() + 1) / group.size();
  shards.state =
      shards_of_range("optimizer.m.0", cut, begin, cut.reshape({-1}).narrow(0, begin, end - begin));
  shards.state.push_back(
      whole_shards({{"rank" + std::to_string(group.rank()) + ".x", at::full({1}, group.rank())}})
          .front());
  return shards;
}

void expect_whole(const Checkpoint& read, int ranks, double add = 0) {
  const std::map<std::string, at::Tensor> model(read.model.begin(), read.model.end());
  const std::map<std::string, at::Tensor> state(read.state.begin(), read.state.end());
  EXPECT_TRUE(at::equal(model.at("a"), numbers({64, 8}, add)));
  EXPECT_TRUE(at::equal(model.at("b"), numbers({32, 8}, 1 + add)));
  EXPECT_TRUE(at::equal(model.at("c"), numbers({5}, 2 + add)));
  EXPECT_TRUE(at::equal(state.at("optimizer.m.0"), numbers({10, 7}, 3 + add)));
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_EQ(state.at("rank" + std::to_string(rank) + ".x").item<int>(), rank);
  EXPECT_EQ(read.info.ranks, ranks);
}

uint64_t bytes_of_rank_files(const fs::path& folder, const std::string& start) {
  uint64_t largest = 0, all = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.path().filename().string().starts_with(start)) continue;
    largest = std::max<uint64_t>(largest, entry.file_size());
    all += entry.file_size();
  }
  return all == 0 ? 0 : largest * 100 / all;
}

TEST(ShardedSave, AnyRanksTogetherWriteWhatOneReads) {
  for (const int ranks : {1, 2, 3}) {
    TemporaryDirectory temporary;
    run_group(ranks, [&](const ProcessGroup& group) {
      CheckpointFolder folder(temporary.path());
      save_checkpoint(group, folder, shards_of(group, 4));
    });
    expect_whole(read_checkpoint(temporary.path() / "latest"), ranks);
    if (ranks == 2) {
      EXPECT_LT(bytes_of_rank_files(temporary.path() / "latest", "model-"), 80u)
          << "replicated tensors are shared out";
    }
  }
}

/// Ranks 0 and 2 have the same boxes, and so have ranks 1 and 3.
TEST(ShardedSave, ReplicasShareOutTheBoxesThatTheyHaveAlike) {
  TemporaryDirectory temporary;
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  const at::Tensor whole = numbers({10, 7});
  const auto boxes_of_rank = [&](int rank, const std::string& name, double add) {
    const int64_t begin = rank % 2 == 0 ? 0 : 33;
    const int64_t count = rank % 2 == 0 ? 33 : 37;
    return shards_of_range(name, whole, begin, (whole + add).reshape({-1}).narrow(0, begin, count));
  };
  run_group(4, [&](const ProcessGroup& group) {
    CheckpointShards shards;
    for (double add = 0; const std::string& name : names) {
      for (TensorShard& shard : boxes_of_rank(group.rank(), name, add))
        shards.model.push_back(std::move(shard));
      add += 100;
    }
    int64_t own_bytes = 0;
    for (const at::Tensor* tensor : detail::ShardedSave(group, shards).tensors())
      own_bytes += static_cast<int64_t>(tensor->nbytes());
    const auto all = nlohmann::json(group.all_gather_object(own_bytes)).get<std::vector<int64_t>>();
    const auto tensor_bytes = static_cast<int64_t>(whole.nbytes());
    EXPECT_EQ(all[0] + all[2], 33 * 4 * 4) << "each box is written once";
    EXPECT_EQ(all[1] + all[3], 37 * 4 * 4);
    for (const int64_t bytes : all) EXPECT_NEAR(bytes, tensor_bytes, tensor_bytes / 4);
    CheckpointFolder folder(temporary.path());
    save_checkpoint(group, folder, shards);
  });
  const Checkpoint read = read_checkpoint(temporary.path() / "latest");
  ASSERT_EQ(read.model.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i)
    EXPECT_TRUE(at::equal(read.model[i].second, whole + 100.0 * static_cast<double>(i)));
}

/// They begin alike, and one of them is wrong.
TEST(ShardedSave, BoxesOfOtherSizesAreNotTheSame) {
  TemporaryDirectory temporary;
  run_group(2, [&](const ProcessGroup& group) {
    CheckpointFolder folder(temporary.path());
    const at::Tensor whole = numbers({8});
    CheckpointShards shards;
    shards.model = shards_of_range("a", whole, 0, whole.narrow(0, 0, group.rank() == 0 ? 8 : 4));
    EXPECT_THROW(save_checkpoint(group, folder, shards), CheckpointError);
  });
}

TEST(ShardedSave, ReadsWhatIsWantedOnly) {
  TemporaryDirectory temporary;
  run_group(3, [&](const ProcessGroup& group) {
    CheckpointFolder folder(temporary.path());
    save_checkpoint(group, folder, shards_of(group, 4));
  });
  const at::Tensor whole = numbers({10, 7}, 3);
  for (int64_t begin = 0; begin < 70; begin += 9) {
    const StoredCheckpoint stored = open_checkpoint(temporary.path() / "latest");
    const int64_t count = std::min<int64_t>(17, 70 - begin);
    const auto boxes = boxes_of_range(whole, begin, count);
    const StateDict read = read_tensors(stored, stored.state, "optimizer.",
                                        [&](const std::string&) { return &boxes; });
    ASSERT_EQ(read.size(), 1u);
    EXPECT_EQ(read.front().first, "m.0");
    EXPECT_TRUE(at::equal(read.front().second.reshape({-1}).narrow(0, begin, count),
                          whole.reshape({-1}).narrow(0, begin, count)));
    EXPECT_EQ(*stored.bytes_read, count * 4);
  }
}

TEST(ShardedSave, AllLearnOfTheDamageThatOneFinds) {
  TemporaryDirectory temporary;
  run_group(2, [&](const ProcessGroup& group) {
    CheckpointFolder folder(temporary.path());
    save_checkpoint(group, folder, shards_of(group, 1));
    save_checkpoint(group, folder, shards_of(group, 2, 100));
    group.barrier();
    if (group.rank() == 0) {
      for (const auto& entry : fs::directory_iterator(temporary.path() / "step-00000002")) {
        if (entry.path().filename() == "state-00002-of-00006.safetensors" ||
            entry.path().filename() == "model-00002-of-00002.safetensors") {
          std::string bytes = read_file(entry.path());
          bytes.back() ^= 1;
          write_file_atomically(entry.path(), bytes);
        }
      }
    }
    group.barrier();
    const auto found = load_checkpoint(group, "auto", &folder, {}, c10::kCPU);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->info.step, 1);
    EXPECT_THROW(load_checkpoint(group, (temporary.path() / "step-00000002").string(), nullptr, {},
                                 c10::kCPU),
                 DamagedCheckpointError);
    EXPECT_THROW(load_checkpoint(group, "auto", &folder, {{"model", "other"}}, c10::kCPU),
                 CheckpointError);
  });
}

TEST(ShardedSave, WhatDoesNotMakeUpATensorIsRefusedOnAllRanks) {
  TemporaryDirectory temporary;
  run_group(2, [&](const ProcessGroup& group) {
    CheckpointFolder folder(temporary.path());
    CheckpointShards shards = shards_of(group, 1);
    if (group.rank() == 1) shards.state.clear();
    EXPECT_THROW(save_checkpoint(group, folder, shards), CheckpointError);
    EXPECT_TRUE(folder.list().empty());
  });
}

TEST(CheckpointWriter, WritesWhatTheTensorsWereWhenItWasCalled) {
  TemporaryDirectory temporary;
  run_group(2, [&](const ProcessGroup& group) {
    CheckpointWriter writer(group, CheckpointFolder(temporary.path()));
    for (int64_t step = 1; step <= 3; ++step) {
      CheckpointShards shards = shards_of(group, step, static_cast<double>(step));
      EXPECT_TRUE(writer.save(shards));
      for (TensorShard& shard : shards.model) shard.values.fill_(-1);
      for (TensorShard& shard : shards.state) shard.values.fill_(-1);
    }
    writer.finish();
  });
  for (int64_t step = 1; step <= 3; ++step)
    expect_whole(read_checkpoint(temporary.path() / checkpoint_name(step)), 2,
                 static_cast<double>(step));
}

TEST(CheckpointWriter, AFailedSaveIsToldAndTheNextOneGoesOn) {
  TemporaryDirectory temporary;
  run_group(2, [&](const ProcessGroup& group) {
    const fs::path path = temporary.path() / "run";
    CheckpointWriter writer(group, CheckpointFolder(path));
    // No lock can be made where this link is.
    if (group.rank() == 0) {
      fs::create_directories(path);
      fs::create_symlink("nowhere", path / ".in-use");
    }
    group.barrier();
    EXPECT_TRUE(writer.save(shards_of(group, 1)));
    EXPECT_THROW(writer.finish(), CheckpointError);
    EXPECT_NO_THROW(writer.finish());
    EXPECT_THROW(writer.save(shards_of(group, 1), CheckpointOverlap::none), CheckpointError);
    group.barrier();
    if (group.rank() == 0) fs::remove(path / ".in-use");
    group.barrier();
    EXPECT_TRUE(writer.save(shards_of(group, 2)));
    writer.finish();
    EXPECT_EQ(read_checkpoint(path / "latest").info.step, 2);
  });
}

}  // namespace sharded_save_test
}  // namespace lockstep
