#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <optional>

#include "lockstep/base/descriptors.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/loggers/json_rows.h"

namespace lockstep {
namespace fs = std::filesystem;
using nlohmann::ordered_json;
namespace {

constexpr const char* kRun = "run";
constexpr const char* kRanks = "ranks";

/// A whole number without a point, as a step is.
ordered_json number(double value) {
  if (!std::isfinite(value)) return {};
  constexpr double kExact = 9007199254740992;  // 2^53
  if (value == std::floor(value) && std::abs(value) < kExact) return static_cast<int64_t>(value);
  return value;
}

std::string rows_up_to(const std::string& text, int64_t step, int64_t epochs) {
  std::string kept;
  for (const std::string& line : split(text, '\n')) {
    const auto row = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (row.is_object() && !detail::is_row_past(row, step, epochs)) kept += line + "\n";
  }
  return kept;
}

/// Standard output or error, where the name stands for that: /dev/stdout, or the file it goes to.
/// Opened anew it would have an offset of its own, and each would overwrite the other's lines.
std::optional<int> standard_stream(const fs::path& path) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO})
    if (is_still_named(fd, path)) return fd;
  return std::nullopt;
}

/// False for a device, a pipe or another open file, also where that is a file: others write there.
/// /dev/shm is a folder as any other.
bool is_file_of_its_own(const fs::path& path) {
  const std::string name = path.string();
  for (const char* open : {"/dev/std", "/dev/fd/", "/proc/"})
    if (name.starts_with(open)) return false;
  return fs::is_regular_file(path) && !standard_stream(path);
}

class JsonLines : public detail::JsonRows {
 public:
  explicit JsonLines(JsonLinesOptions options)
      : path_(std::move(options.path)), only_metrics_(options.only_metrics) {}
  void begin(int64_t step, int64_t epochs) override;

 protected:
  void write(const ordered_json& row) override;

 private:
  void open();
  fs::path path_;
  bool only_metrics_;
  UniqueFd fd_;
};

void JsonLines::begin(int64_t step, int64_t epochs) {
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

void JsonLines::open() {
  if (const auto stream = standard_stream(path_)) {
    fd_.reset(::fcntl(*stream, F_DUPFD_CLOEXEC, 0));
    if (!fd_) throw SystemError("cannot write metrics file " + path_.string(), errno);
    return;
  }
  fd_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd_) {
    throw SystemError("cannot write metrics file " + path_.string(), errno,
                      "check that its folder exists and that you may write there");
  }
}

void JsonLines::write(const ordered_json& row) {
  const std::string split = row.value("split", "");
  if (only_metrics_ && (split == kRun || split == kRanks)) return;
  if (!fd_) Logger::begin();
  // Paths and names need not be UTF-8.
  const std::string line = row.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
  write_all(fd_.get(), line.data(), line.size(), path_);
}

}  // namespace

std::string detail::valid_utf8(const std::string& text) {
  const ordered_json value(text);
  return ordered_json::parse(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace))
      .get<std::string>();
}

bool detail::is_row_past(const ordered_json& row, int64_t step, int64_t epochs) {
  const std::string split = row.value("split", "");
  if (split == kRun) return false;
  if (split == "test" && row.contains("epoch")) return row["epoch"] > epochs;
  return row.value("step", int64_t{0}) > step;
}

void Logger::log_ranks(int64_t step, const std::vector<MetricValues>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    log(step, ranks[rank], "rank" + std::to_string(rank));
}

void detail::JsonRows::log(int64_t step, const MetricValues& values, const std::string& split) {
  ordered_json row{{"step", step_ = step}};
  if (!split.empty()) row["split"] = split;
  for (const auto& [name, value] : values) row.emplace(name, number(value));
  write(row);
}

void detail::JsonRows::log_ranks(int64_t step, const std::vector<MetricValues>& ranks) {
  ordered_json row{{"step", step_ = step}, {"split", kRanks}};
  for (const MetricValues& values : ranks)
    for (const auto& [name, value] : values) row[name].push_back(number(value));
  write(row);
}

void detail::JsonRows::log_hyperparameters(const std::map<std::string, std::string>& values) {
  write({{"step", step_}, {"split", kRun}, {"hyperparameters", values}});
}

void detail::JsonRows::close(const std::string& failure) noexcept {
  if (failure.empty()) return;
  try {
    write({{"step", step_}, {"split", kRun}, {"failure", failure}});
  } catch (const std::exception& error) {
    log_warning(error.what());
  }
}

std::shared_ptr<Logger> json_lines_logger(JsonLinesOptions options) {
  return std::make_shared<JsonLines>(std::move(options));
}

void check_json_lines(const fs::path& path) {
  if (!fs::exists(path)) {
    const AtomicFile can_be_made(path);
  } else if (::access(path.c_str(), W_OK) != 0) {
    throw SystemError("cannot write metrics file " + path.string(), errno,
                      "name a file that you may write to");
  }
}

}  // namespace lockstep
