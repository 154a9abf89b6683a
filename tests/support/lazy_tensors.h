#pragma once

// For tests of backends: every call with tensors whose memory does not hold their values.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::test {

enum class Laziness { conjugated, negated };

/// One rank's part. Of a call either what is given is lazy or what is taken, and of what is changed
/// in place every second rank's: else the memory would match though no values travel.
class LazyRank {
 public:
  using Tensors = std::vector<at::Tensor>;
  LazyRank(ProcessGroup group, Laziness how, bool gives_lazy)
      : group_(std::move(group)), how_(how), gives_lazy_(gives_lazy) {}

  void reductions() const {
    at::Tensor tensor = changed(value(rank()));
    group_.all_reduce(tensor);
    expect_same(tensor, sum(), "all_reduce");
    Tensors several{changed(value(rank())), value(rank()), changed(value(rank() + 7))};
    group_.all_reduce_coalesced_async(several).wait();
    expect_same(several, {sum(), sum(), sum(7)}, "all_reduce_coalesced");
    tensor = changed(value(rank()));
    group_.reduce(tensor, 1);
    if (rank() == 1) expect_same(tensor, sum(), "reduce");
    tensor = taken();
    const auto shifted = list([&](int to) { return to + rank(); });
    group_.reduce_scatter(tensor, given(shifted));
    expect_same(tensor, sum(rank()), "reduce_scatter");
    tensor = taken();
    group_.reduce_scatter_tensor(tensor, given(at::cat(shifted)));
    expect_same(tensor, sum(rank()), "reduce_scatter_tensor");
  }

  void moves() const {
    at::Tensor tensor = changed(value(rank())), whole = taken(size()), one = taken();
    const auto from_each = list([](int from) { return from; });
    group_.broadcast_async(tensor, last()).wait();
    expect_same(tensor, value(last()), "broadcast");
    Tensors all = taken_list();
    group_.all_gather(all, given(value(rank())));
    expect_same(all, from_each, "all_gather");
    group_.all_gather_into_tensor(whole, given(value(rank())));
    expect_same(whole, at::cat(from_each), "all_gather_into_tensor");
    all = rank() == last() ? taken_list() : Tensors();
    group_.gather(all, given(value(rank())), last());
    if (rank() == last()) expect_same(all, from_each, "gather");
    group_.scatter(one, rank() == 1 ? given(from_each) : Tensors(), 1);
    expect_same(one, value(rank()), "scatter");
    const auto to_each = list([&](int to) { return 10 * rank() + to; });
    const auto for_me = list([&](int from) { return 10 * from + rank(); });
    all = taken_list();
    group_.all_to_all(all, given(to_each));
    expect_same(all, for_me, "all_to_all");
    whole = taken(size());
    group_.all_to_all_single(whole, given(at::cat(to_each)));
    expect_same(whole, at::cat(for_me), "all_to_all_single");
  }

  void messages() const {
    at::Tensor tensor = taken();
    if (rank() == 0) {
      group_.send(given(value(5)), 1);
      group_.isend(given(value(6)), last()).wait();
    }
    if (rank() == 1) {
      group_.irecv(tensor, 0).wait();
      expect_same(tensor, value(5), "irecv");
    }
    if (rank() == last()) {
      EXPECT_EQ(group_.recv_any(tensor), 0);
      expect_same(tensor, value(6), "recv_any");
    }
  }

 private:
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  int last() const { return size() - 1; }

  at::Tensor value(int number) const {
    const at::Tensor real = at::arange(6, at::kFloat) + 10 * number;
    return how_ == Laziness::negated ? real : at::complex(real, real + 1);
  }
  template <class Number>
  Tensors list(Number number) const {
    Tensors list;
    for (int other = 0; other < size(); ++other) list.push_back(value(number(other)));
    return list;
  }
  at::Tensor sum(int more = 0) const {
    at::Tensor sum = value(more);
    for (int other = 1; other < size(); ++other) sum += value(other + more);
    return sum;
  }
  /// A tensor of these values whose memory holds others, though it is contiguous.
  at::Tensor lazy(const at::Tensor& values) const {
    at::Tensor made =
        how_ == Laziness::negated ? at::_neg_view(-values) : at::conj_physical(values).conj();
    EXPECT_TRUE(made.is_contiguous() && (made.is_neg() || made.is_conj()));
    return made;
  }
  at::Tensor given(const at::Tensor& values) const { return gives_lazy_ ? lazy(values) : values; }
  Tensors given(Tensors values) const {
    for (auto& tensor : values) tensor = given(tensor);
    return values;
  }
  at::Tensor changed(const at::Tensor& values) const {
    return (rank() % 2 == 0) == gives_lazy_ ? lazy(values) : values;
  }
  at::Tensor taken(int times = 1) const {
    const at::Tensor values = value(99).repeat({times});
    return gives_lazy_ ? values : lazy(values);
  }
  Tensors taken_list() const {
    Tensors list;
    for (int other = 0; other < size(); ++other) list.push_back(taken());
    return list;
  }

  static void expect_same(const at::Tensor& got, const at::Tensor& wanted, const char* call) {
    EXPECT_TRUE(at::equal(got.clone(), wanted)) << call << ": " << got << "\nexpected " << wanted;
  }
  static void expect_same(const Tensors& got, const Tensors& wanted, const char* call) {
    for (size_t i = 0; i < wanted.size(); ++i) expect_same(got.at(i), wanted[i], call);
  }

  const ProcessGroup group_;
  const Laziness how_;
  const bool gives_lazy_;
};

/// For two ranks or more.
inline void take_lazy_tensors(const ProcessGroup& group, Laziness how) {
  for (const bool gives_lazy : {true, false}) {
    const LazyRank me(group, how, gives_lazy);
    me.reductions();
    me.moves();
    me.messages();
  }
}

/// For two ranks or more. Such zeros are what forward-mode derivatives are made of.
inline void take_zeros_without_memory(const ProcessGroup& group) {
  at::Tensor zeros = at::_efficientzerotensor({4}, at::kFloat);
  std::vector<at::Tensor> outputs;
  for (int rank = 0; rank < group.size(); ++rank) outputs.push_back(at::ones({4}));
  group.all_gather(outputs, zeros);
  for (const auto& output : outputs) EXPECT_EQ(output.sum().item<float>(), 0);
  at::Tensor received = at::ones({4});
  if (group.rank() == 0) group.send(zeros, 1);
  if (group.rank() == 1) group.recv(received, 0);
  EXPECT_EQ(received.sum().item<float>(), group.rank() == 1 ? 0 : 4);
  EXPECT_THROW(group.all_reduce(zeros), UsageError);
  EXPECT_THROW(group.recv(zeros, 0), UsageError);
  group.barrier();
}

}  // namespace lockstep::test
