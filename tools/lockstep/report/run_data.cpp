#include "tools/lockstep/report/run_data.h"

#include <algorithm>
#include <fstream>

#include "lockstep/base/error.h"

namespace lockstep {
namespace tool {
const std::map<std::string, std::string>& page_files();
}
namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;
namespace {

constexpr size_t kMostBuckets = 999;  ///< About as many as a wide screen has columns.

std::string replaced(std::string text, const std::string& what, const std::string& with) {
  const size_t at = text.find(what);
  return at == std::string::npos ? text : text.replace(at, what.size(), with);
}

/// Within a script, where "</script>" would end it.
std::string script_text(const ordered_json& value) {
  std::string text;
  for (const char c : value.dump(-1, ' ', false, ordered_json::error_handler_t::replace))
    text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return text;
}

std::string page(const std::string& data) {
  const auto& files = tool::page_files();
  std::string text = replaced(files.at("page.html"), "/*UPLOT_CSS*/", files.at("uPlot.min.css"));
  text = replaced(std::move(text), "/*UPLOT_JS*/", files.at("uPlot.iife.min.js"));
  return replaced(std::move(text), "/*DATA*/null", data);
}

}  // namespace

void Series::merge(Bucket& into, const Bucket& next) {
  if (next.low.value < into.low.value) into.low = next.low;
  if (next.high.value > into.high.value) into.high = next.high;
  into.last = next.last;
  into.count += next.count;
  into.sum += next.sum;
}

void Series::add(int64_t step, double value) {
  while (!buckets_.empty() && buckets_.back().last.step >= step) buckets_.pop_back();
  const Point point{step, value};
  if (buckets_.empty()) first_ = point;
  const Bucket bucket{point, point, point, 1, value};
  if (!buckets_.empty() && buckets_.back().count < per_bucket_) {
    merge(buckets_.back(), bucket);
    return;
  }
  buckets_.push_back(bucket);
  if (buckets_.size() <= kMostBuckets) return;
  per_bucket_ *= 2;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (i % 2 == 0) buckets_[i / 2] = buckets_[i];
    if (i % 2 == 1) merge(buckets_[i / 2], buckets_[i]);
  }
  buckets_.resize((buckets_.size() + 1) / 2);
}

json Series::points() const {
  json steps = json::array();
  json values = json::array();
  double sum = 0;
  const auto push = [&](const Point& point) {
    if (!steps.empty() && steps.back() >= point.step) return;
    steps.push_back(point.step);
    values.push_back(point.value);
  };
  if (!buckets_.empty()) push(first_);
  for (const Bucket& bucket : buckets_) {
    const bool falls = bucket.high.step < bucket.low.step;
    push(falls ? bucket.high : bucket.low);
    push(falls ? bucket.low : bucket.high);
    sum += bucket.sum;
  }
  if (!buckets_.empty()) push(buckets_.back().last);
  return {{"steps", std::move(steps)}, {"values", std::move(values)}, {"sum", sum}};
}

void RunData::add(const ordered_json& row) {
  if (!row.is_object() || !row.contains("step") || !row["step"].is_number()) return;
  const auto step = row["step"].get<int64_t>();
  const std::string split = row.value("split", "");
  if (row.contains("hyperparameters")) {
    hyperparameters_ = row["hyperparameters"];
  } else if (split == "run") {
    events_.push_back(nlohmann::json(row));
  } else {
    for (const auto& [name, value] : row.items()) {
      if (name == "step" || name == "epoch") continue;
      if (value.is_number()) {
        series_[split.empty() ? name : split + "/" + name].add(step, value.get<double>());
      } else if (split == "ranks" && value.is_array()) {
        auto& ranks = ranks_[name];
        ranks.resize(std::max(ranks.size(), value.size()));
        for (size_t rank = 0; rank < value.size(); ++rank)
          if (value[rank].is_number()) ranks[rank].add(step, value[rank].get<double>());
      }
    }
  }
}

json RunData::json() const {
  nlohmann::json series = nlohmann::json::object();
  for (const auto& [name, one] : series_) series[name] = one.points();
  nlohmann::json ranks = nlohmann::json::object();
  for (const auto& [name, all] : ranks_)
    for (const Series& one : all) ranks[name].push_back(one.points());
  return {{"name", name_},
          {"series", std::move(series)},
          {"ranks", std::move(ranks)},
          {"hyperparameters", hyperparameters_},
          {"events", events_}};
}

RunData read_run(const fs::path& path, const std::string& name) {
  const bool exists = fs::exists(path);
  const fs::path file = fs::is_directory(path) ? path / "metrics.jsonl" : path;
  std::ifstream lines(file);
  if (!lines) {
    throw UsageError(file.string() + (exists ? " cannot be read" : " does not exist"),
                     "name a --log-dir of a run with --logger jsonl, a --metrics-file, or an "
                     "--output of lockstep bench");
  }
  RunData run(name.empty() ? path.string() : name);
  bool has_rows = false;
  for (std::string line; std::getline(lines, line);) {
    const auto row = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    has_rows = has_rows || (row.is_object() && row.contains("step"));
    run.add(row);
  }
  if (!has_rows)
    throw DataError(file.string() +
                    " holds no rows of metrics, and is no whole --output of lockstep bench");
  return run;
}

ordered_json read_shown(const fs::path& path) {
  if (fs::is_directory(path)) return read_run(path).json();
  std::ifstream file(path);
  auto bench = ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!bench.is_object() || !bench.contains("benchmark")) return read_run(path).json();
  bench["name"] = path.string();
  return bench;
}

std::string report_page(const std::vector<ordered_json>& shown) {
  return page(script_text(shown));
}

std::string live_page() {
  return page("null");
}

}  // namespace lockstep
