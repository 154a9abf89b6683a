#include "lockstep/base/cores.h"

#include <gtest/gtest.h>

#include <thread>

#include "lockstep/base/cgroup.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace cores_test {

namespace fs = std::filesystem;

/// A cgroup file system of files.
class Cgroups {
 public:
  void write(const fs::path& name, const std::string& text) {
    fs::create_directories((folder_.path() / name).parent_path());
    write_file_atomically(folder_.path() / name, text);
  }
  fs::path folder() const { return folder_.path(); }
  std::optional<double> quota() const {
    return processor_quota(folder_.path() / "self", folder_.path() / "fs");
  }

 private:
  TemporaryDirectory folder_;
};

TEST(Cores, NoQuotaIsNone) {
  Cgroups cgroups;
  EXPECT_FALSE(cgroups.quota());
  cgroups.write("self", "0::/job\n");
  EXPECT_FALSE(cgroups.quota());
  cgroups.write("fs/job/cpu.max", "max 100000\n");
  EXPECT_FALSE(cgroups.quota());
}

TEST(Cores, TheLeastQuotaUpwardsCounts) {
  Cgroups cgroups;
  cgroups.write("self", "0::/slice/job\n");
  cgroups.write("fs/slice/job/cpu.max", "400000 100000\n");
  EXPECT_DOUBLE_EQ(cgroups.quota().value(), 4);
  cgroups.write("fs/slice/cpu.max", "150000 100000\n");
  EXPECT_DOUBLE_EQ(cgroups.quota().value(), 1.5);
  cgroups.write("fs/slice/cpu.max", "damaged\n");
  EXPECT_DOUBLE_EQ(cgroups.quota().value(), 4);
}

TEST(Cores, AContainersOwnGroupIsTheRoot) {
  Cgroups cgroups;
  cgroups.write("self", "0::/\n");
  cgroups.write("fs/cpu.max", "200000 100000\n");
  EXPECT_DOUBLE_EQ(cgroups.quota().value(), 2);
  cgroups.write("self", "0::/docker/3f2a\n");  // The host's path, which is not there.
  EXPECT_DOUBLE_EQ(cgroups.quota().value(), 2);
}

TEST(Cores, VersionOne) {
  Cgroups cgroups;
  cgroups.write("self", "5:memory:/job\n4:cpu,cpuacct:/job\n");
  cgroups.write("fs/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  cgroups.write("fs/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_FALSE(cgroups.quota());
  cgroups.write("fs/cpu,cpuacct/job/cpu.cfs_quota_us", "300000\n");
  EXPECT_DOUBLE_EQ(cgroups.quota().value(), 3);
}

TEST(Cgroup, TheLeastLimitOfMemoryAndTheKillsUpwards) {
  Cgroups cgroups;
  const auto use = [&] {
    return memory_use(cgroup_folders("memory", cgroups.folder() / "self", cgroups.folder() / "fs"));
  };
  EXPECT_FALSE(use().limit);
  cgroups.write("self", "0::/slice/job\n");
  cgroups.write("fs/slice/job/memory.max", "max\n");
  cgroups.write("fs/slice/job/memory.events", "low 0\noom 7\noom_kill 2\noom_group_kill 9\n");
  cgroups.write("fs/slice/memory.max", "2000\n");
  cgroups.write("fs/slice/memory.peak", "1999\n");
  EXPECT_EQ(use().kills, 2);
  EXPECT_EQ(use().limit, 2000);
  EXPECT_EQ(use().peak, 1999);
  cgroups.write("self", "4:memory:/job\n");
  cgroups.write("fs/memory/memory.limit_in_bytes", "9223372036854771712\n");
  cgroups.write("fs/memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n");
  EXPECT_EQ(use().kills, 3);
  EXPECT_FALSE(use().limit);
  cgroups.write("fs/memory/job/memory.limit_in_bytes", "500\n");
  cgroups.write("fs/memory/job/memory.max_usage_in_bytes", "500\n");
  EXPECT_EQ(use().limit, 500);
  EXPECT_EQ(use().peak, 500);
}

TEST(Cores, AQuotasWholeProcessorsCountAndAtLeastOne) {
  EXPECT_EQ(usable_processors(8, std::nullopt), 8);
  EXPECT_EQ(usable_processors(8, 2.5), 2);
  EXPECT_EQ(usable_processors(2, 64.0), 2);
  EXPECT_EQ(usable_processors(8, 0.3), 1);
}

TEST(Cores, HardwareThreadsOfACoreCountOnce) {
  Cgroups files;
  files.write("cpu0/topology/thread_siblings_list", "0,2\n");
  files.write("cpu2/topology/thread_siblings_list", "0,2\n");
  files.write("cpu1/topology/thread_siblings_list", "1,3\n");
  using Cores = std::vector<std::vector<int>>;
  EXPECT_EQ(cores_of({0, 1, 2}, files.folder()), (Cores{{0, 2}, {1}}));
  EXPECT_EQ(cores_of({4, 5}, files.folder()), (Cores{{4}, {5}}));  // Nothing known.
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), usable_processors());
}

TEST(Cores, AThreadKeepsToWhatItMayUse) {
  const auto before = allowed_processors();
  ASSERT_FALSE(before.empty());
  EXPECT_LE(usable_processors(), static_cast<int>(before.size()));
  std::thread([&] {
    set_allowed_processors({before.back()});
    EXPECT_EQ(allowed_processors(), std::vector<int>{before.back()});
    std::thread([&] { EXPECT_EQ(allowed_processors().size(), 1u); }).join();
  }).join();
  EXPECT_EQ(allowed_processors(), before);
}

TEST(Cores, AProcessorThatIsNotThereIsNamed) {
  EXPECT_THROW(set_allowed_processors({100'000}), SystemError);
  EXPECT_THROW(set_allowed_processors({8190}), SystemError);
}

}  // namespace cores_test
}  // namespace lockstep
