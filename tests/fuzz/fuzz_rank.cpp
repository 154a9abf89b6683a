// One rank of a job of random calls, which test_fuzz.py starts:
//   lockstep_fuzz_rank store      hosts a store, prints its port, ends with standard input
//   lockstep_fuzz_rank rank JOB   joins and calls what JOB, JSON text, says: see program.h
// Each of its lines begins with "rank R: ". How it ended is its last line and its exit code:
//   done ...          0
//   wrong ...         3   it found wrong values, or no error where one was promised
//   error TYPE ...   10   PeerLostError, 11 TimeoutError, 12 MismatchError, 13 another of Lockstep,
//                    14   any other
#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/world.h"
#include "tests/fuzz/deviations.h"
#include "tests/fuzz/execution.h"

namespace lockstep::fuzz {
namespace {

int this_rank = -1;

/// In one write, so that the lines of ranks that share an output do not mix.
void say(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  text = "rank " + std::to_string(this_rank) + ": " + text + "\n";
  if (::write(STDOUT_FILENO, text.data(), text.size()) < 0) ::_exit(15);
}

int host_store() {
  TcpStoreOptions options;
  options.is_listener = true;
  const auto store = tcp_store(options);
  std::cout << tcp_store_port(store) << std::endl;
  for (char byte; std::cin.get(byte);) {
  }
  return 0;
}

World join(const Job& job) {
  InitOptions options;
  options.backend = job.backend;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(job.timeout * 1000));
  options.debug = job.detail ? DebugLevel::detail : DebugLevel::info;
  return init(options);
}

/// The program, block by block.
class Program {
 public:
  Program(const Job& job, const World& world) : job_(job), world_(world) {
    std::vector<int> all;
    for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
    groups_.push_back({all, carrier_of(job, all), world.group()});
    KeyedRandom random(job.seed, 2, 2);
    for (int i = 0; i < 2; ++i)
      for (auto& group : form(job, world, make_group_plan(random, world.size())))
        groups_.push_back(std::move(group));
    for (const auto& group : groups_) members_.push_back(group.members);
    ending_ = make_ending(job, members_);
  }

  /// Returns early when this rank leaves the others.
  void run() {
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(static_cast<int64_t>(job_.seconds * 1000));
    for (; goes_on(end); ++block_) {
      say("block " + std::to_string(block_));
      if (!run_block()) return say("left");
    }
    say("done " + std::to_string(block_) + " blocks, " + std::to_string(calls_) + " calls, " +
        std::to_string(mismatches_) + " mismatches");
  }

  /// What was being called.
  std::string where() const { return "block " + std::to_string(block_) + ", " + where_ + ": "; }

 private:
  struct Begun {
    Call call;
    std::unique_ptr<Running> running;
  };

  bool goes_on(std::chrono::steady_clock::time_point end) {
    if (job_.seconds <= 0) return block_ < job_.blocks;
    if (block_ % 16) return true;
    where_ = "whether to go on";
    at::Tensor more = at::full({}, std::chrono::steady_clock::now() < end, at::kLong);
    world_.group().broadcast(more, 0);
    return more.item<int64_t>() != 0;
  }

  bool run_block() {
    const Block block = make_block(job_, members_, block_);
    std::vector<Begun> begun;
    for (size_t i = 0; i < block.steps.size(); ++i)
      if (!begin(block, i, begun)) return false;
    for (const size_t i : order_of_waits(begun.size())) finish(begun[i]);
    if (block.barrier) {
      where_ = "the barrier at its end";
      world_.group().barrier();
    }
    return true;
  }

  std::vector<size_t> order_of_waits(size_t count) const {
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    KeyedRandom random(job_.seed, static_cast<uint64_t>(block_),
                       10 + static_cast<uint64_t>(world_.rank()));
    shuffle(order, random);
    return order;
  }

  /// False when this rank leaves.
  bool begin(const Block& block, size_t index, std::vector<Begun>& begun) {
    const bool ends =
        block_ == ending_.block && index == ending_.step && world_.rank() == ending_.rank;
    std::optional<EndingSoon> soon;
    if (ends) {
      say("goes by " + job_.ending);
      if (ending_.moment == Ending::Moment::before) {
        end_by(job_.ending);
        return job_.ending == "skip";
      }
      if (ending_.moment == Ending::Moment::during) soon.emplace(job_.ending, ending_.microseconds);
    }
    const auto call = call_of(block, index);
    if (call) {
      where_ = text_of(*call);
      ++calls_;
      auto running = expecting_mismatch(*call, [&] { return fuzz::start(*call); });
      if (running) begun.push_back({*call, std::move(running)});
    }
    if (ends) end_by(job_.ending);
    return !ends;
  }

  /// None when this rank is not of the group.
  std::optional<Call> call_of(const Block& block, size_t index) const {
    const auto& planned = block.steps[index];
    const int unique = static_cast<int>(block_ * 8 + static_cast<int64_t>(index));
    const auto* group = &groups_[static_cast<size_t>(planned.group)];
    Step step = make_step(job_, group->carrier, group->size(), planned.key, unique);
    if (step.kind == Kind::form_group) group = &groups_[0];  // All ranks of the job take part.
    if (!group->handle) return std::nullopt;
    Call call{world_, job_, *group, step, step, -1};
    if (static_cast<int>(index) == block.mismatch && compared(*group, step)) {
      // Of each tag and pair of ranks the first messages are compared over any backend.
      if (is_message(step.kind)) call.step.tag = 1000 + unique;
      if (const auto other = deviated(job_, group->carrier, call.step, group->size())) {
        call.others = *other;
        call.deviant = group->rank_of(block.deviant);
      }
    }
    return call;
  }

  /// Whether a difference is promised to be noticed at any call of the group.
  bool compared(const Group& group, const Step& step) const {
    const bool always =
        group.carrier == Carrier::shm || group.carrier == Carrier::hierarchical || job_.detail;
    return always || is_message(step.kind);
  }

  void finish(const Begun& begun) {
    where_ = text_of(begun.call);
    const bool agreed = expecting_mismatch(begun.call, [&] {
      begun.running->wait();
      return true;
    });
    if (!agreed) return;
    if (begun.call.deviant >= 0) {
      ++mismatches_;
      if (!is_message(begun.call.step.kind)) throw Finding("no rank noticed that the calls differ");
    }
    begun.running->check();
  }

  /// What `part` returns, or nothing when it threw the MismatchError that the call must give.
  template <class Part>
  auto expecting_mismatch(const Call& call, const Part& part) -> decltype(part()) {
    try {
      return part();
    } catch (const MismatchError& error) {
      if (call.deviant < 0 || is_message(call.step.kind)) throw;
      const int deviant = call.group.members[static_cast<size_t>(call.deviant)];
      if (!names_rank(error.what(), deviant))
        throw Finding("the error does not name rank " + std::to_string(deviant) + ": " +
                      error.what());
      ++mismatches_;
      return {};
    }
  }

  std::string text_of(const Call& call) const {
    std::string text = describe(call.step) + ", of ranks " + c10::str(call.group.members);
    if (call.deviant >= 0)
      text += ", but rank " +
              std::to_string(call.group.members[static_cast<size_t>(call.deviant)]) + " calls " +
              describe(call.others);
    return text;
  }

  const Job job_;
  const World& world_;
  std::vector<Group> groups_;  ///< The default one first.
  std::vector<std::vector<int>> members_;
  Ending ending_;
  int64_t block_ = 0;
  int64_t calls_ = 0;
  int64_t mismatches_ = 0;
  std::string where_ = "at the start";
};

void run(const Job& job) {
  const auto world = join(job);
  this_rank = world.rank();
  say("joined");
  std::unique_ptr<Program> program;
  try {
    program = std::make_unique<Program>(job, world);
    program->run();
  } catch (const Finding& finding) {
    say("wrong " + (program ? program->where() : "forming groups: ") + finding.what());
    ::_exit(3);
  } catch (const std::exception&) {
    say("failed in " + (program ? program->where() : "forming groups"));
    throw;
  }
}

int fail(const char* type, const std::exception& error, int code) {
  say(std::string("error ") + type + " " + error.what());
  return code;
}

}  // namespace
}  // namespace lockstep::fuzz

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "store") return fuzz::host_store();
    if (mode != "rank" || argc != 3) throw UsageError("store, or rank JOB");
    at::set_num_threads(1);
    fuzz::run(fuzz::parse_job(argv[2]));
    return 0;
  } catch (const PeerLostError& error) {
    return fuzz::fail("PeerLostError", error, 10);
  } catch (const TimeoutError& error) {
    return fuzz::fail("TimeoutError", error, 11);
  } catch (const MismatchError& error) {
    return fuzz::fail("MismatchError", error, 12);
  } catch (const Error& error) {
    return fuzz::fail("Error", error, 13);
  } catch (const std::exception& error) {
    return fuzz::fail("other", error, 14);
  }
}
