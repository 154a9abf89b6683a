#include "lockstep/checkpoint/checkpoint_folder.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "lockstep/base/file.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

Checkpoint at_step(int64_t step) {
  Checkpoint checkpoint;
  checkpoint.info.step = step;
  checkpoint.model.emplace_back("weight", at::arange(6.0).reshape({2, 3}) + step);
  checkpoint.state.emplace_back("optimizer.momentum.0", at::arange(4.0));
  return checkpoint;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(CheckpointFolder, NamesAreSortableAndGrowBeyondEightDigits) {
  EXPECT_EQ(checkpoint_name(1234), "step-00001234");
  EXPECT_EQ(checkpoint_name(123456789), "step-123456789");
}

TEST(CheckpointFolder, WritesPublishesAndPointsLatestAtTheNewest) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path() / "run");
  folder.prepare();
  folder.write(at_step(5));
  EXPECT_EQ(folder.write(at_step(10)), temporary.path() / "run" / "step-00000010");
  EXPECT_THAT(names_in(folder.path()),
              testing::ElementsAre("latest", "step-00000005", "step-00000010"));
  EXPECT_EQ(fs::read_symlink(folder.path() / "latest"), "step-00000010");
  EXPECT_EQ(read_checkpoint(folder.path() / "latest").info.step, 10);
}

TEST(CheckpointFolder, KeepsTheNewestOnly) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path(), 2);
  for (int64_t step : {1, 2, 3, 4}) folder.write(at_step(step));
  EXPECT_THAT(names_in(temporary.path()),
              testing::ElementsAre("latest", "step-00000003", "step-00000004"));
}

TEST(CheckpointFolder, ReplacesACheckpointOfTheSameStep) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  folder.write(at_step(7));
  Checkpoint other = at_step(7);
  other.info.epoch = 3;
  folder.write(other);
  EXPECT_EQ(folder.read_newest()->second.info.epoch, 3);
  EXPECT_THAT(names_in(temporary.path()), testing::ElementsAre("latest", "step-00000007"));
}

TEST(CheckpointFolder, NewestIsTheHighestStepNotTheLastNameInTheAlphabet) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  folder.write(at_step(123456789));
  folder.write(at_step(99999999));
  EXPECT_EQ(folder.read_newest()->second.info.step, 123456789);
}

TEST(CheckpointFolder, TakesTheLastGoodOneWhenTheNewestIsDamaged) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  folder.write(at_step(1));
  const fs::path damaged = folder.write(at_step(2));
  fs::resize_file(damaged / "model.safetensors", 20);
  testing::internal::CaptureStderr();
  const auto found = folder.read_newest();
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_EQ(found->second.info.step, 1);
  EXPECT_THAT(warning,
              testing::HasSubstr(damaged.string() + " is damaged: model.safetensors has 20"));
}

TEST(CheckpointFolder, RefusesWhenAllAreDamaged) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  fs::remove(folder.write(at_step(1)) / "state.json");
  EXPECT_THROW(folder.read_newest(), DamagedCheckpointError);
}

TEST(CheckpointFolder, IsEmptyBeforeTheFirstCheckpoint) {
  TemporaryDirectory temporary;
  EXPECT_FALSE(CheckpointFolder(temporary.path()).read_newest());
  EXPECT_FALSE(CheckpointFolder(temporary.path() / "missing").read_newest());
}

TEST(CheckpointFolder, LaterOnesAreSetAsideWhenARunGoesOnFromAnEarlierOne) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path(), 2);
  for (int64_t step : {10, 20}) folder.write(at_step(step));
  testing::internal::CaptureStderr();
  folder.supersede_after(10);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), testing::HasSubstr("is later than step 10"));
  for (int64_t step : {11, 12}) folder.write(at_step(step));
  EXPECT_THAT(
      names_in(temporary.path()),
      testing::ElementsAre("latest", "step-00000011", "step-00000012", "superseded-step-00000020"));
}

TEST(CheckpointFolder, PrepareRemovesWhatAKilledWriterLeft) {
  TemporaryDirectory temporary;
  fs::create_directory(temporary.path() / ".tmp-step-00000009.abcdef");
  std::ofstream(temporary.path() / ".tmp-step-00000009.abcdef" / "model.safetensors") << "half";
  CheckpointFolder folder(temporary.path());
  folder.prepare();
  EXPECT_THAT(names_in(temporary.path()), testing::IsEmpty());
}

TEST(CheckpointFolder, PrepareNamesAFolderThatCannotBe) {
  TemporaryDirectory temporary;
  std::ofstream(temporary.path() / "file") << "x";
  CheckpointFolder folder(temporary.path() / "file");
  EXPECT_THAT([&] { folder.prepare(); },
              testing::ThrowsMessage<CheckpointError>(
                  testing::HasSubstr("cannot write checkpoints to " + folder.path().string())));
}

TEST(CheckpointFolder, AFailedWriteLeavesTheOlderOnesAndNoTrace) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  folder.write(at_step(1));
  // A plain file where `latest` must go: renaming a link over a non-empty folder fails.
  fs::remove(temporary.path() / "latest");
  fs::create_directory(temporary.path() / "latest");
  EXPECT_THROW(folder.write(at_step(2)), CheckpointError);
  EXPECT_EQ(read_checkpoint(temporary.path() / "step-00000001").info.step, 1);
}

}  // namespace
}  // namespace lockstep
