// The results of the backend mpi against ATen's and Gloo's; mpirun starts the ranks.
#include <gmock/gmock.h>

#include <map>
#include <random>

#include "tests/support/lazy_tensors.h"
#include "tests/support/mpi_test_ranks.h"

namespace lockstep::mpi::test {
namespace mpi_collectives_test {

struct Case {
  Op op;
  at::ScalarType type;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort,
        at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
    const bool integral = at::isIntegralType(type, /*includeBool=*/true);
    for (const auto op :
         {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR}) {
      if (op >= Op::BAND && !integral) continue;
      if (op == Op::AVG && type == at::kBool) continue;
      if ((op == Op::MIN || op == Op::MAX) && at::isComplexType(type)) continue;
      all.push_back({op, type});
    }
  }
  return all;
}

at::Tensor combine(Op op, const at::Tensor& a, const at::Tensor& b) {
  const bool logical = a.scalar_type() == at::kBool;
  switch (op) {
    case Op::SUM:
    case Op::AVG:
      return logical ? a.logical_or(b) : a + b;
    case Op::PRODUCT:
      return logical ? a.logical_and(b) : a * b;
    case Op::MIN:
      return at::minimum(a, b);
    case Op::MAX:
      return at::maximum(a, b);
    case Op::BAND:
      return a.bitwise_and(b);
    case Op::BOR:
      return a.bitwise_or(b);
    default:
      return a.bitwise_xor(b);
  }
}

at::Tensor expected(Op op, const Tensors& inputs) {
  const auto type = inputs[0].scalar_type();
  const bool rounded = type == at::kHalf || type == at::kBFloat16;
  at::Tensor result = rounded ? inputs[0].to(at::kFloat) : inputs[0];
  for (size_t i = 1; i < inputs.size(); ++i)
    result = combine(op, result, inputs[i].to(result.scalar_type()));
  if (op == Op::AVG) {
    const auto n = static_cast<int64_t>(inputs.size());
    if (at::isComplexType(type)) {  // Each part by itself; ATen divides by n + 0i.
      result = at::view_as_complex(at::view_as_real(result) / n);
    } else {
      result = at::isIntegralType(type, false) ? at::div(result, n, "trunc").to(type) : result / n;
    }
  }
  return result.to(type);
}

std::string name_of(at::ScalarType type, Op op, int64_t count) {
  return std::string(c10::toString(type)) + " " + std::to_string(op) + " " + std::to_string(count);
}

const std::vector<int64_t> kCounts = {0, 1, 13, 500};

/// Those, and one that takes two pieces: these are cut by the count alone.
std::vector<int64_t> counts(bool large) {
  std::vector<int64_t> all = kCounts;
  if (large) all.push_back(kPiece + 1);
  return all;
}

TEST_F(Ranks, AllReduceOfEveryDtypeReductionAndSizeIsAtens) {
  uint64_t call = seed();
  for (const auto& [op, type] : cases()) {
    for (const int64_t count : counts(op == Op::SUM)) {
      ++call;
      Tensors inputs;
      for (int r = 0; r < size(); ++r) inputs.push_back(whole_numbers(call, r, {count}, type));
      const at::Tensor mine = inputs[static_cast<size_t>(rank())].clone();
      all_reduce(*mpi, mine, op);
      expect_same(mine, expected(op, inputs), name_of(type, op, count));
    }
  }
}

// Open MPI's own sums of them saturate here and there where it uses AVX.
TEST_F(Ranks, SumsOfSmallIntegersWrapRound) {
  uint64_t call = seed();
  for (const auto type : {at::kChar, at::kByte, at::kShort}) {
    for (const auto op : {Op::SUM, Op::AVG, Op::PRODUCT}) {
      for (const int64_t count : {3L, 500L}) {
        Tensors inputs;
        for (int r = 0; r < size(); ++r) {
          auto generator =
              at::make_generator<at::CPUGeneratorImpl>(++call * 64 + static_cast<uint64_t>(r));
          inputs.push_back(at::randint(-40'000, 40'000, {size(), count}, generator, at::kInt));
          inputs.back() = inputs.back().to(type);
        }
        const at::Tensor mine = inputs[static_cast<size_t>(rank())];
        const at::Tensor wanted = expected(op, inputs);
        const std::string what = name_of(type, op, count);
        const at::Tensor all = mine.clone();
        all_reduce(*mpi, all, op);
        expect_same(all, wanted, what);
        Tensors one{mine.clone()};
        c10d::ReduceOptions to_last;
        to_last.rootRank = size() - 1;
        to_last.reduceOp = op;
        mpi->reduce(one, to_last)->wait();
        if (rank() == size() - 1) expect_same(one[0], wanted, "reduce " + what);
        at::Tensor part = at::zeros({count}, type), whole = mine.clone();
        c10d::ReduceScatterOptions scatter;
        scatter.reduceOp = op;
        mpi->_reduce_scatter_base(part, whole, scatter)->wait();
        expect_same(part, wanted[rank()], "reduce_scatter " + what);
      }
    }
  }
}

// Fractions are added in an order of MPI's choice, which for two ranks has no say; float16 and
// bfloat16 are added in float32 and rounded once.
TEST_F(Ranks, SumsOfFractionsAreAsExactAsTheirType) {
  uint64_t call = seed();
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const int64_t count : kCounts) {
      ++call;
      Tensors inputs;
      at::Tensor sum = at::zeros({count}, at::kDouble), magnitude = sum.clone();
      for (int r = 0; r < size(); ++r) {
        auto generator =
            at::make_generator<at::CPUGeneratorImpl>(call * 64 + static_cast<uint64_t>(r));
        inputs.push_back(at::randn({count}, generator, at::kDouble).to(type));
        sum += inputs.back();
        magnitude += inputs.back().abs();
      }
      const at::Tensor mine = inputs[static_cast<size_t>(rank())].clone();
      all_reduce(*mpi, mine);
      if (size() <= 2) {
        expect_same(mine, expected(Op::SUM, inputs), name_of(type, Op::SUM, count));
        continue;
      }
      // Each of n - 1 additions rounds by at most half a unit of the sum of magnitudes; a float16
      // rounds once more at the end.
      const double unit = type == at::kDouble ? 1.2e-16 : 6e-8;
      const double last = type == at::kHalf ? 4.9e-4 : type == at::kBFloat16 ? 3.91e-3 : 0;
      const at::Tensor bound = magnitude * (unit * size()) + sum.abs() * (last * 1.01) + 1e-12;
      const at::Tensor error = (mine.to(at::kDouble) - sum).abs();
      EXPECT_TRUE(error.le(bound).all().item<bool>()) << name_of(type, Op::SUM, count);
    }
  }
}

TEST_F(Ranks, SumsHaveTheSameBitsInEveryRun) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(seed() * 64 + static_cast<uint64_t>(rank()));
  const at::Tensor input = at::randn({50'001}, generator, at::kFloat);
  const at::Tensor first = input.clone();
  all_reduce(*mpi, first);
  for (int i = 0; i < 20; ++i) {
    const at::Tensor again = input.clone();
    all_reduce(*mpi, again);
    expect_same(again, first, "run " + std::to_string(i));
  }
}

/// For Gloo, which does not move all types, the same memory as bytes.
bool gloo_moves(at::ScalarType type) {
  return type != at::kBool && type != at::kBFloat16 && !at::isComplexType(type);
}

/// One collective of both backends, from the same start.
class Comparison {
 public:
  Comparison(c10d::Backend& mpi, c10d::Backend& gloo, std::string what)
      : mpi_(mpi), gloo_(gloo), what_(std::move(what)) {}

  template <class Collective>
  void operator()(const char* name, const Tensors& start, Collective collective,
                  bool compared = true) {
    Tensors ours, theirs;
    for (const auto& tensor : start) {
      ours.push_back(tensor.clone());
      theirs.push_back(tensor.clone());
    }
    collective(mpi_, ours);
    Tensors seen;
    for (const auto& tensor : theirs) seen.push_back(as_for(gloo_, tensor));
    collective(gloo_, seen);
    for (size_t i = 0; compared && i < start.size(); ++i)
      expect_same(ours[i], theirs[i], std::string(name) + " " + what_);
  }

  /// What the backend is given in place of the tensor.
  at::Tensor as_for(c10d::Backend& backend, const at::Tensor& tensor) const {
    const bool as_bytes = moves_ && &backend == &gloo_ && !gloo_moves(tensor.scalar_type());
    return as_bytes ? tensor.view(at::kByte) : tensor;
  }

  bool moves_ = false;  ///< The collective computes nothing.

 private:
  c10d::Backend& mpi_;
  c10d::Backend& gloo_;
  std::string what_;
};

class AgainstGloo : public Ranks {
 protected:
  void SetUp() override {
    Ranks::SetUp();
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    gloo = lockstep::test::make_gloo(store_for(std::string("gloo") + test->name()), rank(), size(),
                                     std::chrono::seconds(60));
    random.seed(seed());
    call = seed();
  }
  int64_t any_count() { return kCounts[random() % kCounts.size()]; }
  int any_rank() { return static_cast<int>(random() % static_cast<uint64_t>(size())); }
  at::Tensor mine(at::IntArrayRef shape, at::ScalarType type) {
    return whole_numbers(++call, rank(), shape, type);
  }

  BackendPtr gloo;
  std::mt19937_64 random{1};
  uint64_t call = 0;
};

TEST_F(AgainstGloo, EveryReductionGivesGloosResult) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte,
                          at::kInt, at::kLong}) {
    const bool integral = at::isIntegralType(type, false);
    for (const auto op : {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR}) {
      if (op >= Op::BAND && !integral) continue;
      const int64_t count = any_count();
      const int root = any_rank();
      Comparison compare(*mpi, *gloo, name_of(type, op, count) + " root " + std::to_string(root));
      compare("all_reduce", {mine({count}, type)},
              [&](c10d::Backend& backend, Tensors& t) { all_reduce(backend, t[0], op); });
      compare("all_reduce_coalesced", {mine({count}, type), mine({3, 5}, type)},
              [&](c10d::Backend& backend, Tensors& t) {
                c10d::AllreduceCoalescedOptions options;
                options.reduceOp = op;
                backend.allreduce_coalesced(t, options)->wait();
              });
      compare(
          "reduce", {mine({count}, type)},
          [&](c10d::Backend& backend, Tensors& t) {
            c10d::ReduceOptions options;
            options.reduceOp = op;
            options.rootRank = root;
            backend.reduce(t, options)->wait();
          },
          rank() == root);
      const at::Tensor many = mine({size(), count}, type);
      compare("reduce_scatter", {at::zeros({count}, type)},
              [&](c10d::Backend& backend, Tensors& t) {
                std::vector<Tensors> lists{many.unbind(0)};
                c10d::ReduceScatterOptions options;
                options.reduceOp = op;
                backend.reduce_scatter(t, lists, options)->wait();
              });
      compare("reduce_scatter_tensor", {at::zeros({count}, type)},
              [&](c10d::Backend& backend, Tensors& t) {
                at::Tensor input = many.flatten();
                c10d::ReduceScatterOptions options;
                options.reduceOp = op;
                backend._reduce_scatter_base(t[0], input, options)->wait();
              });
    }
  }
}

TEST_F(AgainstGloo, EveryMoveGivesGloosResult) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte,
                          at::kInt, at::kLong, at::kBool, at::kComplexFloat}) {
    for (const int64_t count : counts(type == at::kFloat)) {
      const int root = any_rank();
      Comparison compare(*mpi, *gloo,
                         name_of(type, Op::SUM, count) + " root " + std::to_string(root));
      compare.moves_ = true;
      const Tensors one_a_rank(static_cast<size_t>(size()), at::zeros({count}, type));
      compare("broadcast", {mine({count}, type)}, [&](c10d::Backend& backend, Tensors& t) {
        c10d::BroadcastOptions options;
        options.rootRank = root;
        backend.broadcast(t, options)->wait();
      });
      const at::Tensor one = mine({count}, type), many = mine({size(), count}, type);
      compare("all_gather", one_a_rank, [&](c10d::Backend& backend, Tensors& t) {
        std::vector<Tensors> lists{t};
        Tensors inputs{compare.as_for(backend, one)};
        backend.allgather(lists, inputs, {})->wait();
      });
      compare("all_gather_into_tensor", {at::zeros({size() * count}, type)},
              [&](c10d::Backend& backend, Tensors& t) {
                at::Tensor input = compare.as_for(backend, one);
                backend._allgather_base(t[0], input, {})->wait();
              });
      compare("gather", one_a_rank, [&](c10d::Backend& backend, Tensors& t) {
        std::vector<Tensors> lists;
        if (rank() == root) lists.push_back(t);
        Tensors inputs{compare.as_for(backend, one)};
        c10d::GatherOptions options;
        options.rootRank = root;
        backend.gather(lists, inputs, options)->wait();
      });
      compare("scatter", {at::zeros({count}, type)}, [&](c10d::Backend& backend, Tensors& t) {
        std::vector<Tensors> lists;
        if (rank() == root) lists.push_back(compare.as_for(backend, many).unbind(0));
        c10d::ScatterOptions options;
        options.rootRank = root;
        backend.scatter(t, lists, options)->wait();
      });
      compare("all_to_all_single", {at::zeros({size(), count}, type)},
              [&](c10d::Backend& backend, Tensors& t) {
                at::Tensor input = compare.as_for(backend, many);
                std::vector<int64_t> none, none_either;
                backend.alltoall_base(t[0], input, none, none_either, {})->wait();
              });
      // Rank i gives rank j (i + 2 j) mod 4 rows.
      std::vector<int64_t> give, take;
      for (int other = 0; other < size(); ++other) {
        give.push_back((rank() + 2 * other) % 4);
        take.push_back((other + 2 * rank()) % 4);
      }
      const at::Tensor rows =
          mine({std::accumulate(give.begin(), give.end(), int64_t{0}), count}, type);
      const int64_t taken = std::accumulate(take.begin(), take.end(), int64_t{0});
      compare("all_to_all_single with splits", {at::zeros({taken, count}, type)},
              [&](c10d::Backend& backend, Tensors& t) {
                at::Tensor input = compare.as_for(backend, rows);
                backend.alltoall_base(t[0], input, take, give, {})->wait();
              });
    }
  }
}

TEST_F(Ranks, ListsOfOtherSizesBetweenAnyTwoRanks) {
  const auto count = [](int from, int to) { return (from + to) % 3 * 20'000 + from * 7 + to; };
  Tensors inputs, outputs;
  for (int other = 0; other < size(); ++other) {
    inputs.push_back(at::full({count(rank(), other)}, rank() * 100 + other, at::kInt));
    outputs.push_back(at::zeros({count(other, rank())}, at::kInt));
  }
  mpi->alltoall(outputs, inputs, {})->wait();
  for (int other = 0; other < size(); ++other)
    expect_same(outputs[static_cast<size_t>(other)],
                at::full({count(other, rank())}, other * 100 + rank(), at::kInt), "all_to_all");
}

TEST_F(Ranks, TensorsThatAreNotContiguous) {
  const auto strided = [&](int r) {
    return at::arange(0, 60'000, at::kFloat).add(r).view({200, 300}).t();
  };
  const at::Tensor sum = strided(rank());
  all_reduce(*mpi, sum);
  at::Tensor wanted = strided(0).contiguous();
  for (int r = 1; r < size(); ++r) wanted = wanted + strided(r);
  expect_same(sum, wanted, "all_reduce");
  EXPECT_FALSE(sum.is_contiguous());
  Tensors every;
  for (int r = 0; r < size(); ++r) every.push_back(at::zeros({200, 300}).t());
  std::vector<Tensors> lists{every};
  Tensors inputs{strided(rank())};
  mpi->allgather(lists, inputs, {})->wait();
  for (int r = 0; r < size(); ++r)
    expect_same(every[static_cast<size_t>(r)], strided(r), "all_gather");
  Tensors root{at::zeros({200, 300}).t()};
  if (rank() == size() - 1) root[0].copy_(strided(5));
  c10d::BroadcastOptions options;
  options.rootRank = size() - 1;
  mpi->broadcast(root, options)->wait();
  expect_same(root[0], strided(5), "broadcast");
  Tensors from, to;
  for (int r = 0; r < size(); ++r) {
    from.push_back(strided(rank() * 10 + r));
    to.push_back(at::zeros({200, 300}).t());
  }
  mpi->alltoall(to, from, {})->wait();
  for (int r = 0; r < size(); ++r)
    expect_same(to[static_cast<size_t>(r)], strided(r * 10 + rank()), "all_to_all");
}

TEST_F(Ranks, TensorsWhoseMemoryDoesNotHoldTheirValues) {
  if (size() == 1) GTEST_SKIP() << "the calls are those of two ranks or more";
  const ProcessGroup& group = world().group();
  lockstep::test::take_lazy_tensors(group, lockstep::test::Laziness::conjugated);
  lockstep::test::take_lazy_tensors(group, lockstep::test::Laziness::negated);
  lockstep::test::take_zeros_without_memory(group);
}

TEST_F(Ranks, CoalescedCalls) {
  Tensors several{at::full({3}, rank() + 1.0), at::full({50'000}, 2, at::kFloat),
                  at::empty({0}, at::kInt), at::full({2, 2}, rank(), at::kLong)};
  mpi->allreduce_coalesced(several, c10d::AllreduceCoalescedOptions())->wait();
  const int sum = size() * (size() - 1) / 2;
  expect_same(several[0], at::full({3}, static_cast<double>(sum + size())), "first");
  expect_same(several[1], at::full({50'000}, 2 * size(), at::kFloat), "second");
  expect_same(several[3], at::full({2, 2}, sum, at::kLong), "last");

  Tensors inputs{at::full({2}, rank(), at::kInt), at::full({40'000}, rank() + 10, at::kInt)};
  Tensors outputs{at::zeros({2 * size()}, at::kInt), at::zeros({40'000 * size()}, at::kInt)};
  mpi->allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
  std::vector<Tensors> lists;
  for (int r = 0; r < size(); ++r)
    lists.push_back({at::zeros({2}, at::kInt), at::zeros({40'000}, at::kInt)});
  mpi->allgather_coalesced(lists, inputs, {})->wait();
  for (int r = 0; r < size(); ++r) {
    EXPECT_EQ(outputs[0][2 * r].item<int>(), r);
    EXPECT_EQ(outputs[1][40'000 * (r + 1) - 1].item<int>(), r + 10);
    EXPECT_EQ(lists[static_cast<size_t>(r)][1][39'999].item<int>(), r + 10);
  }
  Tensors whole{at::full({2 * size()}, rank(), at::kInt), at::ones({size()})};
  Tensors parts{at::zeros({2}, at::kInt), at::zeros({1})};
  mpi->reduce_scatter_tensor_coalesced(parts, whole, {})->wait();
  expect_same(parts[0], at::full({2}, sum, at::kInt), "reduce_scatter first");
  expect_same(parts[1], at::full({1}, static_cast<float>(size())), "reduce_scatter second");
}

TEST_F(Ranks, SparseTensors) {
  const auto of = [](int r) {
    at::Tensor dense = at::zeros({50, 3});
    for (int i = 0; i <= r; ++i) dense[(i * 7 + r) % 50] += r + 1.0;
    return dense;
  };
  Tensors mine{of(rank()).to_sparse(1)};
  mpi->allreduce(mine, {})->wait();
  at::Tensor wanted = of(0);
  for (int r = 1; r < size(); ++r) wanted = wanted + of(r);
  expect_same(mine[0].to_dense(), wanted, "sparse");
}

}  // namespace mpi_collectives_test
}  // namespace lockstep::mpi::test
