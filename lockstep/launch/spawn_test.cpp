#include "lockstep/launch/spawn.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/world.h"

namespace lockstep {
namespace spawn_test {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

constexpr const char* kTask = "LOCKSTEP_TEST_TASK";
constexpr const char* kFolder = "LOCKSTEP_TEST_FOLDER";

/// Leaves a file that the parent of the test reads.
void note(const std::string& name, const std::string& text) {
  write_file_atomically(fs::path(env_string(kFolder).value()) / name, text);
}

[[noreturn]] void wait_for_the_end() {
  while (true) pause();
}

void meet() {
  const auto world = init();
  auto store = world.store();
  store.set("from" + std::to_string(world.rank()), std::to_string(10 * world.rank()));
  const int other = 1 - world.rank();
  note("met" + std::to_string(world.rank()), store.get("from" + std::to_string(other)));
}

void run_task(int local_rank) {
  const auto task = env_string(kTask).value();
  const auto rank = std::to_string(env_int("RANK").value());
  if (task == "note") return note("rank" + rank, env_string("WORLD_SIZE").value());
  if (task == "meet") return meet();
  if (task == "print") {
    std::printf("rank %s\n", rank.c_str());
    return;
  }
  if (task == "throw" && local_rank == 1) throw DataError("no such file: x.idx");
  if (task == "usage" && local_rank == 0) throw UsageError("bad flag");
  if (task == "nested" && local_rank == 0) spawn(2);
  if (task == "crash" && local_rank == 1) {
    std::fputs("about to crash\n", stderr);
    std::signal(SIGSEGV, SIG_DFL);
    std::raise(SIGSEGV);
  }
  note("pid" + rank, std::to_string(getpid()));
  wait_for_the_end();
}

/// With this argument the program is no test but what a test spawns.
constexpr const char* kWorker = "spawn-worker";

class Spawn : public testing::Test {
 protected:
  Spawn() { setenv(kFolder, folder_.path().c_str(), 1); }

  static SpawnOptions options() {
    SpawnOptions options;
    options.args = {kWorker};
    return options;
  }

  /// Starts two workers with this task.
  void start(const std::string& task, const SpawnOptions& with = options()) {
    setenv(kTask, task.c_str(), 1);
    EXPECT_TRUE(spawn(2, with));
  }

  std::string noted(const std::string& name) { return read_file(folder_.path() / name); }
  bool wait_for(const std::string& name) {
    const auto limit = Clock::now() + std::chrono::seconds(30);
    while (!fs::exists(folder_.path() / name) && Clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return fs::exists(folder_.path() / name);
  }

  TemporaryDirectory folder_{"lockstep-spawn-test"};
};

TEST_F(Spawn, EveryRankRuns) {
  start("note");
  EXPECT_EQ(noted("rank0"), "2");
  EXPECT_EQ(noted("rank1"), "2");
}

TEST_F(Spawn, TheWorkersMeet) {
  start("meet");
  EXPECT_EQ(noted("met0"), "10");
  EXPECT_EQ(noted("met1"), "0");
}

TEST_F(Spawn, StandardOutputIsShownOfTheRanksThatAreAskedFor) {
  const auto shown = [this](const SpawnOptions& with) {
    testing::internal::CaptureStdout();
    start("print", with);
    return testing::internal::GetCapturedStdout();
  };
  auto with = options();
  EXPECT_EQ(shown(with).size(), std::string("rank 0\nrank 1\n").size());
  with.stdout_ranks = {1};
  EXPECT_EQ(shown(with), "rank 1\n");
  with.stdout_ranks.emplace();
  EXPECT_EQ(shown(with), "");
  with.stdout_ranks = {0, 2};
  EXPECT_THROW(spawn(2, with), UsageError);
}

TEST_F(Spawn, ASecondSpawnWorksLikeTheFirst) {
  start("note");
  fs::remove(folder_.path() / "rank1");
  start("note");
  EXPECT_EQ(noted("rank1"), "2");
}

TEST_F(Spawn, RanksOfAnotherHostCountFromTheFirst) {
  auto with = options();
  with.first_rank = 2;
  with.world_size = 4;
  with.master_addr = "127.0.0.1";
  with.master_port = 1;  // the task does not connect
  start("note", with);
  EXPECT_EQ(noted("rank2"), "4");
  EXPECT_EQ(noted("rank3"), "4");
}

TEST_F(Spawn, AFailureIsRethrownWithItsMessageAndCode) {
  const auto begin = Clock::now();
  try {
    start("throw");
    FAIL() << "nothing was thrown";
  } catch (const WorkerError& error) {
    EXPECT_EQ(error.exit_code(), 1);
    EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("no such file: x.idx"), std::string::npos);
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
}

TEST_F(Spawn, TheExitCodeIsTheWorkers) {
  try {
    start("usage");
    FAIL() << "nothing was thrown";
  } catch (const WorkerError& error) {
    EXPECT_EQ(error.exit_code(), kExitUsage);
  }
}

TEST_F(Spawn, ACrashNamesTheSignalAndTheLastLines) {
  try {
    start("crash");
    FAIL() << "nothing was thrown";
  } catch (const WorkerError& error) {
    EXPECT_EQ(error.exit_code(), 128 + SIGSEGV);
    EXPECT_NE(std::string(error.what()).find("SIGSEGV"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("about to crash"), std::string::npos);
  }
}

TEST_F(Spawn, AWorkerThatSpawnsIsToldSo) {
  try {
    start("nested");
    FAIL() << "nothing was thrown";
  } catch (const WorkerError& error) {
    EXPECT_NE(std::string(error.what()).find("itself a spawned rank"), std::string::npos)
        << error.what();
  }
}

TEST_F(Spawn, ASignalToTheParentIsForwardedAndThrown) {
  std::thread killer([&] {
    if (wait_for("pid0") && wait_for("pid1")) kill(getpid(), SIGTERM);
  });
  setenv(kTask, "wait", 1);
  try {
    spawn(2, options());
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InterruptedError& error) {
    EXPECT_EQ(error.signal_number(), SIGTERM);
  }
  killer.join();
  for (const char* name : {"pid0", "pid1"}) {
    EXPECT_NE(kill(std::stoi(noted(name)), 0), 0) << "worker " << noted(name) << " still lives";
  }
}

TEST_F(Spawn, NothingOutlivesAParentThatIsKilled) {
  setenv(kTask, "wait", 1);
  const pid_t parent = fork();
  if (parent == 0) {
    execl("/proc/self/exe", "spawn_test", kWorker, nullptr);
    _exit(127);
  }
  ASSERT_TRUE(wait_for("pid0") && wait_for("pid1"));
  kill(parent, SIGKILL);
  ASSERT_EQ(waitpid(parent, nullptr, 0), parent);
  const auto limit = Clock::now() + std::chrono::seconds(10);
  for (const char* name : {"pid0", "pid1"}) {
    const pid_t worker = std::stoi(noted(name));
    while (kill(worker, 0) == 0 && Clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_NE(kill(worker, 0), 0) << "worker " << worker << " still lives";
  }
}

TEST_F(Spawn, UnderALauncherThisProcessIsARank) {
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "1", 1);
  setenv("LOCAL_RANK", "0", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", "29500", 1);
  EXPECT_FALSE(spawn(4));
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    unsetenv(name);
  }
}

TEST_F(Spawn, ImpossibleNumbersAreRefused) {
  EXPECT_THROW(spawn(0), UsageError);
  SpawnOptions several;
  several.first_rank = 3;
  several.world_size = 4;
  EXPECT_THROW(spawn(2, several), UsageError);
  several.first_rank = 2;
  EXPECT_THROW(spawn(2, several), UsageError) << "several hosts need an address";
}

}  // namespace spawn_test

int run_spawned() {
  try {
    spawn(spawn_test::run_task, 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return exit_code_of(error);
  }
  return 0;
}

}  // namespace lockstep

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == lockstep::spawn_test::kWorker)
    return lockstep::run_spawned();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
