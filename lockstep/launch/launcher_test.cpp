#include "lockstep/launch/launcher.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/launch/supervisor.h"

namespace lockstep::launch {
namespace launcher_test {

#ifdef __SANITIZE_THREAD__
constexpr bool kHasSanitizersThread = true;
#else
constexpr bool kHasSanitizersThread = false;
#endif

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

void launch_once(const LaunchPlan& plan) {
  launch([&](int) { return plan; }, 0);
}

class LauncherTest : public testing::Test {
 protected:
  /// Workers that run these shell scripts; $OUT is a folder of this test.
  LaunchPlan plan(const std::vector<std::string>& scripts) {
    LaunchPlan plan;
    for (size_t i = 0; i < scripts.size(); ++i) {
      WorkerPlan worker;
      worker.rank = worker.local_rank = static_cast<int>(i);
      worker.file = "/bin/sh";
      worker.argv = {"sh", "-c", scripts[i]};
      worker.env = {{"OUT", folder_.path().string()}};
      worker.error_file = folder_.path() / (std::to_string(i) + ".json");
      worker.env.emplace_back("TORCHELASTIC_ERROR_FILE", worker.error_file.string());
      worker.out.file = folder_.path() / (std::to_string(i) + ".out");
      worker.err.file = folder_.path() / (std::to_string(i) + ".err");
      plan.workers.push_back(worker);
    }
    return plan;
  }
  std::string content(const std::string& name) { return read_file(folder_.path() / name); }
  bool wait_for(const std::string& name) {
    const auto limit = Clock::now() + std::chrono::seconds(20);
    while (!fs::exists(folder_.path() / name)) {
      if (Clock::now() > limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  static void expect_its_end(pid_t pid) {
    const auto limit = Clock::now() + std::chrono::seconds(20);
    while (kill(pid, 0) == 0 && Clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_NE(kill(pid, 0), 0) << "process " << pid << " still lives";
  }
  static std::string failure(const LaunchPlan& plan, int code) {
    try {
      launch_once(plan);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), code);
      return error.what();
    }
    return "nothing was thrown";
  }
  static void expect_contains(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in:\n" << text;
  }

  TemporaryDirectory folder_{"lockstep-launcher-test"};
};

/// Gives its orders one after another: the next one once workers have ended, or the user leaves.
struct Agent : HostAgent {
  int event_fd() const override { return event.get(); }
  HostOrder order() override {
    const std::lock_guard lock(mutex);
    if (!std::exchange(was_asked, true)) asked.set_value();
    uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(event.get(), &count, sizeof count);
    return orders.at(at);
  }
  void ended(int64_t, const HostEnd& end) override {
    ends.push_back(end);
    // A stop has moved on already.
    if (orders.at(at).kind == HostOrder::Kind::run || !end.succeeded) next();
  }
  void leave() override {
    ++left;
    next();
  }
  void next() {
    const std::lock_guard lock(mutex);
    ++at;
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof one);
  }

  UniqueFd event{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::mutex mutex;
  std::vector<HostOrder> orders;
  size_t at = 0;
  std::vector<HostEnd> ends;
  int left = 0;
  bool was_asked = false;
  std::promise<void> asked;  ///< The launcher runs, and handles signals.
};

HostOrder generation(int64_t number) {
  HostOrder order{HostOrder::Kind::run};
  order.generation.number = number;
  return order;
}

TEST_F(LauncherTest, StreamsGoIntoTheirFilesByteForByte) {
  const std::string binary = R"(printf 'a\000b\r\nc'; printf e >&2; head -c 300000 /dev/zero)";
  launch_once(plan({binary, "echo two"}));
  EXPECT_EQ(content("0.out"), std::string("a\0b\r\nc", 6) + std::string(300'000, '\0'));
  EXPECT_EQ(content("0.err"), "e");
  EXPECT_EQ(content("1.out"), "two\n");
}

TEST_F(LauncherTest, WorkersReadNothingAndHaveNoOtherDescriptors) {
  const UniqueFd leaked(::open("/dev/null", O_RDONLY));  // not close-on-exec
  launch_once(plan({"cat; echo /proc/self/fd/*"}));
  const auto listed = content("0.out");
  // 0 to 2, and one that the shell itself opens while it expands the pattern.
  EXPECT_LE(std::count(listed.begin(), listed.end(), '/'), 4 * 4) << listed;
  EXPECT_EQ(listed.find("/" + std::to_string(leaked.get()) + " "), std::string::npos) << listed;
}

TEST_F(LauncherTest, TheFirstFailureEndsTheOthersWithinASecond) {
  const auto begin = Clock::now();
  const auto text =
      failure(plan({"trap '' TERM; touch $OUT/ready; while :; do sleep 0.05; done",
                    "until [ -e $OUT/ready ]; do sleep 0.01; done; echo oh no >&2; exit 7"}),
              7);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
  expect_contains(text, "rank 1 (pid ");
  expect_contains(text, "exited with code 7");
  expect_contains(text, "oh no");
}

TEST_F(LauncherTest, ASignalDeathIsNamed) {
  expect_contains(failure(plan({"kill -SEGV $$"}), 128 + SIGSEGV), "killed by SIGSEGV (signal 11)");
}

TEST_F(LauncherTest, AProgramThatCannotBeExecutedIsNamed) {
  auto bad = plan({"sleep 100", ""});
  bad.workers[1].file = folder_.path() / "no-such-program";
  expect_contains(failure(bad, 127), "no-such-program: No such file");
  std::ofstream(folder_.path() / "text") << "no program";
  fs::permissions(folder_.path() / "text", fs::perms::owner_all);
  bad.workers[1].file = folder_.path() / "text";
  expect_contains(failure(bad, 126), "Exec format error");
}

TEST_F(LauncherTest, AsManyRestartsAsAskedButNoneThatCannotHelp) {
  // How often workers of this script start where so many restarts are allowed, and the error.
  const auto started = [&](const std::string& script, int max_restarts) {
    int attempts = 0;
    std::string text;
    try {
      const auto plan_of = [&](int attempt) {
        EXPECT_EQ(attempt, attempts++);
        return plan({"N=" + std::to_string(attempt) + "; " + script});
      };
      launch(plan_of, max_restarts);
    } catch (const WorkerError& error) {
      text = error.what();
    }
    return std::pair(attempts, text);
  };
  EXPECT_EQ(started("true", 3), std::pair(1, std::string()));
  EXPECT_EQ(started("[ $N = 2 ]", 3), std::pair(3, std::string()));
  const auto none = started("exit 3", 0);
  EXPECT_EQ(none.first, 1);
  EXPECT_EQ(none.second.find("not started again"), std::string::npos) << "nobody asked for it";
  const auto all = started("exit 1$N", 2);
  EXPECT_EQ(all.first, 3);
  for (const char* part : {"exited with code 12", "2 restarts of 2 used",
                           "before, attempt 0: rank 0", "before, attempt 1: rank 0"})
    expect_contains(all.second, part);
  const auto usage = started("exit $((N + 1))", 5);
  EXPECT_EQ(usage.first, 2);
  expect_contains(usage.second, "exit code 2 tells of wrong arguments");
}

TEST_F(LauncherTest, ASignalWhileAFailureEndsTheOthersIsNoReasonToStartAgain) {
  for (const int max_restarts : {1, 0}) {
    std::thread sender([&] {
      if (wait_for("told")) kill(getpid(), SIGTERM);
    });
    auto job = plan({"trap 'touch $OUT/told' TERM; touch $OUT/ready; while :; do sleep 0.01; done",
                     "until [ -e $OUT/ready ]; do sleep 0.01; done; exit 7"});
    int code = 0;
    try {
      launch([&](int) { return job; }, max_restarts);
    } catch (const Error& error) {
      code = error.exit_code();
    }
    EXPECT_EQ(code, max_restarts > 0 ? 128 + SIGTERM : 7)
        << "without restarts the failure ended it";
    sender.join();
    for (const char* name : {"told", "ready"}) fs::remove(folder_.path() / name);
  }
}

TEST_F(LauncherTest, AnErrorFileIsPartOfTheCause) {
  const auto text = failure(
      plan(
          {R"(echo '{"message":{"message":"ValueError: seven","extraInfo":{"timestamp":"5"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1)"}),
      1);
  expect_contains(text, "ValueError: seven");
}

TEST_F(LauncherTest, TheCauseIsNotWhoLostAPeer) {
  const auto text = failure(
      plan({"echo 'Connection closed by peer [127.0.0.1]:1' >&2; touch $OUT/lost; exit 1",
            "until [ -e $OUT/lost ]; do sleep 0.01; done; sleep 0.05; echo cause >&2; exit 9"}),
      9);
  expect_contains(text, "rank 1");
  expect_contains(text, "cause");
}

TEST_F(LauncherTest, WhatAWorkerLeavesBehindEndsWithTheJob) {
  // Forks twice, changes session, forgets its environment.
  launch_once(
      plan({"(setsid env -i /bin/sh -c 'echo $$ > '$OUT'/left; exec sleep 1000' &) ; "
            "until [ -s $OUT/left ]; do sleep 0.01; done"}));
  const pid_t left = std::stoi(content("left"));
  EXPECT_NE(kill(left, 0), 0) << "process " << left << " still lives";
}

TEST_F(LauncherTest, WorkersIgnoreWhatABackgroundJobIgnores) {
  for (const int number : {SIGINT, SIGQUIT}) std::signal(number, SIG_IGN);
  launch_once(plan({"kill -INT $$; kill -QUIT $$; echo on > $OUT/on"}));
  for (const int number : {SIGINT, SIGQUIT}) std::signal(number, SIG_DFL);
  EXPECT_EQ(content("on"), "on\n");
}

TEST_F(LauncherTest, AnInheritedIgnoredTermIsForwardedAllTheSame) {
  std::signal(SIGTERM, SIG_IGN);
  std::thread killer([&] {
    if (wait_for("ready")) kill(getpid(), SIGTERM);
  });
  const auto text = failure(
      plan({"trap 'exit 0' TERM; touch $OUT/ready; for i in $(seq 500); do sleep 0.01; done"}),
      128 + SIGTERM);
  killer.join();
  expect_contains(text, "SIGTERM");
  EXPECT_EQ(std::signal(SIGTERM, SIG_DFL), SIG_IGN) << "what was before is put back";
}

TEST_F(LauncherTest, NothingOutlivesALauncherThatIsKilled) {
  const auto doomed = plan(
      {"(setsid env -i /bin/sh -c 'echo $$ > '$OUT'/a.tmp; mv '$OUT'/a.tmp '$OUT'/a; exec sleep "
       "1000' &) ; sleep 1000",
       "echo $$ > $OUT/b.tmp; mv $OUT/b.tmp $OUT/b; trap '' TERM INT HUP; while :; do sleep 1; "
       "done"});
  const auto scratch = folder_.path() / "scratch";
  fs::create_directory(scratch);
  const pid_t launcher = fork();
  if (launcher == 0) {
    auto with_scratch = doomed;
    with_scratch.scratch = scratch;
    launch_once(with_scratch);
    _exit(0);
  }
  ASSERT_TRUE(wait_for("a") && wait_for("b"));
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  for (const char* name : {"a", "b"}) expect_its_end(std::stoi(content(name)));
  const auto limit = Clock::now() + std::chrono::seconds(10);
  while (fs::exists(scratch) && Clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_FALSE(fs::exists(scratch));
}

TEST_F(LauncherTest, NorIfACopyOfTheLauncherLives) {
  const auto doomed = plan({"echo $$ > $OUT/b.tmp; mv $OUT/b.tmp $OUT/b; sleep 1000"});
  const pid_t launcher = fork();
  if (launcher == 0) {
    // A copy made by another thread holds all that the launcher holds, its pipes too.
    std::thread([this] {
      if (!wait_for("b")) _exit(1);
      const pid_t copy = fork();
      if (copy == 0) {
        while (true) pause();
      }
      std::ofstream(folder_.path() / "copy.tmp") << copy;
      fs::rename(folder_.path() / "copy.tmp", folder_.path() / "copy");
    }).detach();
    launch_once(doomed);
    _exit(0);
  }
  ASSERT_TRUE(wait_for("copy"));
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  expect_its_end(std::stoi(content("b")));
  kill(std::stoi(content("copy")), SIGKILL);
}

TEST_F(LauncherTest, SignalsAreForwardedAndWhatWasBeforeIsPutBack) {
  struct sigaction before {};
  sigaction(SIGTERM, nullptr, &before);
  std::thread killer([&] {
    if (wait_for("ready")) kill(getpid(), SIGTERM);
  });
  const auto text = failure(plan({"trap 'echo saved > $OUT/saved; exit 0' TERM; touch $OUT/ready; "
                                  "while :; do sleep 0.01; done"}),
                            128 + SIGTERM);
  killer.join();
  expect_contains(text, "SIGTERM");
  EXPECT_EQ(content("saved"), "saved\n");
  struct sigaction after {};
  sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST(WorkerFailure, NamesTheMemoryLimitAtWhichItWasKilled) {
  const MemoryUse before{.kills = 2, .limit = 2'000'000'000};
  EXPECT_EQ(memory_words(before, before), "");
  EXPECT_NE(memory_words(before, {.kills = 3}), "");
  WorkerFailure failure;
  failure.wait_status = SIGKILL;
  failure.memory =
      memory_words(before, {.kills = 3, .limit = 2'000'000'000, .peak = 1'900'000'000});
  EXPECT_NE(failure.text().find("2.0 GB"), std::string::npos) << failure.text();
  EXPECT_NE(failure.text().find("1.9 GB"), std::string::npos) << failure.text();
}

TEST_F(LauncherTest, SignalsThatWereBlockedAreForwarded) {
  sigset_t term, before, after;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &term, &before);
  std::thread killer([&] {
    if (wait_for("ready")) kill(getpid(), SIGTERM);
  });
  failure(plan({"touch $OUT/ready; sleep 1000"}), 128 + SIGTERM);
  killer.join();
  pthread_sigmask(SIG_SETMASK, &before, &after);
  EXPECT_EQ(sigismember(&after, SIGTERM), 1);
}

TEST_F(LauncherTest, WhatServeThrowsIsThrownOnceTheWorkersAreGone) {
  auto with_serve = plan({"echo $$ > $OUT/pid; sleep 1000"});
  with_serve.serve = [this]() -> std::shared_ptr<void> {
    EXPECT_TRUE(wait_for("pid"));
    throw CommError("no store");
  };
  expect_contains(failure(with_serve, 1), "no store");
  EXPECT_NE(kill(std::stoi(content("pid")), 0), 0);
}

TEST_F(LauncherTest, GenerationsOfSeveralHostsRunAsTheAgentSays) {
  Agent agent;
  agent.orders = {generation(1), generation(2), {HostOrder::Kind::success}};
  launch(agent, {SIGTERM}, [&](const HostGeneration& generation) {
    return plan({"echo " + std::to_string(generation.number) + " >> $OUT/ran"});
  });
  EXPECT_EQ(content("ran"), "1\n2\n");
  ASSERT_EQ(agent.ends.size(), 2u);
  EXPECT_TRUE(agent.ends[1].succeeded);
}

TEST_F(LauncherTest, AFailureIsToldToTheAgentWithItsReason) {
  Agent agent;
  agent.orders = {generation(1), {.kind = HostOrder::Kind::failure, .exit_code = 9, .text = "why"}};
  const auto failing = [&](const HostGeneration&) {
    auto one = plan({"echo because >&2; exit 3", "sleep 1000"});
    one.workers[0].err.console = true;
    one.repeat_shown_lines = false;
    return one;
  };
  testing::internal::CaptureStderr();
  try {
    launch(agent, {SIGTERM}, failing);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const WorkerError& error) {
    EXPECT_EQ(error.exit_code(), 9);
  }
  expect_contains(testing::internal::GetCapturedStderr(), "because");
  ASSERT_EQ(agent.ends.size(), 1u);
  EXPECT_EQ(agent.ends[0].exit_code, 3);
  EXPECT_TRUE(agent.ends[0].can_retry);
  EXPECT_FALSE(agent.ends[0].consequence);
  expect_contains(agent.ends[0].text, "\n    because");
}

TEST_F(LauncherTest, WhatCannotSucceedAndWhatFollowsFromAnotherHostIsToldAsSuch) {
  Agent agent;
  agent.orders = {generation(1), generation(2), {HostOrder::Kind::success}};
  launch(agent, {SIGTERM}, [&](const HostGeneration& generation) {
    return generation.number == 1 ? plan({"exit 2"})
                                  : plan({"echo Connection closed by peer >&2; exit 4"});
  });
  ASSERT_EQ(agent.ends.size(), 2u);
  EXPECT_FALSE(agent.ends[0].can_retry);
  EXPECT_TRUE(agent.ends[1].consequence);
}

TEST_F(LauncherTest, WorkersStopWhenTheAgentSaysSo) {
  Agent agent;
  agent.orders = {generation(1), {HostOrder::Kind::wait}, {HostOrder::Kind::success}};
  std::thread stopper([&] {
    wait_for("up");
    agent.next();
  });
  launch(agent, {SIGTERM},
         [&](const HostGeneration&) { return plan({"touch $OUT/up; sleep 1000"}); });
  stopper.join();
  ASSERT_EQ(agent.ends.size(), 1u);
  EXPECT_FALSE(agent.ends[0].succeeded);
}

TEST_F(LauncherTest, ASignalTellsTheAgentToLeave) {
  Agent agent;
  agent.orders = {{HostOrder::Kind::wait}, {HostOrder::Kind::interrupted}};
  std::thread sender([&] {
    agent.asked.get_future().wait();
    kill(getpid(), SIGTERM);
  });
  try {
    launch(agent, {SIGTERM}, [&](const HostGeneration&) { return plan({"true"}); });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InterruptedError& error) {
    EXPECT_EQ(error.signal_number(), SIGTERM);
  }
  sender.join();
  EXPECT_EQ(agent.left, 1);
}

TEST_F(LauncherTest, ABodyRunsAsAProgramOfItsOwnWould) {
  const UniqueFd leaked(::open("/dev/null", O_RDONLY));
  setenv("LOCKSTEP_TEST_TAKEN_AWAY", "x", 1);
  auto job = plan({"unused"});
  job.workers[0].unset = {"LOCKSTEP_TEST_TAKEN_AWAY"};
  job.workers[0].env.emplace_back("LOCKSTEP_TEST_GIVEN", "y");
  job.workers[0].body = [&] {
    struct sigaction term {};
    sigaction(SIGTERM, nullptr, &term);
    sigset_t blocked;
    sigprocmask(SIG_SETMASK, nullptr, &blocked);
    std::printf("%s %s %s %d %d %d %d\n", read_file("/proc/self/comm").c_str(),
                std::getenv("LOCKSTEP_TEST_GIVEN"), std::getenv("LOCKSTEP_TEST_TAKEN_AWAY"),
                term.sa_handler == SIG_DFL, sigismember(&blocked, SIGTERM), getpgid(0) == getpid(),
                fcntl(leaked.get(), F_GETFD));
    std::fputs(read_file("/proc/self/cmdline").c_str(), stdout);
    return 0;
  };
  if (kHasSanitizersThread) GTEST_SKIP() << "ThreadSanitizer has a thread of its own";
  ASSERT_TRUE(forks_can_go_on());
  const auto comm = read_file("/proc/self/comm");
  launch_once(job);
  unsetenv("LOCKSTEP_TEST_TAKEN_AWAY");
  EXPECT_EQ(content("0.out"),
            comm + " y (null) 1 0 1 -1\n" + read_file("/proc/self/cmdline").c_str());
}

TEST_F(LauncherTest, ABodysResultIsTheExitCode) {
  auto job = plan({"unused", "sleep 100"});
  job.workers[0].body = [] {
    std::fputs("oh no\n", stderr);
    return 7;
  };
  const auto text = failure(job, 7);
  expect_contains(text, "rank 0 (pid ");
  expect_contains(text, "exited with code 7");
  expect_contains(text, "oh no");
}

TEST_F(LauncherTest, ABodyEndsWithALauncherThatIsKilled) {
  const pid_t launcher = fork();
  if (launcher == 0) {
    auto job = plan({"unused"});
    job.workers[0].body = [&] {
      std::ofstream(folder_.path() / "pid.new") << getpid();
      fs::rename(folder_.path() / "pid.new", folder_.path() / "pid");
      while (true) pause();
      return 0;
    };
    launch_once(job);
    _exit(0);
  }
  ASSERT_TRUE(wait_for("pid"));
  const pid_t body = std::stoi(content("pid"));
  kill(launcher, SIGKILL);
  ASSERT_EQ(waitpid(launcher, nullptr, 0), launcher);
  expect_its_end(body);
}

TEST(Forks, CanGoOnWithoutOtherThreadsAndWithoutAPlaceOfOpenMp) {
  if (kHasSanitizersThread) GTEST_SKIP() << "ThreadSanitizer has a thread of its own";
  EXPECT_TRUE(forks_can_go_on());
  setenv("OMP_PROC_BIND", "true", 1);
  EXPECT_FALSE(forks_can_go_on());
  unsetenv("OMP_PROC_BIND");
  std::promise<void> end;
  std::thread other([&] { end.get_future().wait(); });
  EXPECT_FALSE(forks_can_go_on());
  end.set_value();
  other.join();
}

TEST_F(LauncherTest, LinesWithTheRanksOwnMarkGetNoSecondPrefix) {
  auto marked = plan({"echo '[rank0] warning: x'; echo '[rank1] other'; echo plain"});
  marked.workers[0].out.console = true;
  marked.workers[0].prefix = "[rank0]: ";
  marked.out_copies = {folder_.path() / "copies", {"warn", "plain"}};
  testing::internal::CaptureStdout();
  launch_once(marked);
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "[rank0] warning: x\n[rank0]: [rank1] other\n[rank0]: plain\n");
  EXPECT_EQ(content("copies"), "[rank0] warning: x\n[rank0]: plain\n");
}

TEST_F(LauncherTest, WhatWasShownLastIsRepeatedOnlyWhenAskedFor) {
  for (const bool repeats : {false, true}) {
    auto failing = plan({"echo why >&2; exit 3"});
    failing.workers[0].err.console = true;
    failing.repeat_shown_lines = repeats;
    testing::internal::CaptureStderr();
    const auto text = failure(failing, 3);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "why\n");
    EXPECT_EQ(text.find("why") != std::string::npos, repeats) << text;
  }
}

TEST_F(LauncherTest, WhatOthersHaveWrittenAfterIsAReasonToRepeat) {
  auto failing =
      plan({"echo why >&2; touch $OUT/said; until [ -e $OUT/after ]; do sleep 0.01; done; exit 3",
            "until [ -e $OUT/said ]; do sleep 0.01; done; echo after >&2; touch $OUT/after; sleep "
            "1000"});
  for (auto& worker : failing.workers) worker.err.console = true;
  failing.repeat_shown_lines = false;
  testing::internal::CaptureStderr();
  const auto text = failure(failing, 3);
  testing::internal::GetCapturedStderr();
  expect_contains(text, "why");
}

TEST_F(LauncherTest, AnUnwritableLogIsNamedAndNothingStarts) {
  auto bad = plan({"touch $OUT/started"});
  bad.workers[0].out.file = folder_.path() / "no" / "folder" / "x.log";
  expect_contains(failure(bad, 1), "no/folder/x.log");
  EXPECT_FALSE(fs::exists(folder_.path() / "started"));
}

}  // namespace launcher_test
}  // namespace lockstep::launch
