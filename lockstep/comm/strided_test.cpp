// Tensors that are not contiguous, by backend: taken by those that say so, else refused before
// anything is sent. (mpi: mpi_collectives_test.cpp.)
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace strided_test {

using test::run_group;
using Tensors = std::vector<at::Tensor>;

at::Tensor strided(int number) {
  return (at::arange(12, at::kFloat).view({3, 4}) + 100 * number).t();
}

at::Tensor strided_zeros(at::IntArrayRef shape = {3, 4}) {
  return at::zeros(shape).t();
}

void expect_same(const at::Tensor& got, const at::Tensor& wanted, const char* operation) {
  EXPECT_TRUE(at::equal(got, wanted)) << operation << ": " << got << "\nexpected " << wanted;
  EXPECT_FALSE(got.is_contiguous()) << operation;
}

struct Member {
  ProcessGroup group;
  int rank = group.rank();
  int size = group.size();

  /// One for each rank; `number(r)` of strided.
  template <class Number>
  Tensors each(Number number) const {
    Tensors list;
    for (int r = 0; r < size; ++r) list.push_back(strided(number(r)));
    return list;
  }
  Tensors zeros() const {
    Tensors list;
    for (int r = 0; r < size; ++r) list.push_back(strided_zeros());
    return list;
  }
  at::Tensor sum() const {
    at::Tensor sum = strided(0).clone();
    for (int r = 1; r < size; ++r) sum += strided(r);
    return sum;
  }
};

void reductions(const Member& me) {
  at::Tensor tensor = strided(me.rank);
  me.group.all_reduce(tensor);
  expect_same(tensor, me.sum(), "all_reduce");
  Tensors several{strided(me.rank), strided(me.rank) + 1};
  me.group.all_reduce_coalesced_async(several).wait();
  expect_same(several[0], me.sum(), "all_reduce_coalesced");
  expect_same(several[1], me.sum() + me.size, "all_reduce_coalesced");
  tensor = strided(me.rank);
  me.group.reduce(tensor, 1);
  if (me.rank == 1) expect_same(tensor, me.sum(), "reduce");
  tensor = strided_zeros();
  me.group.reduce_scatter(tensor, me.each([&](int r) { return r * me.rank; }));
  expect_same(tensor, strided(0) * me.size + 100 * me.rank * (me.size * (me.size - 1) / 2),
              "reduce_scatter");
}

void moves(const Member& me) {
  at::Tensor tensor = strided(me.rank);
  me.group.broadcast_async(tensor, 2).wait();
  expect_same(tensor, strided(2), "broadcast");
  Tensors all = me.zeros();
  me.group.all_gather(all, strided(me.rank));
  for (int r = 0; r < me.size; ++r) expect_same(all[static_cast<size_t>(r)], strided(r), "gather");
  Tensors gathered = me.rank == 2 ? me.zeros() : Tensors();
  me.group.gather(gathered, strided(me.rank), 2);
  for (size_t r = 0; r < gathered.size(); ++r)
    expect_same(gathered[r], strided(static_cast<int>(r)), "gather");
  tensor = strided_zeros();
  me.group.scatter(tensor, me.rank == 1 ? me.each([](int r) { return r + 5; }) : Tensors(), 1);
  expect_same(tensor, strided(me.rank + 5), "scatter");
  Tensors received = me.zeros();
  me.group.all_to_all(received, me.each([&](int r) { return 10 * me.rank + r; }));
  for (int r = 0; r < me.size; ++r)
    expect_same(received[static_cast<size_t>(r)], strided(10 * r + me.rank), "all_to_all");
  // Rows of a transposed tensor: rank r's row for each rank is 10 * r.
  const at::Tensor rows = at::full({2, me.size}, 10 * me.rank).t();
  tensor = at::zeros({2, me.size}, at::kLong).t();
  me.group.all_to_all_single(tensor, rows);
  expect_same(tensor, (at::arange(me.size) * 10).unsqueeze(0).expand({2, me.size}).t(),
              "all_to_all_single");
}

void messages(const Member& me) {
  at::Tensor tensor = strided_zeros();
  if (me.rank == 0) {
    me.group.send(strided(7), 1, 5);
    me.group.send(strided(8), 2);
  } else if (me.rank == 1) {
    me.group.recv(tensor, 0, 5);
    expect_same(tensor, strided(7), "recv");
  } else {
    EXPECT_EQ(me.group.recv_any(tensor), 0);
    expect_same(tensor, strided(8), "recv_any");
  }
  // Who asks for the end, and who is told of it, finds the result too.
  tensor = strided_zeros();
  if (me.rank == 0) {
    const Work work = me.group.irecv(tensor, 2);
    while (!work.is_completed()) std::this_thread::yield();
    expect_same(tensor, strided(9), "irecv");
  } else if (me.rank == 2) {
    me.group.send(strided(9), 0);
  }
}

// A parameter's gradient-requiring memory may be a result, whatever copies are made.
void leaves(const Member& me) {
  at::Tensor leaf = strided(me.rank).requires_grad_();
  me.group.all_reduce_async(leaf).wait();
  expect_same(leaf.detach(), me.sum(), "all_reduce of a leaf");
  leaf = strided(me.rank).requires_grad_();
  me.group.reduce(leaf, 0);
  if (me.rank == 0) expect_same(leaf.detach(), me.sum(), "reduce of a leaf");
  leaf = strided_zeros().requires_grad_();
  if (me.rank == 0) me.group.send(strided(3), 1);
  if (me.rank == 1) {
    me.group.recv(leaf, 0);
    expect_same(leaf.detach(), strided(3), "recv into a leaf");
  }
  Tensors contiguous{at::full({3}, me.rank, at::kFloat).requires_grad_(),
                     at::ones({2}).requires_grad_()};
  me.group.all_reduce_coalesced_async(contiguous).wait();
  EXPECT_TRUE(at::equal(contiguous[1].detach(), at::full({2}, me.size, at::kFloat)));
  EXPECT_TRUE(leaf.is_leaf());
}

void takes_them(const ProcessGroup& group) {
  const Member me{group};
  reductions(me);
  moves(me);
  messages(me);
  leaves(me);
}

TEST(Strided, SharedMemoryTakesThem) {
  run_group(3, takes_them, {.backend = "shm"});
}

TEST(Strided, HierarchicalTakesThem) {
  run_group(3, takes_them, {.backend = "hierarchical", .hosts = "aab"});
}

TEST(Strided, GlooRefusesThem) {
  run_group(2, [](ProcessGroup group) {
    at::Tensor tensor = strided(group.rank());
    EXPECT_THROW(group.all_reduce(tensor), UsageError);
    EXPECT_THROW(group.send(tensor, 1 - group.rank()), UsageError);
    group.barrier();
  });
}

// Hierarchical without a hierarchy is the simpler backend, with that one's traits.
TEST(Strided, GlooInPlaceOfHierarchicalRefusesThem) {
  run_group(2,
            [](ProcessGroup group) {
              at::Tensor tensor = strided(group.rank());
              EXPECT_THROW(group.all_reduce(tensor), UsageError);
              group.barrier();
            },
            {.backend = "hierarchical", .hosts = "ab"});
}

}  // namespace strided_test
}  // namespace lockstep
