#include "lockstep/launch/launcher.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <exception>
#include <future>
#include <map>
#include <set>

#include "lockstep/base/cgroup.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/job.h"
#include "lockstep/launch/output.h"
#include "lockstep/launch/recovery.h"
#include "lockstep/launch/signals.h"
#include "lockstep/launch/supervisor.h"
#include "lockstep/launch/worker_streams.h"

extern char** environ;

namespace lockstep::launch {
namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

/// Once every process is gone, for how long a pipe that someone else still holds is read.
constexpr std::chrono::milliseconds kDrainLimit{1000};
constexpr std::chrono::milliseconds kServedInterval{10};
constexpr std::chrono::milliseconds kServeLimit{60'000};
/// How often to look whether a new process has come to join the others.
constexpr std::chrono::milliseconds kExpectedInterval{5};
/// The same for ranks that hang.
constexpr std::chrono::milliseconds kHangingInterval{200};

std::vector<std::string> environment_of(const WorkerPlan& plan,
                                        const std::filesystem::path& generation_folder) {
  std::set<std::string> replaced(plan.unset.begin(), plan.unset.end());
  replaced.insert(kGenerationFolderVariable);
  for (const auto& [name, value] : plan.env) replaced.insert(name);
  std::vector<std::string> env;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (!replaced.count(text.substr(0, text.find('=')))) env.push_back(text);
  }
  for (const auto& [name, value] : plan.env) env.push_back(name + "=" + value);
  if (!generation_folder.empty())
    env.push_back(kGenerationFolderVariable + ("=" + generation_folder.string()));
  return env;
}

/// What a program prints of a lost peer that catches the error itself and so writes no error file:
/// our hint, the words of Gloo, NCCL and the kernel, and the exception's type in Python's
/// traceback.
bool tells_of_a_lost_peer(const std::string& text) {
  for (const char* words :
       {kPeerLostHint, "Connection closed by peer", "Connection reset by peer",
        "NCCL communicator was aborted", "remote process exited or there was a network error",
        "PeerLostError"}) {
    if (text.find(words) != std::string::npos) return true;
  }
  return false;
}

std::set<int> ranks_of(const LaunchPlan& plan) {
  std::set<int> ranks;
  for (const auto& worker : plan.workers) ranks.insert(worker.rank);
  return ranks;
}

/// Why another attempt would end in the same way. Empty: it may succeed.
std::string why_not_again(const WorkerFailure& failure) {
  if (failure.start_errno != 0) return "the program cannot be executed";
  if (failure.exit_code() == kExitUsage) return "exit code 2 tells of wrong arguments or settings";
  return {};
}

HostEnd end_of_host(WorkerFailure failure) {
  failure.lines_are_shown = false;  // On the consoles of other hosts.
  return {.exit_code = failure.exit_code(),
          .text = failure.text(),
          .can_retry = why_not_again(failure).empty()};
}

/// How often ranks have started again, and why.
struct Restarts {
  int most = 0;
  std::vector<std::string> failures = {};  ///< A line for each one that the job has survived.

  int used() const { return static_cast<int>(failures.size()); }
  bool are_left() const { return used() < most; }
  /// "restart 1 of 3".
  std::string text() const {
    return "restart " + std::to_string(used()) + " of " + std::to_string(most);
  }
};

std::vector<int> with_messages(std::vector<int> signals) {
  signals.insert(signals.end(), {SIGUSR1, SIGUSR2});
  return signals;
}

class Launcher {
 public:
  /// `agent`: of a job of several hosts, whose `generation` begins; else null. A failure that the
  /// other workers survive is added to `restarts`.
  Launcher(const LaunchPlan& plan, SignalCatcher& signals, Restarts& restarts,
           HostAgent* agent = nullptr, const HostGeneration& generation = {})
      : plan_(plan),
        signals_(signals),
        restarts_(restarts),
        agent_(agent),
        generation_(generation.number),
        out_(STDOUT_FILENO),
        err_(STDERR_FILENO),
        one_console_(same_file(STDOUT_FILENO, STDERR_FILENO)),
        out_copies_(plan.out_copies),
        err_copies_(plan.err_copies),
        job_(static_cast<int>(plan.workers.size()), plan.job) {
    for (const auto& worker : plan.workers) {
      streams_.push_back(std::make_unique<WorkerStream>(worker.out, worker.rank, worker.prefix,
                                                        STDOUT_FILENO, out_, out_copies_));
      streams_.push_back(std::make_unique<WorkerStream>(worker.err, worker.rank, worker.prefix,
                                                        STDERR_FILENO, one_console_ ? out_ : err_,
                                                        err_copies_));
    }
    if (!plan.generation_folder.empty() && agent)
      host_recovery_.emplace(plan.generation_folder, ranks_of(plan), generation);
    else if (!plan.generation_folder.empty())
      recovery_.emplace(plan.generation_folder, ranks_of(plan));
    pids_.resize(plan.workers.size(), -1);
    reports_.resize(plan.workers.size());
  }

  /// The failure that ended it; none: success.
  std::optional<WorkerFailure> run() {
    start();
    serve();
    while (!finished()) step();
    return conclude();
  }
  /// See Job.
  int late_signal() const { return job_.late_signal(); }
  /// Of several hosts: the number of the last one that the workers were in.
  int64_t generation() const { return generation_; }
  bool succeeded() const { return job_.ending() == Job::Ending::success; }
  /// Whether the failure follows from another one, as far as the worker says.
  bool is_consequence() const {
    const auto cause = job_.root_cause();
    return cause && job_.end_of(*cause)->consequence;
  }

 private:
  WorkerStream& error_stream(size_t worker) { return *streams_[2 * worker + 1]; }

  void start() {
    std::vector<ProcessPlan> processes;
    for (size_t i = 0; i < plan_.workers.size(); ++i) {
      const auto& worker = plan_.workers[i];
      processes.push_back({worker.file, worker.argv,
                           environment_of(worker, plan_.generation_folder),
                           streams_[2 * i]->worker_fd(), streams_[2 * i + 1]->worker_fd(),
                           worker.processors, worker.inherit_stdin, worker.body});
    }
    supervisor_ =
        std::make_unique<Supervisor>(processes, plan_.scratch, !plan_.generation_folder.empty());
    for (auto& stream : streams_) stream->started();
    if (recovery_) show_first_member(Clock::now());
  }

  /// On a thread of its own: LibTorch takes 0.3 s to load, in which a rank may fail.
  void serve() {
    if (plan_.serve) serving_ = std::async(std::launch::async, [this] { served_ = plan_.serve(); });
  }

  /// Whether what the workers need is there, or has failed.
  void take_served(std::chrono::milliseconds patience) {
    if (!serving_.valid() || serving_.wait_for(patience) != std::future_status::ready) return;
    try {
      serving_.get();
    } catch (...) {
      serve_failure_ = std::current_exception();
      send(job_.failed(Clock::now()));
    }
  }

  void send(int signal) {
    if (signal != 0) supervisor_->signal_all(signal);
  }

  bool finished() const {
    if (!supervisor_->gone()) return false;
    const bool reading = std::any_of(streams_.begin(), streams_.end(),
                                     [](const auto& stream) { return stream->open(); });
    if (reading && Clock::now() < *drain_until_) return false;
    return leaves_at_once_ || (!out_.pending() && !err_.pending());
  }

  void step() {
    std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0}};
    fds.push_back({agent_ && !told_to_stop_ ? agent_->event_fd() : -1, POLLIN, 0});
    fds.push_back({supervisor_->gone() ? -1 : supervisor_->event_fd(), POLLIN, 0});
    fds.push_back({out_.pending() ? out_.fd() : -1, POLLOUT, 0});
    fds.push_back({err_.pending() ? err_.fd() : -1, POLLOUT, 0});
    for (const auto& stream : streams_) fds.push_back({stream->poll_fd(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), wait_ms());
    const Time now = Clock::now();
    take_served(std::chrono::milliseconds(0));
    while (const auto signal = signals_.next()) take_signal(*signal, now);
    for (auto& stream : streams_) {
      stream->read(now);
      stream->show_prompt(now);
    }
    if (!supervisor_->gone()) take_events(now);
    send(job_.tick(now));
    follow_agent(now);
    count_the_missing(now);
    if (recovery_) look_after_generation(now);
    if (host_recovery_ && job_.running()) kill_hanging(host_recovery_->hanging(now));
    pump(now);
    if (job_.all_ended() && !serving_.valid()) supervisor_->finish();
  }

  int wait_ms() const {
    std::optional<Time> next = job_.deadline();
    if (drain_until_ && (!next || *drain_until_ < *next)) next = drain_until_;
    std::chrono::milliseconds interval{60'000};
    if (serving_.valid()) interval = kServedInterval;
    const bool expects = recovery_ && !recovery_->expected().empty();
    if ((recovery_ || host_recovery_) && job_.running())
      interval = expects ? kExpectedInterval : kHangingInterval;
    const auto asks = [](const auto& stream) { return stream->has_prompt(); };
    if (std::any_of(streams_.begin(), streams_.end(), asks))
      interval = std::min(interval, LineCutter::kPromptDelay);
    const int64_t longest = interval.count();
    if (!next) return longest < 60'000 ? static_cast<int>(longest) : -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, longest));
  }

  void follow_agent(Time now) {
    if (!agent_ || told_to_stop_ || job_.all_ended()) return;
    const auto order = agent_->order();
    const bool runs = order.kind == HostOrder::Kind::run;
    if (runs && order.generation.number == generation_) return;
    if (runs && follow(order.generation, now)) return;
    told_to_stop_ = true;
    if (!order.interrupted) return send(job_.failed(now));
    send(has_passed_usr1_on_ ? job_.left(now) : job_.signalled(SIGTERM, now));
  }

  /// True: the workers that live go on in this generation, and new processes beside them.
  bool follow(const HostGeneration& next, Time now) {
    bool all_there = host_recovery_ && job_.running();
    for (size_t i = 0; i < pids_.size(); ++i)
      all_there = all_there && !job_.end_of(static_cast<int>(i));
    const auto missing = all_there ? host_recovery_->follow(next, now) : std::nullopt;
    if (!missing) return false;
    generation_ = next.number;
    if (plan_.on_generation) plan_.on_generation(next);
    for (const auto& entry : std::exchange(missing_, {})) start_again(entry.first);
    return true;
  }

  /// The job ends without those that others have waited for.
  void count_the_missing(Time now) {
    if (job_.running()) return;
    for (const auto& [index, end] : std::exchange(missing_, {})) send(job_.ended(index, end, now));
  }

  void take_signal(int signal, Time now) {
    const auto& own = plan_.signals;
    if (is_message(signal) && std::find(own.begin(), own.end(), signal) == own.end()) {
      has_passed_usr1_on_ = has_passed_usr1_on_ || signal == SIGUSR1;
      return send(signal);
    }
    if (agent_) agent_->leave();
    if (job_.all_ended()) leaves_at_once_ = true;
    send(job_.signalled(signal, now));
  }

  void take_events(Time now) {
    while (const auto event = supervisor_->next()) {
      if (event->kind == SupervisorEvent::started) {
        pids_[static_cast<size_t>(event->index)] = event->value;
        tell(event->index, {});
      } else {
        take_end(event->index, *event, now);
      }
    }
    if (!supervisor_->gone()) return;
    drain_until_ = now + kDrainLimit;
    // Else someone has killed it, and the kernel the workers with it.
    supervisor_killed_ = !job_.all_ended();
    for (size_t i = 0; i < pids_.size(); ++i)
      if (pids_[i] > 0 && !job_.end_of(static_cast<int>(i))) ::kill(-pids_[i], SIGKILL);
  }

  void take_end(int index, const SupervisorEvent& event, Time now) {
    WorkerEnd end;
    (event.kind == SupervisorEvent::ended ? end.wait_status : end.start_errno) = event.value;
    end.ended_at = std::time(nullptr);
    if (!end.succeeded()) {
      const auto worker = static_cast<size_t>(index);
      error_stream(worker).read(now);
      auto& report = reports_[worker];
      report = read_error_file(plan_.workers[worker].error_file);
      if (report && report->timestamp > 0) end.said_at = report->timestamp;
      std::string last;
      for (const auto& line : error_stream(worker).tail().lines()) last += line + "\n";
      const bool ours = report && report->failure;
      end.consequence =
          ours ? report->consequence() : tells_of_a_lost_peer(report ? report->message : last);
      if (recover(index, end)) return;
    }
    send(job_.ended(index, end, now));
    tell(index, job_.end_of(index));
    if (recovery_ && end.succeeded())
      recovery_->ended(plan_.workers[static_cast<size_t>(index)].rank);
    drop_who_comes_too_late();
    const bool leaves = job_.signal() != 0 || job_.late_signal() != 0;
    if (agent_ && leaves) agent_->leave();
  }

  /// True: the others go on without the worker. Not so where it has ended because of them: they
  /// were late, or called something else.
  bool recover(int index, const WorkerEnd& end) {
    const auto& report = reports_[static_cast<size_t>(index)];
    const bool because_of_others = end.consequence || (report && report->failure);
    const bool may = recovery_ || host_recovery_;
    if (!may || !job_.running() || end.left_by_usr1() || because_of_others) return false;
    const auto& worker = plan_.workers[static_cast<size_t>(index)];
    const auto failure = failure_of(index, end);
    if (!why_not_again(failure).empty()) return false;
    if (host_recovery_) return recover_with_hosts(index, end, failure);
    const bool replaced = restarts_.are_left();
    if (!recovery_->go_on_without(worker.rank, replaced)) return false;
    tell(index, end, true, replaced);
    restarts_.failures.push_back(failure.line());
    std::string text = plan_.told_by + failure.line() + "; the others ";
    text += recovery_->waits() ? "wait" : "go on without it";
    if (replaced) {
      text += ", and a new process takes its place (" + restarts_.text() + ")";
      start_again(index);
    } else {
      job_.dropped(index);
    }
    log_warning(text);
    return true;
  }

  bool recover_with_hosts(int index, const WorkerEnd& end, const WorkerFailure& failure) {
    if (!host_recovery_->go_on_without(failure.rank)) return false;
    missing_[index] = end;
    tell(index, end, true, true);
    HostEnd told = end_of_host(failure);
    told.others_live = true;
    agent_->ended(generation_, told);
    return true;
  }

  void look_after_generation(Time now) {
    recovery_->admit();
    show_first_member(now);
    if (job_.running()) kill_hanging(recovery_->hanging(now));
  }

  void kill_hanging(const std::set<int>& hanging) {
    for (size_t i = 0; i < pids_.size(); ++i) {
      if (hanging.count(plan_.workers[i].rank) == 0 || pids_[i] <= 0) continue;
      log_warning(plan_.told_by + "rank " + std::to_string(plan_.workers[i].rank) +
                  " hangs: the others have waited in vain; it is killed");
      ::kill(-pids_[i], SIGKILL);
    }
  }

  void show_first_member(Time now) {
    const int first = recovery_->first_member();
    if (!plan_.shows_first_member || first < 0 || first == shown_) return;
    shown_ = first;
    for (size_t i = 0; i < plan_.workers.size(); ++i) {
      streams_[2 * i]->read(now);
      streams_[2 * i]->mute(plan_.workers[i].rank != shown_);
    }
  }

  void start_again(int index) {
    const auto& worker = plan_.workers[static_cast<size_t>(index)];
    std::error_code ignored;
    std::filesystem::remove(worker.error_file, ignored);
    GenerationFolder(plan_.generation_folder).forget(worker.rank);
    reports_[static_cast<size_t>(index)].reset();
    supervisor_->start_again(index);
    if (recovery_) recovery_->expect(worker.rank);
  }

  /// When all members are done, nobody waits for a new process.
  void drop_who_comes_too_late() {
    if (!recovery_ || recovery_->has_members()) return;
    for (size_t i = 0; i < plan_.workers.size(); ++i) {
      if (recovery_->expected().count(plan_.workers[i].rank) > 0) job_.dropped(static_cast<int>(i));
    }
  }

  /// `end`: none for a start.
  void tell(int index, const std::optional<WorkerEnd>& end, bool others_go_on = false,
            bool is_replaced = false) {
    if (!plan_.on_worker) return;
    const bool failed = end && !end->succeeded();
    plan_.on_worker({plan_.workers[static_cast<size_t>(index)].local_rank,
                     pids_[static_cast<size_t>(index)], end,
                     failed ? failure_of(index, *end).line() : "", others_go_on, is_replaced});
  }

  void pump(Time now) {
    out_.pump();
    err_.pump();
    for (const auto* queue : {&out_, &err_}) {
      if (queue->failed_with() == 0 || output_failure_ != 0) continue;
      output_failure_ = queue->failed_with();
      send(job_.output_closed(now));
    }
  }

  WorkerFailure failure_of(int index, const WorkerEnd& end) {
    const auto i = static_cast<size_t>(index);
    const auto& worker = plan_.workers[i];
    WorkerFailure failure;
    failure.rank = worker.rank;
    failure.local_rank = worker.local_rank;
    failure.pid = pids_[i];
    failure.wait_status = end.wait_status;
    failure.start_errno = end.start_errno;
    failure.file = worker.file;
    failure.report = reports_[i];
    failure.last_lines = error_stream(i).tail().lines();
    failure.lines_are_shown = !plan_.repeat_shown_lines && error_stream(i).last_on_console();
    failure.report_suffices = plan_.reports_suffice;
    failure.error_log = worker.err.file;
    if (WIFSIGNALED(end.wait_status) && WTERMSIG(end.wait_status) == SIGKILL && !end.after_stop)
      failure.memory = memory_words(memory_before_, memory_use());
    return failure;
  }

  std::optional<WorkerFailure> conclude() {
    if (serving_.valid()) take_served(kServeLimit);
    for (auto& stream : streams_) stream->close();
    out_.pump();
    err_.pump();
    supervisor_.reset();
    served_.reset();
    if (job_.signal() != 0) throw InterruptedError(job_.signal());
    if (serve_failure_) std::rethrow_exception(serve_failure_);
    if (supervisor_killed_) {
      throw Error("the process that keeps the workers was killed; the workers ended with it");
    }
    const auto cause = job_.root_cause();
    if (job_.ending() == Job::Ending::failure && cause)
      return failure_of(*cause, *job_.end_of(*cause));
    if (output_failure_ == EPIPE) throw InterruptedError(SIGPIPE);
    if (output_failure_ != 0) throw SystemError("cannot write the output", output_failure_);
    return std::nullopt;
  }

  const LaunchPlan& plan_;
  const MemoryUse memory_before_ = memory_use();
  SignalCatcher& signals_;
  Restarts& restarts_;
  HostAgent* const agent_;
  std::optional<Recovery> recovery_;
  // Of a job of several hosts.
  std::optional<HostRecovery> host_recovery_;
  int64_t generation_;
  std::map<int, WorkerEnd> missing_;  ///< Workers that have failed in it, while the others wait.
  OutputQueue out_;
  OutputQueue err_;
  bool one_console_;
  LineCopies out_copies_;
  LineCopies err_copies_;
  Job job_;
  std::vector<std::unique_ptr<WorkerStream>> streams_;  // out and err of worker 0, of worker 1, ...
  int shown_ = -1;  ///< Whose standard output is shown, where it is that of one.
  std::vector<pid_t> pids_;
  std::vector<std::optional<ErrorReport>> reports_;
  std::shared_ptr<void> served_;
  std::future<void> serving_;
  bool told_to_stop_ = false;        ///< By the agent.
  bool has_passed_usr1_on_ = false;  ///< The workers may be leaving.
  std::exception_ptr serve_failure_;
  std::unique_ptr<Supervisor> supervisor_;
  std::optional<Time> drain_until_;
  bool supervisor_killed_ = false;
  bool leaves_at_once_ = false;  ///< Output is not waited for.
  int output_failure_ = 0;
};

/// The last failure at length, those before in a line each.
std::string text_of(const WorkerFailure& last, const Restarts& restarts,
                    const std::string& how_to_go_on) {
  std::string text = last.text();
  const bool was_killed = last.start_errno == 0 && WIFSIGNALED(last.wait_status);
  if (!last.memory.empty()) {
    text +=
        "\n  hint: give the job more memory (docker run --memory, Slurm's --mem, Kubernetes' "
        "limits), or take fewer ranks on this host, smaller batches or a sharded strategy";
  } else if (was_killed && restarts.most == 0 && !how_to_go_on.empty()) {
    text += "\n  hint: " + how_to_go_on;
  }
  if (restarts.most > 0) {
    const auto why = why_not_again(last);
    text += "\n  not started again: " + (why.empty() ? counted(restarts.most, "restart") + " of " +
                                                           std::to_string(restarts.most) + " used"
                                                     : why);
  }
  for (size_t i = 0; i < restarts.failures.size(); ++i)
    text += "\n  before, attempt " + std::to_string(i) + ": " + restarts.failures[i];
  return text;
}

}  // namespace

void launch(const std::function<LaunchPlan(int attempt)>& plan_of, int max_restarts) {
  ensure_standard_descriptors();
  LaunchPlan plan = plan_of(0);
  SignalCatcher signals(with_messages(plan.signals));  // Between attempts too.
  Restarts restarts{.most = max_restarts};
  while (true) {
    auto launcher = std::make_unique<Launcher>(plan, signals, restarts);
    const auto failure = launcher->run();
    if (!failure) return;
    if (!restarts.are_left() || !why_not_again(*failure).empty())
      throw WorkerError(text_of(*failure, restarts, plan.how_to_go_on), failure->exit_code());
    if (launcher->late_signal() != 0) throw InterruptedError(launcher->late_signal());
    launcher.reset();
    restarts.failures.push_back(failure->line());
    log_warning(plan.told_by + failure->line() + "; all ranks start again (" + restarts.text() +
                ")");
    plan = plan_of(restarts.used());
  }
}

namespace {

/// The host's part in a job of several hosts, from generation to generation.
class HostLaunch {
 public:
  HostLaunch(HostAgent& agent, const std::function<LaunchPlan(const HostGeneration&)>& plan_of)
      : agent_(agent), plan_of_(plan_of) {}

  void run(SignalCatcher& signals) {
    while (true) {
      const HostOrder order = agent_.order();
      const bool is_new = order.generation.number > last_;
      if (order.kind == HostOrder::Kind::run && is_new) {
        run_generation(order.generation, signals);
      } else if (order.kind == HostOrder::Kind::wait && is_new) {
        last_ = order.generation.number;  // It was over before any worker started.
        agent_.ended(last_, {});
      } else if (has_ended(order)) {
        return;
      } else {
        wait(signals);
      }
    }
  }

 private:
  void wait(SignalCatcher& signals) {
    pollfd fds[] = {{signals.fd(), POLLIN, 0}, {agent_.event_fd(), POLLIN, 0}};
    ::poll(fds, 2, -1);
    while (const auto signal = signals.next()) {
      if (is_message(*signal)) continue;  // To workers, and there are none.
      const auto now = Clock::now();
      const bool again = signal_ != 0 && now - signalled_at_ >= kSameSignal;
      if (again) throw InterruptedError(*signal);
      if (signal_ == 0) signalled_at_ = now;
      signal_ = *signal;
      agent_.leave();
    }
  }

  /// True when all of the job succeeded.
  bool has_ended(const HostOrder& order) const {
    switch (order.kind) {
      case HostOrder::Kind::success:
        return true;
      case HostOrder::Kind::interrupted:
        throw InterruptedError(signal_ != 0 ? signal_ : SIGTERM);
      case HostOrder::Kind::lost:
        throw Error(order.text);
      case HostOrder::Kind::failure:
        throw WorkerError(order.text, order.exit_code);
      default:
        return false;
    }
  }

  void run_generation(const HostGeneration& generation, SignalCatcher& signals) {
    last_ = generation.number;
    const LaunchPlan plan = plan_of_(generation);
    Restarts none;  // They are the hosts' to decide.
    Launcher launcher(plan, signals, none, &agent_, generation);
    HostEnd end;
    try {
      const auto failure = launcher.run();
      end = failure ? end_of_host(*failure) : HostEnd{.succeeded = launcher.succeeded()};
      end.consequence = launcher.is_consequence();
    } catch (const InterruptedError& error) {
      signal_ = error.signal_number();
      agent_.leave();
    } catch (const std::exception& error) {
      end = {.exit_code = exit_code_of(error), .text = error.what(), .can_retry = false};
    }
    last_ = launcher.generation();
    agent_.ended(last_, end);
  }

  HostAgent& agent_;
  const std::function<LaunchPlan(const HostGeneration&)>& plan_of_;
  int64_t last_ = 0;  ///< The generation that was run last.
  int signal_ = 0;    ///< That the user has sent.
  Time signalled_at_;
};

}  // namespace

void launch(HostAgent& agent, const std::vector<int>& signals,
            const std::function<LaunchPlan(const HostGeneration&)>& plan_of) {
  ensure_standard_descriptors();
  SignalCatcher catcher(with_messages(signals));
  HostLaunch(agent, plan_of).run(catcher);
}

}  // namespace lockstep::launch
