#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

#include "lockstep/loggers/logger.h"

namespace lockstep::detail {

/// A logger of JSON objects: see json_lines_logger for what they hold.
class JsonRows : public Logger {
 public:
  void log(int64_t step, const MetricValues& values, const std::string& split) override;
  void log_ranks(int64_t step, const std::vector<MetricValues>& ranks) override;
  void log_hyperparameters(const std::map<std::string, std::string>& values) override;
  void close(const std::string& failure) noexcept override;

 protected:
  virtual void write(const nlohmann::ordered_json& row) = 0;

 private:
  int64_t step_ = 0;  ///< Of the last row.
};

/// The text with U+FFFD in the place of bytes that are no UTF-8: a reader would refuse all of it.
std::string valid_utf8(const std::string& text);

/// Whether a row is of a step or an epoch after those: a run that was killed may have written rows
/// of steps that are now made again.
bool is_row_past(const nlohmann::ordered_json& row, int64_t step, int64_t epochs);

}  // namespace lockstep::detail
