#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/base/state_dict.h"
#include "lockstep/comm/world.h"
#include "lockstep/launch/start.h"

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace lockstep {

class Optimizer;

/// Ends a generation from within `ElasticJob::commit` or Trainer::fit. Let it pass: `run` catches
/// it.
class GenerationEnded : public Error {
 public:
  using Error::Error;
};

/// A loop of one's own whose ranks live on when others die, in the manner of Horovod's elastic
/// state. A rank that dies is noticed by the others, which keep their process and their memory:
/// they drop the unfinished step, meet again without it, and go on. While restarts are left, a new
/// process takes its place. It gets the state from a rank that has it, and no disk is read.
///
///     lockstep::ElasticJob job(4, {.max_restarts = 3});
///     ...  // the model, the optimizer and `int64_t step = 0`
///     job.add("model", *model);
///     job.add("optimizer", optimizer);
///     job.add("step", step);
///     job.run([&](lockstep::World& world) {
///       lockstep::GradientAverager averager(*model, world.group());
///       while (step < 1000) {
///         ...  // forward, backward, optimizer.step()
///         ++step;
///         job.commit();
///       }
///     });
///
/// That holds for the ranks which this program, started by hand, or `lockstep run` has started, the
/// latter also on several hosts. Under other launchers `run` has one generation, and a rank's
/// failure ends it as ever. One thread.
class ElasticJob {
 public:
  /// As `start`, up to `init`: returns in a rank only. With `max_restarts` 0 no process takes a
  /// dead one's place.
  explicit ElasticJob(int nprocs, const StartOptions& options = {});
  /// In a process that a launcher has started as a rank. The job goes on with so many ranks as
  /// `sizes` has; empty: with any number. While there are others, those that live wait for new
  /// processes. Where none will come, the attempt has failed.
  explicit ElasticJob(const InitOptions& init, const std::set<int>& sizes = {});
  ~ElasticJob();
  ElasticJob(const ElasticJob&) = delete;
  ElasticJob& operator=(const ElasticJob&) = delete;

  /// How a part of the state is read and replaced.
  struct Part {
    std::function<StateDict()> get;
    std::function<void(const StateDict&)> set;
  };
  /// What all ranks have alike after each step, and a rank that comes late or is a step behind gets
  /// from the others. Names are the program's, each given once (UsageError). Parts outlive `run`.
  void add(const std::string& name, torch::nn::Module& module);
  void add(const std::string& name, torch::optim::Optimizer& optimizer);
  void add(const std::string& name, Optimizer& optimizer);
  /// Where an unfinished step changed a number, it becomes again what it was at the last commit.
  void add(const std::string& name, int64_t& number);
  void add(const std::string& name, double& number);
  void add(const std::string& name, Part part);

  /// Calls `train` for each generation with its World, until it returns on all ranks. What belongs
  /// to a World (averagers, DDP, groups, samplers) is made within `train` and gone when it ends.
  /// `train` is entered with the state of the last commit, so let its loops begin there. It lets
  /// pass what calls between ranks throw.
  ///
  /// Throws what `train` and `init` throw. After a PeerLostError or TimeoutError it first waits 5 s
  /// for a next generation, and 30 s where there are several hosts.
  void run(const std::function<void(World&)>& train);

  /// Says that a step is done, on every rank after each optimizer step. No call between ranks may
  /// come between that and this. Costs some microseconds. Throws GenerationEnded where the ranks
  /// are to meet anew, because a process has come.
  void commit();
  /// Says that a call between ranks has failed, to code that must wait for other ranks before it
  /// lets the failure pass: those that hang are killed meanwhile. `run` says it by itself then.
  void leave();
  /// Steps that were committed, on whichever ranks.
  int64_t commits() const;
  /// The number of the generation, as this host counts. 0: no rank had a state when it began.
  int64_t generation() const;
  /// Whether ranks of other hosts may take part.
  bool spans_hosts() const;

  /// What one generation leaves to the next in this process, for code that shares it by itself, as
  /// Trainer::live_on does. Null at first.
  std::shared_ptr<const void>& kept();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
