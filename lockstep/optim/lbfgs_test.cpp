#include "lockstep/optim/optim.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace lbfgs_test {

using ::testing::HasSubstr;

/// Least squares of two parameters, one of them not in the order of memory.
struct Problem {
  at::Tensor a = at::linspace(-1, 2, 24).reshape({6, 4});
  at::Tensor y = at::linspace(1, -3, 6);
  at::Tensor w = at::zeros({4}).requires_grad_();
  at::Tensor b = at::zeros({2, 3}).t().contiguous().t().requires_grad_();
  int evaluations = 0;

  std::vector<at::Tensor> parameters() { return {w, b}; }
  double evaluate() {
    ++evaluations;
    zero_grad(parameters());
    at::Tensor loss = (a.mv(w) + b.reshape({6}) - y).square().sum() + b.pow(4).sum();
    loss.backward();
    return loss.item<double>();
  }
};

std::unique_ptr<Optimizer> lbfgs(Problem& problem, const std::string& line_search) {
  OptimizerOptions options;
  options.lr = 0.5;
  options.max_iter = 4;
  options.history_size = 3;
  options.line_search_fn = line_search;
  return make_optimizer("lbfgs", problem.parameters(), options);
}

TEST(Lbfgs, FindsTheLeastLoss) {
  for (const char* line_search : {"", "strong_wolfe"}) {
    Problem problem;
    const auto optimizer = lbfgs(problem, line_search);
    EXPECT_TRUE(optimizer->needs_closure());
    EXPECT_FALSE(optimizer->is_elementwise());
    const double first = optimizer->step_with([&] { return problem.evaluate(); });
    EXPECT_GT(problem.evaluations, 2);
    for (int i = 0; i < 10; ++i) optimizer->step_with([&] { return problem.evaluate(); });
    EXPECT_LT(problem.evaluate(), first / 100) << line_search;
  }
}

TEST(Lbfgs, ASearchIsNotBoundByMaxIter) {
  Problem problem;
  OptimizerOptions options;
  options.lr = 1e-6;  // So short a first try that a search goes 10 times as far, and again.
  options.max_iter = 1;
  options.line_search_fn = "strong_wolfe";
  const auto optimizer = make_optimizer("lbfgs", problem.parameters(), options);
  optimizer->step_with([&] { return problem.evaluate(); });
  EXPECT_GT(problem.evaluations, 4);
  EXPECT_LE(problem.evaluations, 1 + 25 + 1);
}

TEST(Lbfgs, AStateThatIsTakenOverChangesNoBit) {
  for (const char* line_search : {"", "strong_wolfe"}) {
    Problem whole, cut;
    auto a = lbfgs(whole, line_search), b = lbfgs(cut, line_search);
    for (int step = 0; step < 5; ++step) {
      if (step == 0 || step == 3) {
        auto next = lbfgs(cut, line_search);
        next->load_state(b->state());
        b = std::move(next);
      }
      a->step_with([&] { return whole.evaluate(); });
      b->step_with([&] { return cut.evaluate(); });
    }
    EXPECT_TRUE(at::equal(whole.w, cut.w)) << line_search;
    EXPECT_TRUE(at::equal(whole.b, cut.b)) << line_search;
  }
}

TEST(Lbfgs, AStateThatDoesNotFitIsRefusedAndChangesNothing) {
  Problem problem;
  const auto optimizer = lbfgs(problem, "");
  for (int i = 0; i < 2; ++i) optimizer->step_with([&] { return problem.evaluate(); });
  const StateDict good = optimizer->state();
  const auto refused = [&](const std::function<void(StateDict&)>& spoil) {
    StateDict bad = good;
    spoil(bad);
    try {
      optimizer->load_state(bad);
    } catch (const CheckpointError& error) {
      EXPECT_EQ(optimizer->state().size(), good.size());
      return std::string(error.what());
    }
    return std::string("taken");
  };
  EXPECT_THAT(refused([](auto& s) { s.emplace_back("exp_avg.0", at::zeros({1})); }),
              HasSubstr("unknown entry 'exp_avg.0'"));
  EXPECT_THAT(refused([](auto& s) { std::erase_if(s, [](auto& e) { return e.first == "d.0"; }); }),
              HasSubstr("lacks 'd.0'"));
  EXPECT_THAT(refused([](auto& s) {
                for (auto& [name, tensor] : s) {
                  if (name == "old_stps.0") tensor = at::zeros({1, 3});
                }
              }),
              HasSubstr("expected [1, 10]"));
  EXPECT_THAT(refused([](auto& s) { std::erase_if(s, [](auto& e) { return e.first == "ro.0"; }); }),
              HasSubstr("of different lengths"));
}

TEST(Lbfgs, WrongUse) {
  Problem problem;
  const auto optimizer = lbfgs(problem, "");
  try {
    optimizer->step();
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("step_with(closure)"));
  }
  EXPECT_THROW(optimizer->step_scaled({}), UsageError);
  EXPECT_THROW(lbfgs(problem, "wolfe"), UsageError);
  OptimizerOptions none;
  none.max_iter = 0;
  EXPECT_THROW(make_optimizer("lbfgs", problem.parameters(), none), UsageError);
}

/// Others evaluate once.
TEST(StepWith, OfAnOrdinaryOptimizerIsAStepAfterTheClosure) {
  Problem problem, twin;
  const auto optimizer = make_optimizer("sgd", problem.parameters(), {.lr = 0.01});
  const auto other = make_optimizer("sgd", twin.parameters(), {.lr = 0.01});
  const double loss = optimizer->step_with([&] { return problem.evaluate(); });
  EXPECT_EQ(twin.evaluate(), loss);
  other->step();
  EXPECT_EQ(problem.evaluations, 1);
  EXPECT_TRUE(at::equal(problem.w, twin.w));
}

}  // namespace lbfgs_test
}  // namespace lockstep
