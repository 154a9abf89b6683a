// Works, groups, messages and mistakes over the backend mpi; mpirun starts the ranks.
#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "tests/support/message_of.h"
#include "tests/support/mpi_test_ranks.h"
#include "tests/support/page_faults.h"
#include "tests/support/watched_calls.h"

namespace lockstep::mpi::test {
namespace mpi_works_test {

using lockstep::test::message_of;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Waits until every rank of the job has come here, over the store.
void meet(const std::string& where) {
  Store store = world().store();
  store.add(where, 1);
  for (int i = 0; store.add(where, 0) < world().size(); ++i) {
    ASSERT_LT(i, 60'000) << where;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_F(Ranks, AsynchronousCallsKeepTheirOrderAndResolveTheirFutures) {
  constexpr int kCalls = 60;
  std::vector<Tensors> data;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::atomic<int> called{0};
  for (int i = 0; i < kCalls; ++i) data.push_back({at::full({i * 100 + 1}, rank() + i)});
  for (int i = 0; i < kCalls; ++i) {
    if (i % size() == rank()) std::this_thread::yield();  // Another rank is late at each call.
    works.push_back(mpi->allreduce(data[static_cast<size_t>(i)], {}));
    works.back()->getFuture()->addCallback([&](c10::ivalue::Future&) { ++called; });
  }
  for (int i = 0; i < kCalls; ++i) {
    const auto& work = works[static_cast<size_t>(i)];
    work->wait();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    const at::Tensor result = work->getFuture()->value().toTensorVector()[0];
    EXPECT_EQ(result[i * 100].item<int64_t>(), size() * (size() - 1) / 2 + i * size());
  }
  EXPECT_EQ(called, kCalls);
}

TEST_F(Ranks, AGroupCanBeUsedFromACallback) {
  Tensors first{at::ones({100'000})}, second{at::ones({3})};
  auto work = mpi->allreduce(first, {});
  auto after = work->getFuture()->then(
      [&](c10::ivalue::Future&) {
        mpi->allreduce(second, {})->wait();
        return c10::IValue(1);
      },
      c10::IntType::get());
  after->wait();
  expect_same(second[0], at::full({3}, static_cast<float>(size())), "second");
}

// Also where MPI's thread, which has grad mode, ends the call.
TEST_F(Ranks, LeavesThatRequireAGradientMayBeResults) {
  const auto leaf = [](int64_t count) { return at::ones({count}).set_requires_grad(true); };
  const auto n = static_cast<float>(size());
  for (const bool strided : {false, true}) {
    for (const auto op : {Op::SUM, Op::AVG}) {
      const float sum = op == Op::SUM ? n : 1;
      const at::NoGradGuard no_grad;
      const auto taken = [&](int64_t count) {
        return strided ? at::ones({count, 2}).t().set_requires_grad(true) : leaf(count);
      };
      Tensors all{taken(5)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      mpi->allreduce(all, options)->wait();
      EXPECT_EQ(all[0].sum().item<float>(), sum * static_cast<float>(all[0].numel()));
      Tensors one{taken(5)};
      c10d::ReduceOptions reduce;
      reduce.reduceOp = op;
      mpi->reduce(one, reduce)->wait();
      if (rank() == 0) {
        EXPECT_EQ(one[0].sum().item<float>(), sum * all[0].numel());
      }
      at::Tensor part = taken(3), whole = leaf(part.numel() * size());
      c10d::ReduceScatterOptions scatter;
      scatter.reduceOp = op;
      mpi->_reduce_scatter_base(part, whole, scatter)->wait();
      EXPECT_EQ(part.sum().item<float>(), sum * part.numel());
    }
  }
}

TEST_F(Ranks, ACallShowsInTracesUntilItsEnd) {
  lockstep::test::WatchedCalls watched("mpi");
  Tensors sum{at::ones({7})}, sent{at::ones({3})}, received{at::zeros({3})};
  auto work = mpi->allreduce(sum, {});
  work->wait();
  auto send = mpi->send(sent, (rank() + 1) % size(), 0);
  mpi->recv(received, (rank() + size() - 1) % size(), 0)->wait();
  send->wait();
  const auto seen = watched.seen();  // While the works live.
  const std::vector<std::string> names{"mpi:all_reduce", "mpi:recv", "mpi:send"};
  ASSERT_EQ(seen.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(seen[i].name, names[i]);
    EXPECT_EQ(seen[i].shapes, (std::vector<std::vector<int64_t>>{{i == 0 ? 7 : 3}}));
    EXPECT_TRUE(seen[i].ended) << names[i];
  }
}

TEST_F(Ranks, AWorkMayBeDropped) {
  const at::Tensor sum = at::ones({100'000});
  {
    Tensors dropped{sum};
    mpi->allreduce(dropped, {});
  }
  mpi->barrier({})->wait();
  // Works of one group end in any order, but this one began after it, and shutdown waits for both.
  mpi->shutdown();
  expect_same(sum, at::full({100'000}, static_cast<float>(size())), "sum");
  mpi = make_group("AWorkMayBeDropped again", everyone());
}

// Legal, as the calls are asynchronous.
TEST_F(Ranks, TwoGroupsMayBeCalledInDifferentOrders) {
  auto other = make_group("other", everyone());
  for (int round = 0; round < 20; ++round) {
    Tensors a{at::ones({50'000})}, b{at::ones({50'000})};
    const bool even = rank() % 2 == 0;
    auto first = even ? mpi->allreduce(a, {}) : other->allreduce(b, {});
    auto second = even ? other->allreduce(b, {}) : mpi->allreduce(a, {});
    first->wait();
    second->wait();
    EXPECT_EQ(a[0][49'999].item<float>(), static_cast<float>(size()));
    EXPECT_EQ(b[0][49'999].item<float>(), static_cast<float>(size()));
  }
  other->shutdown();
}

TEST_F(Ranks, GroupsOfSomeRanksAreFormedByTheirMembersAlone) {
  // Neighbours overlap, so each rank is in two of these groups, and in no other.
  if (size() < 3) GTEST_SKIP() << "needs 3 ranks";
  std::vector<BackendPtr> mine;
  for (int r = 0; r < size(); ++r) {
    const std::vector<int> pair{r, (r + 1) % size()};
    if (rank() != pair[0] && rank() != pair[1]) continue;
    mine.push_back(make_group("pair " + std::to_string(r), {pair[0], pair[1]}));
  }
  ASSERT_EQ(mine.size(), 2U);
  for (const auto& pair : mine) {
    const at::Tensor sum = at::ones({10});
    all_reduce(*pair, sum);
    expect_same(sum, at::full({10}, 2.0F), "pair");
  }
  for (const auto& pair : mine) pair->shutdown();
}

size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

TEST_F(Ranks, ManyGroupsLeaveNothingBehind) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer keeps what was freed";
#endif
  size_t before = 0;
  for (int round = 0; round < 600; ++round) {
    auto group = make_group("round " + std::to_string(round), everyone());
    all_reduce(*group, at::ones({3}));
    group->shutdown();
    if (round == 100) before = resident_bytes();
  }
  // A communicator of MPI's takes some 5 KB, and MPI counts them by 16 bits or more.
  EXPECT_LT(resident_bytes(), before + (16 << 20));
}

TEST_F(Ranks, MessagesAreMatchedByTag) {
  const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
  Tensors small{at::full({5}, rank(), at::kInt)}, large{at::full({300'000}, rank() + 0.5)};
  Tensors got_small{at::zeros({5}, at::kInt)}, got_large{at::zeros({300'000})};
  std::vector<c10::intrusive_ptr<c10d::Work>> works{
      mpi->recv(got_large, previous, 2), mpi->recv(got_small, previous, 1),
      mpi->send(small, next, 1), mpi->send(large, next, 2)};
  for (const auto& work : works) work->wait();
  expect_same(got_small[0], at::full({5}, previous, at::kInt), "small");
  expect_same(got_large[0], at::full({300'000}, previous + 0.5), "large");
  EXPECT_EQ(works[0]->sourceRank(), previous);
}

TEST_F(Ranks, MessagesOfNothingOfManyTypesAndOfStridedTensors) {
  const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
  for (const auto type : {at::kBool, at::kHalf, at::kBFloat16, at::kLong, at::kComplexDouble}) {
    for (const int64_t count : {0, 1, 5000}) {
      Tensors out{whole_numbers(seed(), rank(), {count}, type)}, in{at::zeros({count}, type)};
      auto sent = mpi->send(out, next, 3);
      mpi->recv(in, previous, 3)->wait();
      sent->wait();
      expect_same(in[0], whole_numbers(seed(), previous, {count}, type), c10::toString(type));
    }
  }
  Tensors out{at::arange(rank(), rank() + 600, at::kLong).view({20, 30}).t()};
  Tensors in{at::zeros({20, 30}, at::kLong).t()};
  auto sent = mpi->send(out, next, 4);
  mpi->recv(in, previous, 4)->wait();
  sent->wait();
  expect_same(in[0], at::arange(previous, previous + 600, at::kLong).view({20, 30}).t(), "strided");
}

TEST_F(Ranks, ReceivesFromAnyRankTellWhoSent) {
  if (rank() != 0) {
    Tensors out{at::full({1000}, rank(), at::kInt)};
    mpi->send(out, 0, 9)->wait();
    return;
  }
  std::vector<bool> seen(static_cast<size_t>(size()), false);
  for (int i = 1; i < size(); ++i) {
    Tensors in{at::zeros({1000}, at::kInt)};
    auto work = mpi->recvAnysource(in, 9);
    work->wait();
    const int source = work->sourceRank();
    EXPECT_EQ(in[0][999].item<int>(), source);
    EXPECT_FALSE(seen[static_cast<size_t>(source)]);
    seen[static_cast<size_t>(source)] = true;
  }
}

TEST_F(Ranks, AMessageOfAnotherSizeIsAnErrorOfItsReceiver) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  for (const int64_t sent : {3, 8}) {
    if (rank() == 0) {
      Tensors out{at::ones({sent})};
      mpi->send(out, 1, 5)->wait();
    } else if (rank() == 1) {
      Tensors in{at::ones({5})};
      const std::string text = message_of<MismatchError>([&] { mpi->recv(in, 0, 5)->wait(); });
      EXPECT_THAT(text, AnyOf(HasSubstr("got 3 elements from rank 0, expected 5"),
                              HasSubstr("more data than fits its tensor, expected 5")));
    }
  }
  all_reduce(*mpi, at::ones({2}));  // The group is as good as before.
}

TEST_F(Ranks, AReceiveThatNobodySendsToTimesOutAndHarmsNothing) {
  mpi->setTimeout(std::chrono::milliseconds(100));
  Tensors in{at::zeros({5})};
  const std::string text =
      message_of<std::runtime_error>([&] { mpi->recv(in, (rank() + 1) % size(), 6)->wait(); });
  EXPECT_THAT(text, AllOf(HasSubstr("recv"), HasSubstr("timed out after 0.1 s")));
  mpi->setTimeout(std::chrono::seconds(60));
  const at::Tensor sum = at::ones({5});
  all_reduce(*mpi, sum);
  expect_same(in[0], at::zeros({5}), "what was not received");
}

TEST_F(Ranks, ACollectiveWithoutAllRanksTimesOutAndTheGroupSaysSoFromThenOn) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  auto group = make_group("late", everyone());
  const at::Tensor sum = at::ones({1000});
  if (rank() != 1) {
    Tensors tensors{sum};
    c10d::AllreduceOptions options;
    options.timeout = std::chrono::milliseconds(200);
    const std::string text =
        message_of<std::runtime_error>([&] { group->allreduce(tensors, options)->wait(); });
    EXPECT_THAT(text, HasSubstr("all_reduce(sum) of float32 [1000], collective 1 of group 'late', "
                                "timed out after 0.2 s"));
    EXPECT_THROW(group->barrier({})->wait(), CommError);
  }
  meet("late");
  // The call of the others is under way all the same: MPI cannot take it back.
  if (rank() == 1) all_reduce(*group, sum);
  expect_same(rank() == 1 ? sum : at::ones({1}),
              rank() == 1 ? at::full({1000}, static_cast<float>(size())) : at::ones({1}), "sum");
  group->shutdown();
}

TEST_F(Ranks, AShortWaitLeavesTheWorkGoingOn) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  Tensors sum{at::ones({4})};
  if (rank() == 0) {
    auto work = mpi->allreduce(sum, {});
    EXPECT_THROW(work->wait(std::chrono::milliseconds(50)), TimeoutError);
    meet("short wait");
    work->wait();
  } else {
    meet("short wait");
    mpi->allreduce(sum, {})->wait();
  }
  expect_same(sum[0], at::full({4}, static_cast<float>(size())), "sum");
}

TEST_F(Ranks, AMissingMemberIsATimeOutOfTheForming) {
  if (size() < 2 || rank() == 1) return;
  auto options = options_of("never formed", everyone(), std::chrono::milliseconds(200));
  EXPECT_ANY_THROW(make(options));
}

TEST_F(Ranks, MisuseIsAnErrorOfThisRankAlone) {
  EXPECT_THROW(all_reduce(*mpi, at::ones({2}), Op::BAND), UsageError);
  EXPECT_THROW(all_reduce(*mpi, at::ones({2}, at::kBool), Op::AVG), UsageError);
  EXPECT_THROW(all_reduce(*mpi, at::ones({2}, at::kComplexFloat), Op::MAX), UsageError);
  EXPECT_THROW(all_reduce(*mpi, at::ones({2}), c10d::makePreMulSum(2.0)), UsageError);
  Tensors one{at::ones({2})}, two{at::ones({1}), at::ones({1})}, sparse{at::ones({2}).to_sparse()};
  c10d::BroadcastOptions root;
  root.rootRank = size();
  EXPECT_THROW(mpi->broadcast(one, root), UsageError);
  EXPECT_THROW(mpi->broadcast(sparse, {}), UsageError);
  EXPECT_THROW(mpi->allreduce(two, {}), UsageError);
  EXPECT_THROW(mpi->send(one, size(), 0), UsageError);
  EXPECT_THROW(mpi->send(one, 0, -1), UsageError);
  // 2^31 elements, which take no memory.
  Tensors huge{at::ones({1}, at::kByte).expand({int64_t{1} << 31})};
  EXPECT_THROW(mpi->send(huge, 0, 0), UsageError);
}

TEST_F(Ranks, AClosedGroupSaysSo) {
  auto group = make_group("closed", everyone());
  group->shutdown();
  EXPECT_TRUE(lockstep::test::is_plain_comm_error([&] { all_reduce(*group, at::ones({1})); }));
}

// Through the World: the checks, the names, and groups as a program makes them.
TEST(MpiWorld, TakesTheRanksOfMpirun) {
  EXPECT_EQ(world().group().backend(), "mpi");
  EXPECT_EQ(world().size(), Engine::running()->size());
  EXPECT_EQ(world().rank(), Engine::running()->rank());
  EXPECT_FALSE(version().empty());
}

TEST(MpiWorld, RanksThatCallDifferentlyAreNamed) {
  if (world().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto group = world().new_group(everyone(), "mpi");
  at::Tensor tensor = at::ones({world().rank() == 1 ? 5 : 4});
  EXPECT_THAT(message_of<MismatchError>([&] { group.all_reduce(tensor); }),
              HasSubstr("rank 1 called all_reduce(sum) of float32 [5]"));
  at::Tensor after = at::ones({4});
  group.all_reduce(after);
  EXPECT_EQ(after[3].item<float>(), static_cast<float>(world().size()));
}

TEST(MpiWorld, ASendAndAReceiveThatDoNotFitAreNamed) {
  if (world().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto group = world().new_group(everyone(), "mpi");
  at::Tensor tensor = at::ones({world().rank() == 1 ? 5 : 4});
  const int rank = world().rank();
  if (rank < 2) {
    EXPECT_THROW(rank == 0 ? group.send(tensor, 1) : group.recv(tensor, 0), MismatchError);
  }
  group.barrier();
}

TEST(MpiWorld, ARankThatDoesNotComeIsNamed) {
  if (world().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  auto group = world().new_group(everyone(), "mpi");
  for (int i = 0; i < 12; ++i) group.barrier();  // What is compared is behind them.
  at::Tensor tensor = at::ones({4});
  if (world().rank() != 1) {
    group.set_timeout(std::chrono::milliseconds(200));
    EXPECT_EQ(lockstep::test::ranks_of<TimeoutError>([&] { group.all_reduce(tensor); }),
              (std::vector<int>{1}));
  }
  meet("does not come");
  if (world().rank() == 1) group.all_reduce(tensor);
}

TEST(MpiWorld, SplitsAndObjects) {
  const auto half = world().group().split(world().rank() % 2);
  at::Tensor one = at::ones({1});
  half.all_reduce(one);
  EXPECT_EQ(one.item<float>(), static_cast<float>(half.size()));
  const auto all = world().group().all_gather_object({{"rank", world().rank()}});
  for (int rank = 0; rank < world().size(); ++rank)
    EXPECT_EQ(all[static_cast<size_t>(rank)]["rank"], rank);
}

}  // namespace mpi_works_test
}  // namespace lockstep::mpi::test
