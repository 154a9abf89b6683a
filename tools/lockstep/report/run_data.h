#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

/// A curve of bounded size: where it has many points, those next to each other become one bucket,
/// which keeps its lowest and its highest. So a page of 100,000 steps shows each spike. The first
/// and the last point stay.
class Series {
 public:
  /// Steps rise. An earlier step takes back what is there of it and of later ones.
  void add(int64_t step, double value);
  /// {"steps": [...], "values": [...], "sum": of all values, also of those that are left out}.
  nlohmann::json points() const;

 private:
  struct Point {
    int64_t step;
    double value;
  };
  struct Bucket {
    Point low, high, last;
    int64_t count;
    double sum;
  };
  static void merge(Bucket& into, const Bucket& next);
  std::vector<Bucket> buckets_;
  Point first_{};
  int64_t per_bucket_ = 1;
};

/// What the page shows of a run, gathered from the rows of JsonRows.
class RunData {
 public:
  explicit RunData(std::string name) : name_(std::move(name)) {}
  void add(const nlohmann::ordered_json& row);
  /// As page.html wants it.
  nlohmann::json json() const;

 private:
  std::string name_;
  std::map<std::string, Series> series_;  ///< By "split/name".
  std::map<std::string, std::vector<Series>> ranks_;
  nlohmann::json hyperparameters_ = nlohmann::json::object();
  nlohmann::json events_ = nlohmann::json::array();  ///< Starts and failures.
};

/// Reads metrics.jsonl, or the file of that name in a folder. Throws UsageError where there is none
/// and DataError for a file without rows. The run is called `name`, by default as its path.
RunData read_run(const std::filesystem::path& path, const std::string& name = {});
/// What the page shows of a run, or of a file that `lockstep bench --output` has written. Throws as
/// read_run.
nlohmann::ordered_json read_shown(const std::filesystem::path& path);

/// The page as one HTML file, with what read_shown gave, or one that asks its server for a run.
std::string report_page(const std::vector<nlohmann::ordered_json>& shown);
std::string live_page();

}  // namespace lockstep
