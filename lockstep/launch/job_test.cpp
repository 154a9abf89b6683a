#include "lockstep/launch/job.h"

#include <gtest/gtest.h>

#include <csignal>
#include <random>

namespace lockstep::launch {
namespace job_test {

using std::chrono::milliseconds;

constexpr int exited(int code) {
  return code << 8;
}

WorkerEnd end(int wait_status, int64_t ended_at = 1000) {
  WorkerEnd end;
  end.wait_status = wait_status;
  end.ended_at = ended_at;
  return end;
}

WorkerEnd lost_a_peer(int64_t ended_at = 1000) {
  auto lost = end(exited(1), ended_at);
  lost.consequence = true;
  return lost;
}

class JobTest : public testing::Test {
 protected:
  Job::Time at(int ms) const { return start_ + milliseconds(ms); }
  Job::Time start_ = std::chrono::steady_clock::now();
  Job job_{3, {}};
};

TEST_F(JobTest, SuccessIsThatOfAll) {
  EXPECT_EQ(job_.ended(1, end(0), at(1)), 0);
  EXPECT_EQ(job_.ended(0, end(0), at(2)), 0);
  EXPECT_FALSE(job_.all_ended());
  EXPECT_EQ(job_.ended(2, end(0), at(3)), 0);
  EXPECT_TRUE(job_.all_ended());
  EXPECT_EQ(job_.ending(), Job::Ending::success);
  EXPECT_FALSE(job_.root_cause());
  EXPECT_FALSE(job_.deadline());
}

TEST_F(JobTest, AFailureStopsTheOthersAtOnceAndKillsThemInTime) {
  EXPECT_EQ(job_.ended(1, end(exited(3)), at(0)), SIGTERM);
  ASSERT_TRUE(job_.deadline());
  EXPECT_LT(*job_.deadline(), at(1000)) << "all must be over within a second";
  EXPECT_EQ(job_.tick(at(10)), 0);
  EXPECT_EQ(job_.tick(*job_.deadline()), SIGKILL);
  EXPECT_FALSE(job_.deadline());
  job_.ended(0, end(SIGTERM), at(900));
  job_.ended(2, end(SIGKILL), at(900));
  EXPECT_EQ(job_.ending(), Job::Ending::failure);
  EXPECT_EQ(job_.root_cause(), 1);
}

TEST_F(JobTest, ALostPeerIsGivenTimeToSayWhy) {
  EXPECT_EQ(job_.ended(0, lost_a_peer(), at(0)), 0);
  ASSERT_TRUE(job_.deadline());
  EXPECT_EQ(job_.ended(2, lost_a_peer(), at(5)), 0);
  EXPECT_EQ(job_.ended(1, end(exited(7)), at(20)), 0) << "no one is left to be told";
  EXPECT_TRUE(job_.all_ended());
  EXPECT_EQ(job_.root_cause(), 1);
}

TEST_F(JobTest, ALostPeerThatStaysSilentEndsTheJobAllTheSame) {
  EXPECT_EQ(job_.ended(0, lost_a_peer(), at(0)), 0);
  EXPECT_EQ(job_.tick(*job_.deadline()), SIGTERM);
  EXPECT_EQ(job_.tick(*job_.deadline()), SIGKILL);
  job_.ended(1, end(SIGKILL), at(1000));
  job_.ended(2, end(SIGKILL), at(1000));
  EXPECT_EQ(job_.root_cause(), 0) << "the only one that failed of itself";
}

TEST_F(JobTest, TheCauseIsWhoReportedFirstEvenIfItEndedLater) {
  auto late = end(exited(1), 1002);
  late.said_at = 1000;
  EXPECT_EQ(job_.ended(0, end(exited(1), 1001), at(0)), SIGTERM);
  job_.ended(1, late, at(5));
  job_.ended(2, end(SIGTERM), at(5));
  EXPECT_EQ(job_.root_cause(), 1);
}

TEST_F(JobTest, AReportCountsEvenIfOurSignalCameBeforeTheExit) {
  EXPECT_EQ(job_.ended(0, lost_a_peer(1001), at(0)), 0);
  EXPECT_EQ(job_.tick(*job_.deadline()), SIGTERM);
  auto reported = end(SIGTERM, 1001);
  reported.said_at = 1001;
  job_.ended(1, reported, at(300));
  job_.ended(2, end(SIGTERM), at(300));
  EXPECT_EQ(job_.root_cause(), 1);
}

TEST_F(JobTest, AProgramThatCannotBeStartedIsACause) {
  WorkerEnd missing;
  missing.start_errno = 2;
  EXPECT_EQ(job_.ended(2, missing, at(0)), SIGTERM);
  EXPECT_EQ(job_.root_cause(), 2);
}

TEST_F(JobTest, TheSecondReportOfOneEndIsIgnored) {
  job_.ended(0, end(0), at(0));
  EXPECT_EQ(job_.ended(0, end(exited(127)), at(1)), 0);
  EXPECT_FALSE(job_.all_ended());
  EXPECT_TRUE(job_.end_of(0)->succeeded());
}

TEST_F(JobTest, ASignalIsForwardedAndItsEndIsNeverSuccess) {
  EXPECT_EQ(job_.signalled(SIGINT, at(0)), SIGINT);
  for (int i = 0; i < 3; ++i) job_.ended(i, end(0), at(10));
  EXPECT_EQ(job_.ending(), Job::Ending::interrupted);
  EXPECT_EQ(job_.signal(), SIGINT);
}

TEST_F(JobTest, WorkersThatFailOfASignalDoNotCutTheOthersShort) {
  EXPECT_EQ(job_.signalled(SIGTERM, at(0)), SIGTERM);
  EXPECT_EQ(job_.ended(0, end(SIGTERM), at(5)), 0);
  EXPECT_EQ(job_.tick(at(5000)), 0);
  EXPECT_EQ(job_.tick(at(30'000)), SIGKILL);
}

TEST_F(JobTest, ASecondSignalKillsButNotTheSameOneAtOnce) {
  EXPECT_EQ(job_.signalled(SIGTERM, at(0)), SIGTERM);
  EXPECT_EQ(job_.signalled(SIGTERM, at(1)), 0);
  EXPECT_EQ(job_.signalled(SIGTERM, at(400)), SIGKILL);
  EXPECT_EQ(job_.signalled(SIGTERM, at(800)), 0);
}

TEST_F(JobTest, AWorkerThatLeavesByUsr1InterruptsTheJobAndTheOthersGetTheTimeToSave) {
  for (const int status : {exited(128 + SIGUSR1), SIGUSR1}) {
    Job job(2, {});
    EXPECT_EQ(job.ended(0, end(status), at(0)), SIGTERM) << "not USR1, which they may have had";
    EXPECT_EQ(job.tick(at(5000)), 0);
    EXPECT_EQ(job.ended(1, end(exited(128 + SIGTERM)), at(6000)), 0);
    EXPECT_EQ(job.ending(), Job::Ending::interrupted);
    EXPECT_EQ(job.signal(), SIGUSR1);
  }
}

TEST_F(JobTest, Usr1BeforeTermIsWhyAWorkerLeaves) {
  EXPECT_EQ(job_.signalled(SIGTERM, at(0)), SIGTERM);
  EXPECT_EQ(job_.ended(0, end(exited(128 + SIGUSR1)), at(400)), 0);
  EXPECT_EQ(job_.signal(), SIGUSR1);
}

TEST_F(JobTest, AWorkerThatLeavesAfterAFailureDoesNotHideIt) {
  EXPECT_EQ(job_.ended(0, end(exited(3)), at(0)), SIGTERM);
  EXPECT_EQ(job_.ended(1, end(exited(128 + SIGUSR1)), at(10)), 0);
  EXPECT_EQ(job_.ending(), Job::Ending::failure);
  EXPECT_EQ(job_.late_signal(), SIGUSR1);
  EXPECT_EQ(job_.root_cause(), 0);
}

TEST_F(JobTest, ClosedOutputStopsTheWorkers) {
  EXPECT_EQ(job_.output_closed(at(0)), SIGTERM);
  EXPECT_EQ(job_.output_closed(at(1)), 0);
  for (int i = 0; i < 3; ++i) job_.ended(i, end(SIGTERM), at(10));
  EXPECT_EQ(job_.ending(), Job::Ending::output_closed);
}

TEST_F(JobTest, ASignalAfterTheEndIsNotForwardedButCounts) {
  for (int i = 0; i < 3; ++i) job_.ended(i, end(0), at(0));
  job_.signalled(SIGTERM, at(1));
  EXPECT_EQ(job_.ending(), Job::Ending::interrupted);
  EXPECT_FALSE(job_.deadline()) << "there is nobody left to wait for";
}

/// Whatever happens in whatever order: once told to stop, a job that ticks at its deadlines comes
/// to KILL, and a job in which anything went wrong is no success.
TEST(JobEvents, AnyOrderEnds) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const int workers = 1 + static_cast<int>(random() % 4);
    Job job(workers, {});
    auto now = std::chrono::steady_clock::now();
    bool wrong = false;
    bool killed = false;
    for (int step = 0; step < 20 && !job.all_ended(); ++step) {
      now += milliseconds(random() % 500);
      int signal = 0;
      switch (random() % 5) {
        case 0:
        case 1: {
          const int status = random() % 2 ? 0 : exited(1);
          const int who = static_cast<int>(random() % static_cast<unsigned>(workers));
          if (!job.end_of(who) && status != 0) wrong = true;
          auto how = end(status);
          how.consequence = random() % 2 == 0;
          signal = job.ended(who, how, now);
          break;
        }
        case 2:
          signal = job.signalled(SIGTERM, now);
          wrong = true;
          break;
        case 3:
          if (random() % 8 == 0) {
            signal = job.output_closed(now);
            wrong = true;
          }
          break;
        default:
          signal = job.tick(now);
      }
      killed |= signal == SIGKILL;
    }
    for (int i = 0; job.deadline() && i < 5; ++i) killed |= job.tick(*job.deadline()) == SIGKILL;
    EXPECT_FALSE(job.deadline());
    if (wrong && !job.all_ended()) {
      EXPECT_TRUE(killed);
    }
    for (int i = 0; i < workers; ++i) job.ended(i, end(killed ? SIGKILL : 0), now);
    EXPECT_EQ(job.ending() == Job::Ending::success, !wrong);
  }
}

}  // namespace job_test
}  // namespace lockstep::launch
