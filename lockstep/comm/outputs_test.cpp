// What may be an output: refused are another dtype than the inputs' and elements or outputs that
// share memory, before anything is sent, so that the group can still be used. Leaves that require a
// gradient are taken, and outputs that share memory with inputs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/comm/checks/call_signature.h"
#include "tests/support/message_of.h"
#include "tests/support/run_group.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace outputs_test {

using Tensors = std::vector<at::Tensor>;

Tensors one_each(const ProcessGroup& group, at::ScalarType dtype) {
  Tensors list;
  for (int rank = 0; rank < group.size(); ++rank) list.push_back(at::ones({4}, dtype));
  return list;
}

void refuses_other_outputs(const ProcessGroup& group) {
  const auto given = at::ones({4}, at::kFloat), all_given = at::ones({12}, at::kFloat);
  const auto inputs = one_each(group, at::kFloat);
  auto outputs = one_each(group, at::kInt);
  auto output = at::ones({4}, at::kInt), all = at::ones({12}, at::kInt);
  const bool root = group.rank() == 1;
  auto gathered = root ? outputs : Tensors();
  EXPECT_THROW(group.all_to_all(outputs, inputs), UsageError);
  EXPECT_THROW(group.all_to_all_single(all, all_given), UsageError);
  EXPECT_THROW(group.all_gather(outputs, given), UsageError);
  EXPECT_THROW(group.all_gather_into_tensor(all, given), UsageError);
  EXPECT_THROW(group.reduce_scatter(output, inputs), UsageError);
  EXPECT_THROW(group.reduce_scatter_tensor(output, all_given), UsageError);
  if (root) {
    EXPECT_THROW(group.gather(gathered, given, 1), UsageError);
    EXPECT_THROW(group.scatter(output, inputs, 1), UsageError);
  }
  EXPECT_EQ(output.sum().item<int>(), 4) << "nothing was written";
  auto sum = at::ones({4}, at::kFloat);
  group.all_reduce(sum);
  EXPECT_EQ(sum.sum().item<float>(), 4.0F * 3);
}

void refuses_shared_elements(const ProcessGroup& group) {
  auto shared = at::zeros({1}).expand({3});
  EXPECT_THROW(group.all_reduce(shared), UsageError);
  EXPECT_THROW(group.all_gather_into_tensor(shared, at::ones({1})), UsageError);
  EXPECT_THROW(group.recv(shared, (group.rank() + 1) % 3), UsageError);
  group.barrier();
}

/// Begins a call on rank 2 when the others have begun theirs, so that these end on another thread
/// than the caller's, which has grad mode.
class LateRank {
 public:
  template <class Call>
  Work begin(const ProcessGroup& group, Call call) {
    const int calls = ++calls_[static_cast<size_t>(group.rank())];
    if (group.rank() == 2)
      test_wait::wait_until([&] { return begun_ >= 2 * calls; }, "the other ranks' call");
    Work work = call();
    if (group.rank() != 2) ++begun_;
    return work;
  }

 private:
  std::array<int, 3> calls_{};
  std::atomic<int> begun_{0};
};

void takes_leaves(const ProcessGroup& group, LateRank& late, bool strided) {
  const at::NoGradGuard no_grad;
  const auto leaf = [&](int64_t count) {
    at::Tensor tensor = strided ? at::zeros({count, 2}).t() : at::zeros({count});
    return tensor.fill_(group.rank() + 1).requires_grad_();
  };
  const auto leaves = [&] { return Tensors{leaf(4), leaf(4), leaf(4)}; };
  const auto done = [&](const char* operation, const Tensors& outputs,
                        const std::vector<float>& wanted, auto call) {
    late.begin(group, call).wait();
    for (size_t i = 0; i < outputs.size(); ++i)
      EXPECT_TRUE(at::equal(outputs[i], at::full_like(outputs[i], wanted[i])))
          << operation << " " << outputs[i];
  };
  const bool root = group.rank() == 1;
  const float mine = static_cast<float>(group.rank()) + 1;
  const std::vector<float> of_each{1, 2, 3};
  at::Tensor one = leaf(4), part = leaf(4);
  Tensors list = leaves(), given = leaves(), none;
  done("all_reduce", {one}, {6}, [&] { return group.all_reduce_async(one); });
  one = leaf(4);
  done("average", {one}, {2}, [&] { return group.all_reduce_async(one, ReduceOp::avg); });
  done("all_reduce_coalesced", list, {6, 6, 6},
       [&] { return group.all_reduce_coalesced_async(list); });
  one = leaf(4);
  done("reduce", root ? Tensors{one} : none, {2},
       [&] { return group.reduce_async(one, 1, ReduceOp::avg); });
  one = leaf(4);
  done("broadcast", {one}, {2}, [&] { return group.broadcast_async(one, 1); });
  one = leaf(4);
  list = leaves();
  done("all_gather", list, of_each, [&] { return group.all_gather_async(list, one); });
  list = leaves();
  auto& gathered = root ? list : none;
  done("gather", gathered, of_each, [&] { return group.gather_async(gathered, one, 1); });
  done("scatter", {part}, {2}, [&] { return group.scatter_async(part, root ? given : none, 1); });
  done("reduce_scatter", {part}, {6}, [&] { return group.reduce_scatter_async(part, given); });
  list = leaves();
  done("all_to_all", list, of_each, [&] { return group.all_to_all_async(list, given); });
  at::Tensor all = leaf(12), whole = leaf(12);
  part = leaf(4);
  done("reduce_scatter_tensor", {part}, {2},
       [&] { return group.reduce_scatter_tensor_async(part, whole, ReduceOp::avg); });
  done("all_gather_into_tensor", {}, {},
       [&] { return group.all_gather_into_tensor_async(all, part); });
  EXPECT_EQ(all.max().item<float>(), 2);
  at::Tensor received =
      strided ? at::zeros({2, 3}).t().requires_grad_() : at::zeros({3}).requires_grad_();
  const at::Tensor sent = at::full_like(received, mine).requires_grad_();
  done("all_to_all_single", {}, {}, [&] { return group.all_to_all_single_async(received, sent); });
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(received[rank].max().item<float>(), static_cast<float>(rank + 1));
  const int next = (group.rank() + 1) % 3, last = (group.rank() + 2) % 3;
  one = leaf(4);
  const Work send = group.isend(at::full_like(one, mine), next);
  group.irecv(one, last).wait();
  send.wait();
  EXPECT_TRUE(at::equal(one, at::full_like(one, last + 1)));
  at::Tensor sparse = at::eye(3).to_sparse().requires_grad_();
  group.all_reduce_async(sparse).wait();
  EXPECT_TRUE(at::equal(sparse.to_dense(), at::eye(3) * 3));
}

/// One row a rank, where a tensor is given or taken; in others all elements lie in one row.
void takes_rows_of_ranks(const ProcessGroup& group) {
  const auto part = [](int rank) { return at::arange(4, at::kFloat).view({2, 2}) + 10 * rank; };
  const at::Tensor rows = at::stack({part(0), part(1), part(2)});
  at::Tensor stacked = at::empty({3, 2, 2}), flat = at::empty({12});
  group.all_gather_into_tensor(stacked, part(group.rank()));
  EXPECT_TRUE(at::equal(stacked, rows)) << stacked;
  group.all_gather_into_tensor(flat, part(group.rank()));
  EXPECT_TRUE(at::equal(flat, rows.view(-1))) << flat;
  at::Tensor sum = at::empty({2, 2});
  group.reduce_scatter_tensor(sum, rows);
  EXPECT_TRUE(at::equal(sum, part(group.rank()) * 3)) << sum;
  sum.zero_();
  group.reduce_scatter_tensor(sum, rows.view(-1));
  EXPECT_TRUE(at::equal(sum, part(group.rank()) * 3)) << sum;
}

/// Calls with results and inputs in one memory give what they give with two. A call takes both
/// memories of three parts, and says what its results are.
class InOneMemory {
 public:
  InOneMemory(const ProcessGroup& group, int64_t part)
      : group_(group), part_(part), memory_(at::arange(3 * part) + 1000 * part * group.rank()) {}

  void run() const {
    exchanges();
    gathers();
    reductions();
  }

 private:
  using Call = std::function<Tensors(const at::Tensor& results, const at::Tensor& inputs)>;

  void expect_same(const char* operation, const Call& call) const {
    const Tensors wanted = call(memory_.clone(), memory_.clone());
    const at::Tensor both = memory_.clone();
    const Tensors got = call(both, both);
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_TRUE(at::equal(got[i], wanted[i])) << operation << ", result " << i << " of " << part_;
  }
  at::Tensor part(const at::Tensor& whole, int64_t index) const {
    return whole.narrow(0, index * part_, part_);
  }
  Tensors parts(const at::Tensor& whole) const {
    return {part(whole, 0), part(whole, 1), part(whole, 2)};
  }

  void exchanges() const {
    expect_same("all_to_all_single", [&](at::Tensor result, const at::Tensor& input) {
      group_.all_to_all_single(result, input);
      return Tensors{result};
    });
    const int64_t unit = part_ / 3, mine = (group_.rank() + 1) * unit;
    expect_same("all_to_all_single, uneven", [&](const at::Tensor& results, const at::Tensor& in) {
      at::Tensor result = results.narrow(0, 0, 3 * mine);
      group_.all_to_all_single(result, in.narrow(0, 0, 6 * unit), {mine, mine, mine},
                               {unit, 2 * unit, 3 * unit});
      return Tensors{result};
    });
    expect_same("all_to_all", [&](const at::Tensor& results, const at::Tensor& inputs) {
      Tensors reversed{part(results, 2), part(results, 1), part(results, 0)};
      group_.all_to_all(reversed, parts(inputs));
      return reversed;
    });
  }

  void gathers() const {
    for (const int place : {0, group_.rank()}) {
      expect_same("all_gather", [&](const at::Tensor& results, const at::Tensor& inputs) {
        Tensors all = parts(results);
        group_.all_gather(all, part(inputs, place));
        return all;
      });
      expect_same("all_gather_into_tensor", [&](at::Tensor results, const at::Tensor& inputs) {
        group_.all_gather_into_tensor(results, part(inputs, place));
        return Tensors{results};
      });
      expect_same("gather", [&](const at::Tensor& results, const at::Tensor& inputs) {
        Tensors all = group_.rank() == 1 ? parts(results) : Tensors();
        group_.gather(all, part(inputs, place), 1);
        return all;
      });
    }
  }

  void reductions() const {
    for (const int place : {0, group_.rank()}) {
      expect_same("scatter", [&](const at::Tensor& results, const at::Tensor& inputs) {
        at::Tensor result = part(results, place);
        group_.scatter(result, group_.rank() == 1 ? parts(inputs) : Tensors(), 1);
        return Tensors{result};
      });
      expect_same("reduce_scatter", [&](const at::Tensor& results, const at::Tensor& inputs) {
        at::Tensor result = part(results, place);
        group_.reduce_scatter(result, parts(inputs));
        return Tensors{result};
      });
      expect_same("reduce_scatter_tensor", [&](const at::Tensor& results, const at::Tensor& in) {
        at::Tensor result = part(results, place);
        group_.reduce_scatter_tensor(result, in);
        return Tensors{result};
      });
    }
  }

  const ProcessGroup& group_;
  const int64_t part_;
  const at::Tensor memory_;
};

void takes_inputs_in_the_memory_of_results(const ProcessGroup& group) {
  for (const int64_t part : {6, 300'000}) InOneMemory(group, part).run();
}

void refuses_one_tensor_for_several_results(const ProcessGroup& group) {
  Tensors thrice(3, at::zeros({4}));
  EXPECT_THROW(group.all_gather(thrice, at::ones({4})), UsageError);
  EXPECT_THROW(group.all_to_all(thrice, one_each(group, at::kFloat)), UsageError);
  EXPECT_THROW(group.all_reduce_coalesced(thrice), UsageError);
  const at::Tensor whole = at::zeros({8});
  Tensors overlapping{whole.narrow(0, 0, 4), at::zeros({4}), whole.narrow(0, 3, 4)};
  EXPECT_THROW(group.all_gather(overlapping, at::ones({4})), UsageError);
  EXPECT_EQ(thrice[0].sum().item<float>(), 0) << "nothing was written";
  group.barrier();
}

void moves_every_dtype(const ProcessGroup& group) {
  const int next = (group.rank() + 1) % 3, last = (group.rank() + 2) % 3;
  for (const auto dtype :
       {at::kShort, at::kUInt16, at::kUInt32, at::kUInt64, at::kBool, at::kComplexHalf,
        at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn, at::kBFloat16}) {
    const auto of = [&](int rank) { return at::full({2}, rank + 1).to(dtype); };
    const auto bytes = [](const at::Tensor& tensor) { return tensor.contiguous().view(at::kByte); };
    const auto expect_of = [&](const char* call, const at::Tensor& got, int rank) {
      EXPECT_TRUE(at::equal(bytes(got), bytes(of(rank)))) << call << " of " << dtype;
    };
    const auto none = [&] { return at::zeros({2}).to(dtype); };
    at::Tensor one = of(group.rank()), other = none();
    group.broadcast(one, 1);
    expect_of("broadcast", one, 1);
    Tensors all{none(), none(), none()}, none_given;
    group.all_gather(all, of(group.rank()));
    for (int rank = 0; rank < 3; ++rank)
      expect_of("all_gather", all[static_cast<size_t>(rank)], rank);
    at::Tensor whole = at::zeros({6}).to(dtype);
    group.all_gather_into_tensor(whole, of(group.rank()));
    expect_of("all_gather_into_tensor", whole.narrow(0, 4, 2), 2);
    Tensors gathered = group.rank() == 1 ? Tensors{none(), none(), none()} : Tensors();
    group.gather(gathered, of(group.rank()), 1);
    if (!gathered.empty()) expect_of("gather", gathered[2], 2);
    group.scatter(other, group.rank() == 1 ? all : none_given, 1);
    expect_of("scatter", other, group.rank());
    Tensors received{none(), none(), none()};
    const at::Tensor mine = of(group.rank());
    group.all_to_all(received, {mine, mine, mine});
    expect_of("all_to_all", received[2], 2);
    group.all_to_all_single(whole, whole.clone(), {2, 2, 2}, {2, 2, 2});
    expect_of("all_to_all_single", whole.narrow(0, 0, 2), group.rank());
    other = none();
    for (const Work& work : group.batch_isend_irecv(
             {{P2POp::Kind::send, mine, next}, {P2POp::Kind::recv, other, last}}))
      work.wait();
    expect_of("recv", other, last);
  }
}

/// Each error names the rank, the call and the dtype, and the group is none the worse.
void refuses_reductions_that_a_dtype_lacks(const ProcessGroup& group) {
  const std::vector<std::pair<at::ScalarType, ReduceOp>> lacking{
      {at::kUInt32, ReduceOp::sum},
      {at::kFloat8_e4m3fn, ReduceOp::max},
      {at::kComplexFloat, ReduceOp::max},
      {at::kFloat, ReduceOp::band},
      {at::kBool, ReduceOp::avg}};
  for (const auto& [dtype, op] : lacking) {
    at::Tensor one = at::ones({3}).to(dtype), whole = at::ones({9}).to(dtype);
    Tensors parts{at::ones({3}).to(dtype), at::ones({3}).to(dtype), at::ones({3}).to(dtype)};
    const auto expect_refused = [&, op = op](const std::string& name, auto call) {
      const std::string text = test::message_of<UsageError>(call);
      for (const std::string& part : {"rank " + std::to_string(group.rank()), name + "(",
                                      describe(signature_of(one)), std::string("hint: ")})
        EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    };
    expect_refused("all_reduce", [&, op = op] { group.all_reduce(one, op); });
    expect_refused("all_reduce_coalesced", [&, op = op] { group.all_reduce_coalesced(parts, op); });
    expect_refused("reduce", [&, op = op] { group.reduce(one, 1, op); });
    expect_refused("reduce_scatter", [&, op = op] { group.reduce_scatter(one, parts, op); });
    expect_refused("reduce_scatter_tensor",
                   [&, op = op] { group.reduce_scatter_tensor(one, whole, op); });
  }
  group.barrier();
}

void sums_bools_to_bools(const ProcessGroup& group) {
  const auto bools = [](std::vector<int64_t> bits) { return at::tensor(bits).to(at::kBool); };
  const at::Tensor mine = bools({group.rank() == 0, 1, 0});
  for (const auto& [op, wanted] : {std::pair(ReduceOp::sum, bools({1, 1, 0})),
                                   std::pair(ReduceOp::product, bools({0, 1, 0}))}) {
    at::Tensor all = mine.clone(), part = at::empty({3}, at::kBool);
    group.all_reduce(all, op);
    EXPECT_TRUE(at::equal(all.view(at::kByte), wanted.view(at::kByte))) << all.view(at::kByte);
    group.reduce_scatter_tensor(part, mine.repeat({3}), op);
    EXPECT_TRUE(at::equal(part.view(at::kByte), wanted.view(at::kByte))) << part.view(at::kByte);
  }
}

void takes_dtypes(const ProcessGroup& group) {
  moves_every_dtype(group);
  refuses_reductions_that_a_dtype_lacks(group);
  sums_bools_to_bools(group);
}

class Outputs : public ::testing::TestWithParam<test::RankOptions> {};

TEST_P(Outputs, CountByTheirElementsAndNotByTheirShape) {
  test::run_group(3, takes_rows_of_ranks, GetParam());
}

TEST_P(Outputs, OfAnotherDtypeAreRefused) {
  test::run_group(3, refuses_other_outputs, GetParam());
}

TEST_P(Outputs, WhoseElementsShareMemoryAreRefused) {
  test::run_group(3, refuses_shared_elements, GetParam());
}

TEST_P(Outputs, MayBeLeavesThatRequireAGradient) {
  for (const bool strided : {false, true}) {
    LateRank late;
    test::run_group(
        3, [&](const ProcessGroup& group) { takes_leaves(group, late, strided); }, GetParam());
  }
}

TEST_P(Outputs, OfEveryDtypeAreMovedAndReducedWhereTheyCanBe) {
  test::run_group(3, takes_dtypes, GetParam());
}

TEST_P(Outputs, MayLieInTheMemoryOfInputs) {
  test::run_group(3, takes_inputs_in_the_memory_of_results, GetParam());
}

TEST_P(Outputs, ThatAreOneTensorSeveralTimesAreRefused) {
  test::run_group(3, refuses_one_tensor_for_several_results, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Backends, Outputs,
                         ::testing::Values(test::RankOptions{.backend = "shm"},
                                           test::RankOptions{.backend = "hierarchical",
                                                             .hosts = "aab"}),
                         [](const auto& backend) { return backend.param.backend; });

TEST(OutputsOverGloo, OfAnotherDtypeAreRefused) {
  test::run_group(3, refuses_other_outputs);
}

TEST(OutputsOverGloo, OfEveryDtypeAreMovedAndReducedWhereTheyCanBe) {
  test::run_group(3, takes_dtypes);
}

TEST(OutputsOverGloo, MayLieInTheMemoryOfInputs) {
  test::run_group(3, takes_inputs_in_the_memory_of_results);
}

TEST(OutputsOverGloo, ThatAreOneTensorSeveralTimesAreRefused) {
  test::run_group(3, refuses_one_tensor_for_several_results);
}

TEST(OutputsOverGloo, CountByTheirElementsAndNotByTheirShape) {
  test::run_group(3, takes_rows_of_ranks);
}

}  // namespace outputs_test
}  // namespace lockstep
