// A program as users write it, which starts by `lockstep::start` and catches nothing. Its first
// word says what it does then, and with which options it starts.
#include <ATen/ATen.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/dataset.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/launch/start.h"

namespace {

using lockstep::World;

/// Tells the test that this rank is there, and what its process is.
void note(const World& world) {
  const auto folder = lockstep::env_string("OUT");
  if (!folder) return;
  const auto path = *folder + "/pid" + std::to_string(world.rank());
  std::ofstream(path + ".part") << getpid();
  std::rename((path + ".part").c_str(), path.c_str());
}

/// What a rank does that has nothing to fail of: it needs the others.
void need_the_others(const World& world) {
  while (true) world.group().barrier();
}

/// What static objects do at the end of the process that was started by hand.
struct AtExit {
  ~AtExit() {
    if (lockstep::env_string("TEST_STATIC") && !lockstep::env_string("RANK"))
      std::printf("statics are gone\n");
  }
} at_exit;

struct ThrowsInDestructor {
  ~ThrowsInDestructor() { throw_it(); }  // NOLINT(bugprone-exception-escape): that is the case.
  static void throw_it() { throw std::runtime_error("the shelf fell"); }
};

/// What ends rank 1.
const std::map<std::string, std::function<void()>> kEnds = {
    {"lockstep-error",
     [] { throw lockstep::NumericError("the loss is NaN", "take a smaller lr"); }},
    {"usage", [] { throw lockstep::UsageError("no such colour"); }},
    {"interrupted", [] { throw lockstep::InterruptedError(SIGTERM); }},
    {"standard", [] { throw std::runtime_error("the shelf fell\n"); }},
    {"c10",
     [] {
       at::ones({2, 3}).matmul(at::ones({2, 3}));
     }},
    {"number", [] { throw 42; }},
    {"memory", [] { throw std::bad_alloc(); }},
    {"destructor", [] { const ThrowsInDestructor thrower; }},
    {"thread",
     [] {
       std::thread([] { throw std::runtime_error("the shelf fell"); }).detach();
       while (true) pause();
     }},
    {"unjoined",
     [] {
       const std::thread forgotten([] {
         while (true) pause();
       });
     }},
    {"two-threads",
     [] {
       for (int i = 0; i < 8; ++i) {
         std::thread([] { throw std::runtime_error("the shelf fell"); }).detach();
       }
       while (true) pause();
     }},
    {"killed", [] { std::raise(SIGKILL); }},
    {"exit", [] { std::exit(5); }},
    {"vanishes", [] { _exit(0); }},
    {"twice", [] { lockstep::start(2, {.seed = 0}); }},
    {"spawn", [] { lockstep::spawn(2); }},
    {"buffered",
     [] {
       std::printf("half a line");
       throw std::runtime_error("the shelf fell");
     }},
};

void print_place(const World& world) {
  std::printf("rank %d of %d\n", world.rank(), world.size());
}

/// Four numbers of the default generator and four of the rank's own.
void print_numbers(const World& world) {
  const auto text = [](const at::Tensor& numbers) {
    std::string line;
    for (int64_t i = 0; i < numbers.numel(); ++i)
      line += " " + std::to_string(numbers[i].item<int64_t>());
    return line;
  };
  auto own = lockstep::rank_generator(world);
  const auto drawn = at::randint(1'000'000, {4}, at::kLong);
  const auto drawn_own = at::randint(1'000'000, {4}, own, at::kLong);
  std::printf("%d all%s own%s\n", world.rank(), text(drawn).c_str(), text(drawn_own).c_str());
}

void do_task(const std::string& task, const World& world) {
  if (task == "print") return print_place(world);
  if (task == "numbers") return print_numbers(world);
  if (task == "input") std::printf("read %d\n", std::getchar());
  if (task == "killed-once") {
    const auto restarts = lockstep::env_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
    if (restarts == 0 && world.rank() == 1) std::raise(SIGKILL);
    world.group().barrier();
    std::printf("finished after %d restart\n", static_cast<int>(restarts));
  }
  if (task == "missing-data") {
    lockstep::DatasetOptions options;
    options.data_dir = "/nowhere";
    lockstep::load_dataset("mnist", options);
  }
  const auto end = kEnds.find(task);
  if (end != kEnds.end() && world.rank() == world.size() - 1) end->second();
  if (end != kEnds.end() || task == "wait") need_the_others(world);
}

std::optional<uint64_t> seed_of(const std::string& text) {
  if (text == "clock") return static_cast<uint64_t>(getpid());  // Another on each rank.
  if (text == "one-sided") {
    return lockstep::env_string("RANK") == "0" ? std::nullopt : std::optional<uint64_t>(1);
  }
  return text.empty() ? std::nullopt : std::optional<uint64_t>(std::stoull(text));
}

lockstep::StartOptions options_of_environment() {
  lockstep::StartOptions options;
  options.seed = seed_of(lockstep::env_string("TEST_SEED").value_or(""));
  options.init.backend = lockstep::env_string("TEST_BACKEND").value_or("auto");
  options.spawn.first_rank = static_cast<int>(lockstep::env_int("TEST_FIRST").value_or(-1));
  options.spawn.world_size = static_cast<int>(lockstep::env_int("TEST_WORLD").value_or(-1));
  options.max_restarts = static_cast<int>(lockstep::env_int("TEST_RESTARTS").value_or(0));
  if (const auto ranks = lockstep::env_string("TEST_STDOUT")) {
    options.spawn.stdout_ranks.emplace();
    for (const char digit : *ranks) options.spawn.stdout_ranks->insert(digit - '0');
  }
  return options;
}

[[noreturn]] void own_handler() {
  std::fputs("the program's own handler\n", stderr);
  std::_Exit(7);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string task = argc > 1 ? argv[1] : "print";
  if (lockstep::env_string("TEST_HANDLER")) std::set_terminate(own_handler);
  if (lockstep::env_string("TEST_BEFORE")) std::printf("before\n");
  auto world = lockstep::start(static_cast<int>(lockstep::env_int("TEST_RANKS").value_or(2)),
                               options_of_environment());
  note(world);
  if (task != "catch") {
    do_task(task, world);
    return 0;
  }
  try {
    if (world.rank() == 1) throw lockstep::DataError("no more data");
    need_the_others(world);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "caught: %s\n", error.what());
    return 3;
  }
}
