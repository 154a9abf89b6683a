#include "lockstep/launch/job.h"

#include <sys/wait.h>

#include <csignal>
#include <tuple>

namespace lockstep::launch {
namespace {

/// Whether the worker ended by the signals that we sent it.
bool ended_by_us(const WorkerEnd& end) {
  if (!end.after_stop || !WIFSIGNALED(end.wait_status)) return false;
  const int signal = WTERMSIG(end.wait_status);
  return signal == SIGTERM || signal == SIGKILL;
}

/// Smaller is more likely the cause.
auto suspicion(const WorkerEnd& end) {
  return std::make_tuple(end.consequence, end.said_at.value_or(end.ended_at), end.after_stop,
                         end.order);
}

}  // namespace

bool WorkerEnd::left_by_usr1() const {
  if (WIFSIGNALED(wait_status)) return WTERMSIG(wait_status) == SIGUSR1;
  return WEXITSTATUS(wait_status) == 128 + SIGUSR1;
}

Job::Job(int workers, Options options)
    : options_(options), ends_(static_cast<size_t>(workers)), living_(workers) {}

int Job::stop(Time now) {
  phase_ = Phase::stopping;
  deadline_ = now + options_.grace;
  return SIGTERM;
}

int Job::kill() {
  phase_ = Phase::killing;
  deadline_.reset();
  return SIGKILL;
}

int Job::ended(int index, WorkerEnd end, Time now) {
  auto& slot = ends_.at(static_cast<size_t>(index));
  if (slot) return 0;
  end.order = static_cast<int>(ends_.size()) - living_;
  end.after_stop =
      phase_ == Phase::stopping || phase_ == Phase::killing || phase_ == Phase::interrupting;
  slot = end;
  --living_;
  if (living_ == 0) deadline_.reset();
  if (end.succeeded()) return 0;
  if (end.left_by_usr1()) return left(now);
  if (phase_ == Phase::running || phase_ == Phase::settling) {
    failed_ = true;
    if (living_ == 0) return 0;
    if (!end.consequence) return stop(now);
    if (phase_ == Phase::running) {
      phase_ = Phase::settling;
      deadline_ = now + options_.settle;
    }
  }
  return 0;
}

void Job::dropped(int index) {
  auto& slot = ends_.at(static_cast<size_t>(index));
  if (slot) return;
  slot = WorkerEnd{};
  --living_;
}

/// The others are told by TERM. A second USR1 would end those at once that still save.
int Job::left(Time now) {
  if (phase_ == Phase::interrupting) {
    signal_ = SIGUSR1;
    return 0;
  }
  return signalled(SIGUSR1, now) != 0 ? SIGTERM : 0;
}

int Job::signalled(int signal, Time now) {
  if (phase_ == Phase::interrupting) {
    return now - *signalled_at_ < options_.same_signal ? 0 : kill();
  }
  if (failed_ || output_closed_ || phase_ == Phase::killing) {
    late_signal_ = signal;
    return phase_ == Phase::settling ? stop(now) : 0;
  }
  signal_ = signal;
  signalled_at_ = now;
  phase_ = Phase::interrupting;
  if (living_ > 0) deadline_ = now + options_.signal_grace;
  return signal;
}

int Job::output_closed(Time now) {
  if (phase_ != Phase::running && phase_ != Phase::settling) return 0;
  output_closed_ = true;
  return stop(now);
}

int Job::failed(Time now) {
  failed_ = true;
  return phase_ == Phase::running || phase_ == Phase::settling ? stop(now) : 0;
}

int Job::tick(Time now) {
  if (!deadline_ || now < *deadline_ || living_ == 0) return 0;
  return phase_ == Phase::settling ? stop(now) : kill();
}

Job::Ending Job::ending() const {
  if (signal_ != 0) return Ending::interrupted;
  if (failed_) return Ending::failure;
  return output_closed_ ? Ending::output_closed : Ending::success;
}

std::optional<int> Job::root_cause() const {
  std::optional<int> cause;
  for (size_t i = 0; i < ends_.size(); ++i) {
    const auto& end = ends_[i];
    if (!end || end->succeeded() || (ended_by_us(*end) && !end->said_at)) continue;
    if (!cause || suspicion(*end) < suspicion(*ends_[static_cast<size_t>(*cause)])) {
      cause = static_cast<int>(i);
    }
  }
  return cause;
}

}  // namespace lockstep::launch
