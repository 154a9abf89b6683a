#include "lockstep/launch/worker_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/terminal.h"

namespace lockstep::launch {

LogFile::LogFile(std::filesystem::path path) : path_(std::move(path)) {
  if (path_.empty()) return;
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
  if (!file_) throw SystemError("cannot write the log file " + path_.string(), errno);
}

void LogFile::write(std::string_view bytes) {
  if (!file_) return;
  try {
    write_all(file_.get(), bytes.data(), bytes.size(), path_.string());
  } catch (const SystemError& error) {
    log_warning(std::string(error.what()) + "; the log is not continued");
    file_.reset();
  }
}

void LineCopies::take(std::string_view prefix, std::string_view line) {
  const auto in_line = [&](const std::string& word) { return line.find(word) != line.npos; };
  if (std::none_of(words_.begin(), words_.end(), in_line)) return;
  file_.write(std::string(prefix).append(line).append("\n"));
}

WorkerStream::WorkerStream(const StreamPlan& plan, int rank, std::string prefix, int own_fd,
                           OutputQueue& console, LineCopies& copies)
    : inherit_(plan.inherit),
      console_wanted_(plan.console),
      prompts_(plan.prompts && plan.console),
      own_fd_(own_fd),
      line_start_(line_start(console.fd())),
      prefix_(std::move(prefix)),
      own_mark_("[rank" + std::to_string(rank) + "]"),
      console_(console),
      copies_(copies),
      file_(plan.inherit ? std::filesystem::path() : plan.file) {
  if (inherit_) return;
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0)
    throw SystemError("cannot make a pipe for a worker's output", errno);
  read_.reset(fds[0]);
  write_.reset(fds[1]);
  fcntl(read_.get(), F_SETFL, O_NONBLOCK);
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
  file_.write(bytes);
  if (console_wanted_ && !is_muted_)
    cutter_.feed(bytes, now, [this](std::string_view line) { show(line); });
}

void WorkerStream::show(std::string_view line) {
  const bool begun = std::exchange(prompted_, false);
  if (!begun) console_.write(line_start_, this);
  const std::string_view prefix =
      begun || line.starts_with(own_mark_) ? std::string_view() : prefix_;
  console_.write(prefix, this);
  console_.write(line, this);
  console_.write("\n", this);
  copies_.take(prefix, line);
}

void WorkerStream::show_prompt(Time now) {
  if (!has_prompt()) return;
  const std::string text = cutter_.take_prompt(now);
  if (text.empty()) return;
  if (!std::exchange(prompted_, true)) console_.write(prefix_, this);
  console_.write(text, this);
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
