#include "lockstep/launch/worker_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/launch/launcher.h"

namespace lockstep::launch {

WorkerStream::WorkerStream(const StreamPlan& plan, int rank, std::string prefix, int own_fd,
                           OutputQueue& console, LineCopies& copies)
    : inherit_(plan.inherit),
      console_wanted_(plan.console),
      own_fd_(own_fd),
      prefix_(std::move(prefix)),
      own_mark_("[rank" + std::to_string(rank) + "]"),
      console_(console),
      copies_(copies),
      file_name_(plan.file.string()) {
  if (inherit_) return;
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) {
    throw SystemError("cannot make a pipe for a worker's output", errno,
                      errno == EMFILE ? "raise the limit of open files (ulimit -n)" : "");
  }
  read_.reset(fds[0]);
  write_.reset(fds[1]);
  fcntl(read_.get(), F_SETFL, O_NONBLOCK);
  if (file_name_.empty()) return;
  file_.reset(
      ::open(file_name_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
  if (!file_) throw SystemError("cannot write the log file " + file_name_, errno);
}

void WorkerStream::read(Time now) {
  char buffer[64 * 1024];
  // A worker that writes without end must not keep us from everything else.
  for (int turn = 0; turn < 16 && read_ && poll_fd() >= 0; ++turn) {
    const ssize_t size = ::read(read_.get(), buffer, sizeof buffer);
    if (size > 0) {
      take({buffer, static_cast<size_t>(size)}, now);
    } else if (size == 0 || (errno != EINTR && errno != EAGAIN)) {
      close();
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

void WorkerStream::take(std::string_view bytes, Time now) {
  tail_.feed(bytes);
  write_file(bytes);
  if (console_wanted_ && !is_muted_)
    cutter_.feed(bytes, now, [this](std::string_view line) { show(line); });
}

void WorkerStream::write_file(std::string_view bytes) {
  if (!file_) return;
  try {
    write_all(file_.get(), bytes.data(), bytes.size(), file_name_);
  } catch (const SystemError& error) {
    // A full disk costs the log, not the training.
    log_warning(std::string(error.what()) + "; the log is not continued");
    file_.reset();
  }
}

void WorkerStream::show(std::string_view line) {
  const std::string_view prefix = line.starts_with(own_mark_) ? std::string_view() : prefix_;
  console_.write(prefix, this);
  console_.write(line, this);
  console_.write("\n", this);
  copies_.take(prefix, line);
}

void WorkerStream::mute(bool is_muted) {
  if (console_wanted_) cutter_.finish([this](std::string_view line) { show(line); });
  is_muted_ = is_muted;
}

void WorkerStream::close() {
  if (console_wanted_) cutter_.finish([this](std::string_view line) { show(line); });
  read_.reset();
}

}  // namespace lockstep::launch
