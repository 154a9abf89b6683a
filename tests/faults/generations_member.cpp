// Processes that form one World after the other over one store, while members die
// (test_generations.py):
//   lockstep_generations store HOST       hosts the store, prints its port, ends with standard
//   input lockstep_generations member ID MEMBERS HOST PORT BACKEND COUNT SEED
//       is in each of COUNT generations; prints a line of JSON: what the process held after the
//       first ones and at the end, and how many deaths it saw
//   lockstep_generations mortal ID HOST PORT BACKEND GENERATION SEED
//       joins this generation beside ID permanent members, and kills itself there
// Which generations have a mortal, and what each rank is, follows from the seed.
#include <ATen/ATen.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/gradient_averager.h"
#include "lockstep/parallel/state_dict.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

extern char** environ;

namespace {

using namespace lockstep;

/// What a generation is: all its members work it out alike.
struct Plan {
  Plan(int64_t generation, int64_t seed, int permanent) {
    std::mt19937_64 random(static_cast<uint64_t>(seed * 1'000'003 + generation));
    dies = random() % 8 == 0;
    dies_at_once = random() % 2 == 0;
    size = permanent + (dies ? 1 : 0);
    shift = static_cast<int>(random() % static_cast<uint64_t>(size));
  }
  int rank_of(int id) const { return (id + shift) % size; }
  bool dies = false, dies_at_once = false;
  int size = 0, shift = 0;
};

struct Member {
  int id;
  std::string host;
  uint16_t port;
  std::string backend;
};

Store connect(const Member& member) {
  TcpStoreOptions options;
  options.host = member.host;
  options.port = member.port;
  return tcp_store(options);
}

World join(const Member& member, const Store& store, int64_t generation, const Plan& plan) {
  InitOptions options;
  options.backend = member.backend;
  options.store = store;
  options.generation = generation;
  options.rank = plan.rank_of(member.id);
  options.world_size = plan.size;
  options.timeout = std::chrono::seconds(60);
  return init(options);
}

void expect_sum(const World& world, int size) {
  at::Tensor ranks = at::full({5}, world.rank(), at::kDouble);
  world.group().all_reduce(ranks);
  TORCH_CHECK(ranks.eq(size * (size - 1) / 2.0).all().item<bool>(), "wrong sum ", ranks);
}

StateDict copy_of(StateDict state) {
  for (auto& [name, tensor] : state) tensor = tensor.detach().clone();
  return state;
}

/// The model that lives on, and what it has learnt: the same on all members.
struct Learner {
  std::shared_ptr<torch::nn::SequentialImpl> module =
      torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 4),
                            torch::nn::Linear(4, 4), torch::nn::Linear(4, 4),
                            torch::nn::Linear(4, 2))
          .ptr();
  StateDict weights = copy_of(state_dict(*module));
};

std::string strategy_of(int64_t generation) {
  const std::vector<std::string> names = strategy_names();
  const std::string name = names.at(static_cast<size_t>(generation) % names.size());
  return name == "dp" ? "ddp" : name;  // It has one rank.
}

std::unique_ptr<Strategy> bind(const Learner& learner, const World& world, int64_t generation) {
  StrategySetup setup;
  setup.module = learner.module;
  for (const auto& child : learner.module->named_children()) {
    const auto linear = std::dynamic_pointer_cast<torch::nn::LinearImpl>(child.value());
    setup.layers.push_back(
        {child.key(), linear, [linear](const at::Tensor& x) { return linear->forward(x); }});
  }
  setup.make_optimizer = [](std::vector<at::Tensor> parameters) {
    return make_optimizer("adam", std::move(parameters), {.lr = 0.01});
  };
  setup.group = world.group();
  const std::string name = strategy_of(generation);
  if (name == "pipeline") setup.options.pipeline = PipelineOptions{.balance = "parameters"};
  auto strategy = make_strategy(name, setup);
  strategy->load_model_state(learner.weights);
  return strategy;
}

void step(Strategy& strategy, const Learner& learner, int id) {
  BatchWork work;
  work.input = at::full({8, 3}, id + 1.0);
  work.target = at::zeros({8, 2});
  work.criterion = [](const at::Tensor& output, const at::Tensor& target) {
    return at::mse_loss(output, target);
  };
  work.loss = [&] { return work.criterion(learner.module->forward(work.input), work.target); };
  strategy.run_batch(work);
  strategy.step({});
  strategy.zero_grad();
}

/// Binds the model that lives on to this generation, and gives all members what a step makes of it.
void learn(Learner& learner, const World& world, int64_t generation, int id) {
  const auto strategy = bind(learner, world, generation);
  step(*strategy, learner, id);
  const StateDict learnt = strategy->model_state();
  for (size_t i = 0; i < learner.weights.size(); ++i) {
    at::Tensor& weight = learner.weights[i].second;
    weight = world.rank() == 0 ? learnt[i].second.detach().clone() : at::empty_like(weight);
    world.group().broadcast(weight, 0);
  }
}

/// One step of the model that lives on. Each member's gradient is its number plus 1.
void train(const Member& member, const World& world, torch::nn::Linear& model, int members) {
  GradientAverager averager(*model, world.group());
  model->zero_grad();
  (model->forward(at::ones({1, 3})) * (member.id + 1)).sum().backward();
  const double wanted = (members + 1) / 2.0;
  TORCH_CHECK(model->weight.grad().eq(wanted).all().item<bool>(), "wrong gradient ",
              model->weight.grad());
}

/// True when the loss of the mortal was seen as one: in a call, or while this rank still joined.
bool sees_the_death(const Member& member, const Store& store, int64_t generation, const Plan& plan,
                    const Learner& learner) {
  try {
    const World world = join(member, store, generation, plan);
    if (plan.dies_at_once) {
      while (true) expect_sum(world, world.size());
    }
    const auto strategy = bind(learner, world, generation);
    while (true) step(*strategy, learner, member.id);
  } catch (const PeerLostError&) {
    return true;
  } catch (const TimeoutError&) {
    // Its connection was reset before Gloo had read from it: who is on another host cannot know.
    return true;
  }
}

size_t entries(const char* folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

/// The kernel lists a thread for a moment after it was joined: at most 5 s until there are
/// `wanted`.
size_t count_threads(size_t wanted) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (entries("/proc/self/task") > wanted && std::chrono::steady_clock::now() < limit)
    std::this_thread::yield();
  return entries("/proc/self/task");
}

/// `threads`: as many as there should be.
nlohmann::json held(Store& store, size_t threads) {
  std::ifstream maps("/proc/self/maps");
  const auto mappings =
      std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n');
  return {{"descriptors", entries("/proc/self/fd")},
          {"threads", count_threads(threads)},
          {"mappings", mappings},
          {"keys", store.num_keys()}};
}

pid_t start_mortal(const Member& member, int members, int64_t generation, int64_t seed) {
  std::vector<std::string> words = {"lockstep_generations",      "mortal",
                                    std::to_string(members),     member.host,
                                    std::to_string(member.port), member.backend,
                                    std::to_string(generation),  std::to_string(seed)};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t process = -1;
  TORCH_CHECK(posix_spawn(&process, "/proc/self/exe", nullptr, nullptr, argv.data(), environ) == 0);
  return process;
}

int run_member(const Member& member, int members, int64_t count, int64_t seed) {
  at::manual_seed(0);
  Store store = connect(member);
  torch::nn::Linear model(3, 2);
  Learner learner;
  nlohmann::json result = {{"id", member.id}, {"deaths", 0}, {"seen", 0}};
  const size_t threads = entries("/proc/self/task");  // No World has a thread yet.
  const int64_t first_ones = std::min<int64_t>(count / 2, 30);
  for (int64_t generation = 1; generation <= count; ++generation) {
    const Plan plan(generation, seed, members);
    const pid_t mortal =
        plan.dies && member.id == 0 ? start_mortal(member, members, generation, seed) : -1;
    if (plan.dies) {
      const bool seen = sees_the_death(member, store, generation, plan, learner);
      result["deaths"] = result["deaths"].get<int>() + 1;
      result["seen"] = result["seen"].get<int>() + (seen ? 1 : 0);
    } else {
      const World world = join(member, store, generation, plan);
      expect_sum(world, members);
      train(member, world, model, members);
      learn(learner, world, generation, member.id);
    }
    if (mortal > 0) waitpid(mortal, nullptr, 0);
    if (generation == first_ones) result["before"] = held(store, threads);
  }
  result["after"] = held(store, threads);
  for (const auto& [name, weight] : learner.weights) {
    result["weights"][name] = weight.sum().item<double>();
  }
  std::cout << result.dump() << std::endl;
  return 0;
}

int run_mortal(const Member& member, int64_t generation, int64_t seed) {
  const Plan plan(generation, seed, member.id);
  const World world = join(member, connect(member), generation, plan);
  if (plan.dies_at_once) return raise(SIGKILL);
  const Learner learner;
  const auto strategy = bind(learner, world, generation);
  step(*strategy, learner, member.id);
  return raise(SIGKILL);
}

int host_store(const std::string& host) {
  TcpStoreOptions options;
  options.host = host;
  options.is_listener = true;
  const Store store = tcp_store(options);
  std::cout << tcp_store_port(store) << std::endl;
  for (char byte; std::cin.get(byte);) {
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.at(0) == "store") return host_store(words.at(1));
    const bool mortal = words.at(0) == "mortal";
    const size_t at = mortal ? 2 : 3;
    const Member member{std::stoi(words.at(1)), words.at(at),
                        static_cast<uint16_t>(std::stoi(words.at(at + 1))), words.at(at + 2)};
    const int64_t number = std::stoll(words.at(at + 3)), seed = std::stoll(words.at(at + 4));
    return mortal ? run_mortal(member, number, seed)
                  : run_member(member, std::stoi(words.at(2)), number, seed);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
