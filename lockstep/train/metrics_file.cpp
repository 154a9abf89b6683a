#include "lockstep/train/metrics_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/train/trainer.h"

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;
namespace {

ordered_json number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

ordered_json row_of(int64_t step, int64_t epoch, const char* split, const Metrics& metrics,
                    double lr, double samples_per_s, double seconds) {
  ordered_json row{{"step", step},
                   {"epoch", epoch + 1},
                   {"split", split},
                   {"loss", number(metrics.loss)},
                   {"accuracy", number(metrics.accuracy)},
                   {"lr", lr},
                   {"samples_per_s", std::round(samples_per_s)},
                   {"seconds", std::round(seconds * 1e3) / 1e3}};
  for (const auto& [name, value] : metrics.values) row.emplace(name, number(value));
  return row;
}

/// A run that was killed may have written rows of steps that are now made again.
std::string rows_up_to(const std::string& text, int64_t step, int64_t epochs) {
  std::string kept;
  for (const std::string& line : split(text, '\n')) {
    const json row = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!row.is_object()) continue;
    const bool of_step = row.value("split", "") == "train";
    const bool past =
        of_step ? row.value("step", int64_t{0}) > step : row.value("epoch", int64_t{0}) > epochs;
    if (!past) kept += line + "\n";
  }
  return kept;
}

/// False for a device or a pipe, and for names of open files such as /dev/stdout, also where that
/// is a file: others write there. /dev/shm is a folder as any other.
bool is_file_of_its_own(const fs::path& path) {
  const std::string name = path.string();
  for (const char* open : {"/dev/std", "/dev/fd/", "/proc/"})
    if (name.starts_with(open)) return false;
  return fs::is_regular_file(path);
}

/// Whether `fd` is what the name stands for, now that it is locked: another run may have replaced
/// the file meanwhile.
bool is_in_place(int fd, const fs::path& path) {
  struct stat held {
  }, named{};
  return ::fstat(fd, &held) == 0 && ::stat(path.c_str(), &named) == 0 &&
         held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

}  // namespace

class MetricsFile::File {
 public:
  explicit File(fs::path path) : path_(std::move(path)) {}
  void open_at(int64_t step, int64_t epochs);
  void write(const ordered_json& row);

 private:
  void open();
  void lock();
  fs::path path_;
  UniqueFd fd_;
};

void MetricsFile::File::open_at(int64_t step, int64_t epochs) {
  open();
  if (!is_file_of_its_own(path_)) return;
  const std::string before = read_file(path_);
  const bool resumed = step > 0;
  const std::string kept = resumed ? rows_up_to(before, step, epochs) : std::string();
  if (kept == before) return;
  if (!resumed) {
    log_warning("metrics file " + path_.string() + " holds " +
                counted(std::count(before.begin(), before.end(), '\n'), "row") +
                " of an earlier run; this new run overwrites them");
    if (::ftruncate(fd_.get(), 0) != 0) throw SystemError("cannot write " + path_.string(), errno);
    return;
  }
  // Rows that stay are on the disk at every moment, also when this process dies here.
  write_file_atomically(path_, kept);
  open();
}

void MetricsFile::File::open() {
  bool done = false;
  while (!done) {
    fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!fd_) {
      throw SystemError("cannot write metrics file " + path_.string(), errno,
                        "check that its folder exists and that you may write there");
    }
    if (!is_file_of_its_own(path_)) return;
    lock();
    done = is_in_place(fd_.get(), path_);
  }
}

/// A process that was just killed takes a moment to end. Where the file system has no locks, the
/// file stays open to all.
void MetricsFile::File::lock() {
  constexpr std::chrono::seconds kPatience{2};
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw Error("another process writes to metrics file " + path_.string(),
                  "wait until that run has ended, or give this one another file");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void MetricsFile::File::write(const ordered_json& row) {
  const std::string line = row.dump() + "\n";
  write_all(fd_.get(), line.data(), line.size(), path_);
}

MetricsFile::MetricsFile(fs::path path) : file_(std::make_unique<File>(std::move(path))) {}
MetricsFile::~MetricsFile() = default;

void MetricsFile::open_at(int64_t step, int64_t epochs) {
  file_->open_at(step, epochs);
}

void MetricsFile::on_start(Trainer& trainer) {
  open_at(trainer.global_step(), trainer.current_epoch());
}

void MetricsFile::on_log(Trainer& trainer, const LogResult& result) {
  const StepResult& step = result.step;
  ordered_json row = row_of(step.step, step.epoch, "train", result.metrics, step.lr,
                            result.samples_per_s, step.seconds);
  if (result.save_seconds > 0) row["save_seconds"] = std::round(result.save_seconds * 1e6) / 1e6;
  file_->write(row);
}

void MetricsFile::on_epoch_end(Trainer& trainer, const EpochResult& result) {
  if (result.test.samples == 0) return;
  file_->write(row_of(result.step, result.epoch, "test", result.test, result.lr,
                      result.test_samples_per_s, result.seconds));
}

void check_metrics_file(const fs::path& path) {
  if (!fs::exists(path)) {
    const AtomicFile can_be_made(path);
  } else if (::access(path.c_str(), W_OK) != 0) {
    throw SystemError("cannot write metrics file " + path.string(), errno,
                      "name a file that you may write to");
  }
}

}  // namespace lockstep
