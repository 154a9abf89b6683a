// Reinforcement learning of PyTorch's RPC tutorials: observers, each with a cart and its pole, ask
// one agent for actions and report rewards. The agent learns from all episodes (REINFORCE, Williams
// 1992). It answers either each request by itself, or those of all observers together
// (rpc::batched). Both ways run, one after the other:
//   build/examples/003_rpc/reinforcement_learning --world-size 3
// Under a launcher:
//   build/bin/lockstep run --nproc-per-node 3 build/examples/003_rpc/reinforcement_learning
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "003_rpc/cart_pole.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/rpc/rpc.h"

namespace {

namespace nn = torch::nn;
namespace rpc = lockstep::rpc;
using rpc_tutorial::CartPole;

struct Options {
  int world_size = 3;
  int episodes = 100;  ///< Rounds of learning.
  /// Of each observer in a round. All make equally many, so that none waits for a batch that the
  /// others no longer fill. A pole that falls stands up again.
  int steps = 500;
  double gamma = 0.99;
  double lr = 0.01;
  int64_t seed = 543;
  double reward_threshold = 475;  ///< Gymnasium's for CartPole-v1.
  std::string way = "both";
  int log_interval = 10;
} options;  // Read before anything calls.

/// A question of an observer.
struct Request {
  int64_t observer = 0;
  at::Tensor state;
};
auto rpc_fields(Request& request) {
  return std::tie(request.observer, request.state);
}

/// The policy, on the agent, and what happened in the observers' episodes.
class Policy {
 public:
  /// One forward pass for all requests.
  std::vector<int64_t> select_actions(const std::vector<Request>& requests) {
    const std::lock_guard lock(mutex_);
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> states;
    for (const auto& request : requests) states.push_back(request.state);
    const auto chances = at::softmax(scores_->forward(at::stack(states)), 1);
    std::vector<int64_t> selected;
    for (size_t i = 0; i < requests.size(); ++i) {
      const int64_t observer = requests[i].observer;
      std::bernoulli_distribution right(chances[static_cast<int64_t>(i)][1].item<double>());
      selected.push_back(right(random_of(observer)) ? 1 : 0);
      auto& episode = current_episode(observer);
      episode.states.push_back(requests[i].state);
      episode.actions.push_back(selected.back());
    }
    return selected;
  }

  void report_reward(int64_t observer, double reward, bool done) {
    const std::lock_guard lock(mutex_);
    auto& episode = current_episode(observer);
    episode.rewards.push_back(reward);
    episode.done = done;
  }

  /// Learns from a round's episodes and forgets them. Returns the mean of their rewards.
  double learn() {
    const std::lock_guard lock(mutex_);
    std::vector<at::Tensor> states;
    std::vector<int64_t> actions;
    std::vector<double> returns;
    double total = 0;
    size_t count = 0;
    for (const auto& [observer, episodes] : episodes_) {
      for (const auto& episode : episodes) {
        ++count;
        states.insert(states.end(), episode.states.begin(), episode.states.end());
        actions.insert(actions.end(), episode.actions.begin(), episode.actions.end());
        // What came after each action, later rewards counting less.
        std::vector<double> its(episode.rewards.size());
        double sum = 0;
        for (size_t i = its.size(); i-- > 0;)
          its[i] = sum = episode.rewards[i] + options.gamma * sum;
        returns.insert(returns.end(), its.begin(), its.end());
        total += static_cast<double>(its.size());
      }
    }
    const double mean = total / static_cast<double>(count);
    episodes_.clear();
    auto weights = at::tensor(returns, at::kFloat);
    weights = (weights - weights.mean()) / (weights.std() + 1e-6);
    const auto chances = at::log_softmax(scores_->forward(at::stack(states)), 1);
    const auto chosen = chances.gather(1, at::tensor(actions).unsqueeze(1)).squeeze(1);
    lockstep::zero_grad(scores_->parameters());
    (-(chosen * weights)).mean().backward();
    optimizer_->step();
    return mean;
  }

 private:
  struct Episode {
    std::vector<at::Tensor> states;
    std::vector<int64_t> actions;
    std::vector<double> rewards;
    bool done = false;
  };
  Episode& current_episode(int64_t observer) {
    auto& episodes = episodes_[observer];
    if (episodes.empty() || episodes.back().done) episodes.emplace_back();
    return episodes.back();
  }
  static nn::Sequential make_scores() {
    at::manual_seed(static_cast<uint64_t>(options.seed));
    return nn::Sequential{nn::Linear(4, 128), nn::ReLU(), nn::Linear(128, 2)};
  }

  /// Each observer has its own, so that its actions do not depend on when the others ask.
  std::mt19937_64& random_of(int64_t observer) {
    const auto seed = static_cast<uint64_t>(options.seed + observer);
    return random_.try_emplace(observer, seed).first->second;
  }

  std::mutex mutex_;
  std::map<int64_t, std::mt19937_64> random_;
  nn::Sequential scores_ = make_scores();
  std::unique_ptr<lockstep::Optimizer> optimizer_ =
      lockstep::make_optimizer("adam", scores_->parameters(), {.lr = options.lr});
  std::map<int64_t, std::vector<Episode>> episodes_;  ///< Of this round, by observer.
};

/// The agent's, made anew for each way.
std::unique_ptr<Policy>& policy() {
  static std::unique_ptr<Policy> current;
  return current;
}

const auto select_action = rpc::function("select_action", [](const Request& request) {
  return policy()->select_actions({request}).front();
});
const auto report_reward =
    rpc::function("report_reward", [](int64_t observer, double reward, bool done) {
      policy()->report_reward(observer, reward, done);
    });

using BatchedSelect = rpc::Function<rpc::Future<int64_t>(Request)>;
// Registered when the number of observers is known.
BatchedSelect register_batched_select() {
  return rpc::batched(
      "select_action_batch",
      [](const std::vector<Request>& requests) { return policy()->select_actions(requests); },
      {.size = options.world_size - 1, .delay = std::chrono::milliseconds(1)});
}

/// One cart and its pole, on an observer.
class Observer {
 public:
  explicit Observer(int64_t number)
      : number_(number), environment_(static_cast<uint64_t>(options.seed + number)) {}

  void run_round(bool batched) {
    auto state = environment_.reset();
    for (int step_number = 0; step_number < options.steps; ++step_number) {
      const Request request{number_, at::tensor(at::ArrayRef<float>(state))};
      const int64_t action = batched
                                 ? rpc::call("agent", BatchedSelect("select_action_batch"), request)
                                 : rpc::call("agent", select_action, request);
      const auto step = environment_.step(action);
      rpc::call("agent", report_reward, number_, step.reward, step.done);
      state = step.done ? environment_.reset() : step.state;
    }
  }

 private:
  const int64_t number_;
  CartPole environment_;
};
const auto make_observer = rpc::function(
    "make_observer", [](int64_t number) { return std::make_shared<Observer>(number); });
const auto run_round = rpc::method("Observer.run_round", &Observer::run_round);

void run_agent(bool batched) {
  const char* way = batched ? "batched" : "one by one";
  policy() = std::make_unique<Policy>();
  std::vector<rpc::RRef<Observer>> observers;
  for (int i = 1; i < options.world_size; ++i) {
    observers.push_back(rpc::remote("observer_" + std::to_string(i), make_observer, i));
  }
  double average = 10;
  int64_t requests = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int episode = 1; episode <= options.episodes; ++episode) {
    std::vector<rpc::Future<void>> running;
    for (const auto& observer : observers) {
      running.push_back(observer.rpc_async(run_round, batched));
    }
    for (const auto& round : running) round.wait();
    requests += static_cast<int64_t>(observers.size()) * options.steps;
    const double reward = policy()->learn();
    average = 0.05 * reward + 0.95 * average;
    if (episode % options.log_interval == 0) {
      std::printf("%s: episode %d: reward %.1f, average %.1f\n", way, episode, reward, average);
      std::fflush(stdout);
    }
    if (average > options.reward_threshold) {
      std::printf("%s: solved after %d episodes\n", way, episode);
      break;
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%s: %.0f actions/s, average %.1f\n", way,
              static_cast<double>(requests) / seconds.count(), average);
  std::fflush(stdout);
}

void run_worker() {
  const auto world = lockstep::init();
  options.world_size = world.size();
  if (world.size() < 2) throw lockstep::UsageError("an agent and at least one observer are needed");
  register_batched_select();
  const bool selects = world.rank() == 0;
  auto agent = rpc::init(world, selects ? "agent" : "observer_" + std::to_string(world.rank()));
  if (selects && options.way != "batched") run_agent(false);
  if (selects && options.way != "plain") run_agent(true);
  agent.shutdown();  // Observers serve until the agent is done.
}

void read_options(int argc, char** argv) {
  examples::Flags flags("An agent that learns to balance the poles of its observers, over RPC");
  flags.option("--world-size", options.world_size, "The agent and its observers together", {2, 64});
  flags.option("--episodes", options.episodes, "Rounds of learning, at most", {1});
  flags.option("--steps", options.steps, "Steps of each observer in a round", {1});
  flags.option("--gamma", options.gamma, "How much the next reward counts beside the last");
  flags.option("--lr", options.lr, "The learning rate");
  flags.option("--seed", options.seed, "Of the policy and the poles", {0});
  flags.option("--reward-threshold", options.reward_threshold, "Solved at this average");
  flags.option("--way", options.way, "plain, batched or both", "WAY");
  flags.option("--log-interval", options.log_interval, "Episodes between two lines", {1});
  examples::parse(flags, argc, argv);
  if (options.way != "plain" && options.way != "batched" && options.way != "both") {
    throw lockstep::UsageError("--way " + options.way + ": expected plain, batched or both");
  }
}

}  // namespace

int main(int argc, char** argv) try {
  read_options(argc, argv);
  lockstep::spawn([](int) { run_worker(); }, options.world_size);
  return 0;
} catch (...) {
  return examples::report_error();
}
