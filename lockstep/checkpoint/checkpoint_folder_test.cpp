#include "lockstep/checkpoint/checkpoint_folder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <thread>

#include "lockstep/base/file.h"
#include "tests/support/other_process.h"

namespace {
int symlink_refusal = 0;  // 0: links can be made.
}

/// In place of the C library's, as on a file system without symbolic links.
extern "C" int symlink(const char* target, const char* path) noexcept {
  if (symlink_refusal == 0) return ::symlinkat(target, AT_FDCWD, path);
  errno = symlink_refusal;
  return -1;
}

namespace lockstep {
namespace fs = std::filesystem;
namespace checkpoint_folder_test {

using test_process::OtherProcess;

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
              testing::ElementsAre(".in-use", "latest", "step-00000005", "step-00000010"));
  EXPECT_EQ(fs::read_symlink(folder.path() / "latest"), "step-00000010");
  EXPECT_EQ(read_checkpoint(folder.path() / "latest").info.step, 10);
}

TEST(CheckpointFolder, KeepsTheNewestOnly) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path(), 2);
  for (int64_t step : {1, 2, 3, 4}) folder.write(at_step(step));
  EXPECT_THAT(names_in(temporary.path()),
              testing::ElementsAre(".in-use", "latest", "step-00000003", "step-00000004"));
}

TEST(CheckpointFolder, ReplacesACheckpointOfTheSameStep) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  folder.write(at_step(7));
  Checkpoint other = at_step(7);
  other.info.epoch = 3;
  folder.write(other);
  EXPECT_EQ(folder.read_newest()->second.info.epoch, 3);
  EXPECT_THAT(names_in(temporary.path()),
              testing::ElementsAre(".in-use", "latest", "step-00000007"));
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
  fs::resize_file(damaged / "model-00001-of-00001.safetensors", 20);
  testing::internal::CaptureStderr();
  const auto found = folder.read_newest();
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_EQ(found->second.info.step, 1);
  EXPECT_THAT(warning, testing::HasSubstr(damaged.string() +
                                          " is damaged: model-00001-of-00001.safetensors has 20"));
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
  EXPECT_THAT(names_in(temporary.path()),
              testing::ElementsAre(".in-use", "latest", "step-00000011", "step-00000012",
                                   "superseded-step-00000020"));
}

TEST(CheckpointFolder, PrepareRemovesWhatAKilledWriterLeft) {
  TemporaryDirectory temporary;
  fs::create_directory(temporary.path() / ".tmp-step-00000009.abcdef");
  std::ofstream(temporary.path() / ".tmp-step-00000009.abcdef" / "model.safetensors") << "half";
  CheckpointFolder folder(temporary.path());
  folder.prepare();
  EXPECT_THAT(names_in(temporary.path()), testing::ElementsAre(".in-use"));
}

TEST(CheckpointFolder, PrepareNamesAFolderThatCannotBe) {
  TemporaryDirectory temporary;
  std::ofstream(temporary.path() / "file") << "x";
  CheckpointFolder folder(temporary.path() / "file");
  EXPECT_THAT([&] { folder.prepare(); },
              testing::ThrowsMessage<CheckpointError>(
                  testing::HasSubstr("cannot write checkpoints to " + folder.path().string())));
}

TEST(CheckpointFolder, IsWrittenWhereNoLinkCanBeMade) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path());
  folder.write(at_step(1));
  symlink_refusal = EPERM;
  testing::internal::CaptureStderr();
  for (int64_t step : {2, 3}) folder.write(at_step(step));
  const std::string told = testing::internal::GetCapturedStderr();
  symlink_refusal = 0;
  EXPECT_EQ(told.find(temporary.path().string()), told.rfind(temporary.path().string())) << told;
  EXPECT_THAT(names_in(temporary.path()),
              testing::ElementsAre(".in-use", "step-00000001", "step-00000002", "step-00000003"));
  EXPECT_EQ(folder.read_newest()->second.info.step, 3);
}

TEST(CheckpointFolder, AFolderInTheLinksPlaceStays) {
  TemporaryDirectory temporary;
  fs::create_directories(temporary.path() / "latest" / "of-somebody");
  CheckpointFolder(temporary.path()).write(at_step(1));
  EXPECT_THAT(names_in(temporary.path()), testing::ElementsAre("latest", "step-00000001"));
}

TEST(CheckpointFolder, ItsFoldersHaveThePermissionsOfAnyNewFolder) {
  TemporaryDirectory temporary;
  const mode_t before = ::umask(027);
  const fs::path step = CheckpointFolder(temporary.path()).write(at_step(1));
  ::umask(before);
  EXPECT_EQ(fs::status(step).permissions(), fs::perms(0750));
}

TEST(CheckpointFolder, IsTakenWhileItIsWrittenToAndFreeAfterwards) {
  TemporaryDirectory temporary;
  {
    CheckpointFolder folder(temporary.path());
    folder.list();
    EXPECT_THAT(names_in(temporary.path()), testing::IsEmpty()) << "reading takes nothing";
    folder.write(at_step(1));
    const CheckpointFolder copy = folder;
    EXPECT_TRUE(fs::exists(temporary.path() / ".in-use"));
    CheckpointFolder(temporary.path()).write(at_step(2));  // of the same process
    EXPECT_TRUE(fs::exists(temporary.path() / ".in-use"));
  }
  EXPECT_FALSE(fs::exists(temporary.path() / ".in-use"));
}

TEST(CheckpointFolder, IsTakenAnewWhereItWasRemoved) {
  TemporaryDirectory temporary;
  CheckpointFolder folder(temporary.path() / "run");
  folder.write(at_step(1));
  fs::remove_all(folder.path());
  folder.write(at_step(2));
  EXPECT_THAT(names_in(folder.path()), testing::ElementsAre(".in-use", "latest", "step-00000002"));
}

/// What a second job does to the folder of a running one: nothing.
TEST(CheckpointFolder, OfAnotherProcessIsRefusedAndLeftAlone) {
  TemporaryDirectory temporary;
  OtherProcess other([&](const auto& ready) {
    CheckpointFolder folder(temporary.path());
    folder.write(at_step(1));
    fs::create_directory(temporary.path() / ".tmp-step-00000002.abcdef");
    ready();
  });
  const auto before = names_in(temporary.path());
  const std::string owner = "process " + std::to_string(other.process());
  const auto refused = testing::ThrowsMessage<FolderInUseError>(
      testing::AllOf(testing::HasSubstr("folder " + temporary.path().string() + " is in use"),
                     testing::HasSubstr(owner), testing::HasSubstr("of this host")));
  // Each waits for two seconds.
  std::thread prepares(
      [&] { EXPECT_THAT([&] { CheckpointFolder(temporary.path()).prepare(); }, refused); });
  std::thread supersedes([&] {
    EXPECT_THAT([&] { CheckpointFolder(temporary.path()).supersede_after(0); }, refused);
  });
  CheckpointFolder folder(temporary.path());
  EXPECT_THAT([&] { folder.write(at_step(1)); }, refused);
  prepares.join();
  supersedes.join();
  EXPECT_EQ(folder.read_newest()->second.info.step, 1) << "all may read";
  EXPECT_EQ(names_in(temporary.path()), before);
  other.kill();
  folder.prepare();
  EXPECT_THAT(names_in(temporary.path()),
              testing::ElementsAre(".in-use", "latest", "step-00000001"));
}

}  // namespace checkpoint_folder_test
}  // namespace lockstep
