// `lockstep bench recovery`: ranks are killed at random moments, ours and torchrun's.
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <limits>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "tools/lockstep/bench/worker.h"
#include "tools/lockstep/mnist_folder.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr int64_t kSamplesOfEpoch = BenchData::kTrainSamples;
constexpr int64_t kSaveEvery = 100;          ///< Steps; where all ranks start again.
constexpr int64_t kKillsOfJob = 10;          ///< Sides take turns after so many.
constexpr int64_t kEndless = 1'000'000'000;  ///< Epochs.
/// Enough for a restart of all ranks on a slow machine.
constexpr std::chrono::minutes kLongestWait{2};

struct Case {
  std::string side;
  int64_t ranks;
  bool replacement;
};

std::vector<int64_t> numbers_in(const fs::path& file, size_t from = 0) {
  std::ifstream stream(file, std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(from * sizeof(int64_t)));
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(int64_t));
  return numbers;
}

bool is_alive(int64_t pid) {
  const std::string stat = first_line("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat[name_end + 2] != 'Z' && stat[name_end + 2] != 'X';
}

/// One job of a side, which trains until it is stopped, and what its processes write.
class RecoveryJob {
 public:
  RecoveryJob(BenchRunner& runner, const Case& of, const std::string& data, int64_t epochs) {
    const bool with_python = of.side == "torchrun";
    const BenchRow config = {{"kind", "recovery"},
                             {"side", of.side},
                             {"ranks", of.ranks},
                             {"replacement", of.replacement},
                             {"data", data},
                             {"folder", folder_.path().string()},
                             {"epochs", epochs},
                             {"save_every", kSaveEvery},
                             {"restarts", of.replacement ? kMostRestarts : 0}};
    const auto command = with_python ? runner.torchrun_command("recovery.py", config, of.ranks,
                                                               {"--standalone", "--max-restarts",
                                                                std::to_string(kMostRestarts)})
                                     : worker_command(config);
    run_ = std::async(std::launch::async, [&runner, command, with_python, side = of.side] {
      runner.run_whole("recovery, " + side, command, with_python);
    });
  }
  ~RecoveryJob() {
    try {
      stop();
    } catch (const InterruptedError&) {  // The next thing that is started says so, too.
    }
  }
  RecoveryJob(const RecoveryJob&) = delete;
  RecoveryJob& operator=(const RecoveryJob&) = delete;

  /// Throws what the job ended with, if it has.
  void poll() {
    if (run_.valid() && run_.wait_for(milliseconds(0)) == std::future_status::ready) {
      run_.get();
      throw Error("a job of the recovery benchmark ended by itself");
    }
    read_finished();
  }
  void wait_for(const std::function<bool()>& condition, const std::string& what) {
    const auto end = BenchClock::now() + kLongestWait;
    for (poll(); !condition(); poll()) {
      if (BenchClock::now() > end) throw TimeoutError("recovery benchmark: no " + what + " came");
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  void wait_for_step() {
    wait_for([&] { return last_step_ > 0; }, "first step");
  }
  void run_for(std::chrono::duration<double> time) {
    for (const auto end = BenchClock::now() + time; BenchClock::now() < end; poll())
      std::this_thread::sleep_for(milliseconds(10));
  }
  /// Of a job with so many epochs.
  void finish() { run_.get(); }
  void stop() {
    if (!run_.valid()) return;
    const auto launcher = parse_int(first_line(folder_.path() / "launcher"));
    if (launcher && run_.wait_for(milliseconds(0)) != std::future_status::ready)
      ::kill(static_cast<pid_t>(*launcher), SIGTERM);
    try {
      run_.get();
    } catch (const InterruptedError&) {
      throw;
    } catch (const std::exception&) {  // It was told to end.
    }
    read_finished();
  }

  struct Times {
    double recovery;
    std::optional<double> detection;  ///< Of the last survivor that has said so.
  };
  /// Kills a rank, and waits for the next step.
  Times kill_one(std::mt19937_64& random) {
    poll();
    std::vector<int64_t> living;
    for (const auto& [pid, read] : read_) {
      if (read > 0 && is_alive(pid)) living.push_back(pid);
    }
    const int64_t victim = living.at(random() % living.size());
    const int64_t before = generation_;
    killed_[victim] = before;
    const int64_t now = BenchClock::now().time_since_epoch().count();
    ::kill(static_cast<pid_t>(victim), SIGKILL);
    wait_for([&] { return generation_ > before; }, "step after a kill");
    Times times{static_cast<double>(first_of_generation_ - now) / 1e9, {}};
    for (const int64_t noticed : noticed_) {
      if (noticed > now) times.detection = static_cast<double>(noticed - now) / 1e9;
    }
    return times;
  }
  int64_t last_step() const { return last_step_; }

  struct Samples {
    int64_t lost = 0;
    int64_t repeated = 0;
  };
  /// Once it has stopped. Of epochs that are whole.
  Samples audit() const;
  /// The hashes of each whole epoch's weights: one, unless it was made twice to other bits.
  std::map<int64_t, std::set<std::string>> weights() const;

 private:
  static constexpr int64_t kMostRestarts = 1'000'000;
  /// By step and generation: which processes.
  using FinishedSteps = std::map<int64_t, std::map<int64_t, std::set<int64_t>>>;
  struct Part {
    int64_t epoch;
    std::vector<int64_t> samples;
  };
  using BegunSteps = std::map<int64_t, std::map<int64_t, std::vector<Part>>>;

  void read_finished();
  BegunSteps begun() const;
  std::set<int64_t> generations_that_finished(int64_t step) const;

  TemporaryDirectory folder_{"lockstep-recovery"};
  std::future<void> run_;
  std::map<int64_t, size_t> read_;     ///< Numbers that were read, by process.
  std::map<int64_t, int64_t> killed_;  ///< By process: in which generation.
  std::vector<int64_t> noticed_;       ///< When; in ascending order.
  FinishedSteps finished_;
  int64_t generation_ = 0;
  int64_t first_of_generation_ = 0;  ///< When its first step was finished.
  int64_t last_step_ = 0;
};

void RecoveryJob::read_finished() {
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("finished-")) continue;
    const int64_t pid = parse_int(name.substr(9)).value();
    size_t& read = read_[pid];
    const auto numbers = numbers_in(entry.path(), read);
    for (size_t i = 0; i + 3 <= numbers.size(); i += 3, read += 3) {
      const int64_t generation = numbers[i], step = numbers[i + 1], time = numbers[i + 2];
      if (step < 0) {
        noticed_.push_back(time);
        continue;
      }
      finished_[step][generation].insert(pid);
      last_step_ = std::max(last_step_, step);
      if (generation < generation_ || (generation == generation_ && time > first_of_generation_))
        continue;
      generation_ = generation;
      first_of_generation_ = time;
    }
  }
  std::sort(noticed_.begin(), noticed_.end());
}

RecoveryJob::BegunSteps RecoveryJob::begun() const {
  BegunSteps begun;
  for (const auto& [pid, read] : read_) {
    const auto numbers = numbers_in(folder_.path() / ("begun-" + std::to_string(pid)));
    for (size_t i = 0; i + 4 <= numbers.size();) {
      const auto count = static_cast<size_t>(numbers[i + 3]);
      if (i + 4 + count > numbers.size()) break;  // It was being written.
      const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(i) + 4;
      begun[numbers[i + 1]][numbers[i]].push_back(
          {numbers[i + 2], {first, first + static_cast<std::ptrdiff_t>(count)}});
      i += 4 + count;
    }
  }
  return begun;
}

/// A step that a rank alone finished, and was killed, is one that the others have dropped.
std::set<int64_t> RecoveryJob::generations_that_finished(int64_t step) const {
  std::set<int64_t> generations;
  const auto found = finished_.find(step);
  if (found == finished_.end()) return generations;
  for (const auto& [generation, processes] : found->second) {
    for (const int64_t pid : processes) {
      const auto killed = killed_.find(pid);
      if (killed == killed_.end() || killed->second != generation) generations.insert(generation);
    }
  }
  return generations;
}

RecoveryJob::Samples RecoveryJob::audit() const {
  Samples result;
  std::map<int64_t, std::vector<int>> used;  // By epoch: how often each sample.
  for (const auto& [step, generations] : begun()) {
    const auto finished = generations_that_finished(step);
    if (finished.empty()) continue;
    // A generation that begins with a finished step may tell of it once more.
    auto counts = generations.upper_bound(*finished.rbegin());
    if (counts == generations.begin()) continue;
    --counts;
    for (auto made = generations.begin(); made != std::next(counts); ++made) {
      for (const Part& part : made->second) {
        auto& epoch = used[part.epoch];
        epoch.resize(kSamplesOfEpoch);
        if (made == counts) {
          for (const int64_t sample : part.samples) ++epoch.at(static_cast<size_t>(sample));
        } else if (finished.contains(made->first)) {
          result.repeated += static_cast<int64_t>(part.samples.size());
        }
      }
    }
  }
  for (const auto& [epoch, hashes] : weights()) {
    for (const int times : used[epoch]) {
      result.lost += times == 0 ? 1 : 0;
      result.repeated += std::max(0, times - 1);
    }
  }
  return result;
}

std::map<int64_t, std::set<std::string>> RecoveryJob::weights() const {
  std::map<int64_t, std::set<std::string>> weights;
  std::ifstream file(folder_.path() / "weights");
  std::string hash;
  for (int64_t epoch = 0; file >> epoch >> hash;) weights[epoch].insert(hash);
  return weights;
}

double percentile(Figures values, double share) {
  std::sort(values.begin(), values.end());
  const auto place = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values.at(std::min(place, values.size() - 1));
}

/// What the kills of one row have come to.
struct Outcome {
  Figures recovery, detection;
  RecoveryJob::Samples samples;
  std::map<int64_t, std::set<std::string>> weights;

  int64_t kills() const { return static_cast<int64_t>(recovery.size()); }
};

class Recoveries {
 public:
  explicit Recoveries(BenchRunner& runner)
      : runner_(runner), data_(runner.options.data_dir), random_(runner.options.seed) {}

  BenchRows rows() {
    std::vector<Case> cases;
    for (const int64_t ranks : runner_.options.devices) {
      if (ranks < 2) throw UsageError("bench recovery: nobody survives of --devices 1");
      for (const auto& [side, replacement] : std::initializer_list<std::pair<std::string, bool>>{
               {"ours", true}, {"ours", false}, {"restart", true}, {"torchrun", true}})
        if (side != "torchrun" || runner_.has_python()) cases.push_back({side, ranks, replacement});
    }
    std::vector<Outcome> outcomes(cases.size());
    for (bool more = true; std::exchange(more, false);) {
      for (size_t i = 0; i < cases.size(); ++i) {
        if (outcomes[i].kills() >= runner_.options.kills) continue;
        run_kills(cases[i], outcomes[i]);
        more = true;
      }
    }
    BenchRows rows;
    for (size_t i = 0; i < cases.size(); ++i) rows.push_back(row_of(cases[i], outcomes[i]));
    return rows;
  }

 private:
  static std::string name_of(const Case& of) {
    return of.side + ", " + counted(of.ranks, "rank") +
           (of.replacement ? "" : ", without replacement");
  }

  void run_kills(const Case& of, Outcome& outcome) {
    int64_t kills = std::min(kKillsOfJob, runner_.options.kills - outcome.kills());
    if (!of.replacement) kills = std::min(kills, of.ranks - 1);
    RecoveryJob job(runner_, of, data_.folder(), kEndless);
    job.wait_for_step();
    for (int64_t i = 0; i < kills; ++i) {
      bench_progress(name_of(of) + ": kill " + std::to_string(outcome.kills() + 1));
      job.run_for(std::chrono::duration<double>(std::uniform_real_distribution(0.1, 0.6)(random_)));
      const auto times = job.kill_one(random_);
      outcome.recovery.push_back(times.recovery);
      if (times.detection) outcome.detection.push_back(*times.detection);
    }
    const int64_t step = job.last_step();
    job.wait_for([&] { return job.last_step() > step + 2 * steps_of_epoch(of); }, "next epoch");
    job.stop();
    const auto samples = job.audit();
    outcome.samples.lost += samples.lost;
    outcome.samples.repeated += samples.repeated;
    for (auto& [epoch, hashes] : job.weights()) outcome.weights[epoch].merge(hashes);
  }
  static int64_t steps_of_epoch(const Case& of) { return kSamplesOfEpoch / 64 / of.ranks; }

  /// Of a run that nobody disturbs.
  BenchRow has_same_weights(const Case& of, const Outcome& outcome) {
    if (!of.replacement || outcome.weights.empty()) return nullptr;
    RecoveryJob job(runner_, of, data_.folder(), outcome.weights.rbegin()->first + 1);
    job.finish();
    auto expected = job.weights();
    return std::all_of(outcome.weights.begin(), outcome.weights.end(),
                       [&](const auto& epoch) { return expected[epoch.first] == epoch.second; });
  }

  /// Steps in periods that begin with a kill, of those in periods between them.
  BenchRow goodput(const Case& of) {
    if (!of.replacement) return nullptr;
    const std::chrono::duration<double> period(runner_.options.kill_every);
    RecoveryJob job(runner_, of, data_.folder(), kEndless);
    job.wait_for_step();
    job.run_for(std::chrono::seconds(1));
    double disturbed = 0, calm = 0;
    for (int round = 0; round < runner_.options.rounds_or_default(); ++round) {
      bench_progress(name_of(of) + ": goodput, round " + std::to_string(round + 1));
      for (double* const steps : {&calm, &disturbed}) {
        const int64_t before = job.last_step();
        const auto end = BenchClock::now() + period;
        if (steps == &disturbed) job.kill_one(random_);
        job.run_for(end - BenchClock::now());
        *steps += static_cast<double>(job.last_step() - before);
      }
    }
    return disturbed / calm;
  }

  BenchRow row_of(const Case& of, const Outcome& outcome) {
    BenchRow row = {{"side", of.side},
                    {"devices", of.ranks},
                    {"replacement", of.replacement},
                    {"recovery_p50_s", median(outcome.recovery)},
                    {"recovery_p99_s", percentile(outcome.recovery, 0.99)},
                    {"detection_p50_s", nullptr},
                    {"samples_lost", outcome.samples.lost},
                    {"samples_repeated", outcome.samples.repeated}};
    if (!outcome.detection.empty()) row["detection_p50_s"] = median(outcome.detection);
    row["goodput"] = goodput(of);
    row["sha256_equal"] = has_same_weights(of, outcome);
    row["kills"] = outcome.kills();
    row["dataset"] = data_.name();
    row["seed"] = runner_.options.seed;
    return row;
  }

  BenchRunner& runner_;
  const BenchData data_;
  std::mt19937_64 random_;
};

}  // namespace

BenchRows bench_recovery(BenchRunner& runner) {
  return Recoveries(runner).rows();
}

}  // namespace lockstep::tool
