#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

std::string cell(const BenchRow& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "-";
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  const double size = std::abs(number);
  char text[32];
  std::snprintf(text, sizeof text, size >= 1000 ? "%.0f" : size >= 10 ? "%.1f" : "%.3f", number);
  return text;
}

}  // namespace

std::string bench_table(const BenchRows& rows) {
  if (rows.empty()) return {};
  std::vector<std::vector<std::string>> lines(1);
  for (const auto& [key, value] : rows.front().items()) lines[0].push_back(key);
  for (const auto& row : rows) {
    lines.emplace_back();
    for (const auto& key : lines[0]) lines.back().push_back(cell(row[key]));
  }
  std::vector<size_t> widths(lines[0].size());
  for (const auto& line : lines) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t i = 0; i < widths.size(); ++i) {
      const bool number = !rows.front()[lines[0][i]].is_string();
      const std::string padding(widths[i] - line[i].size(), ' ');
      if (i > 0) text += "  ";
      text += number ? padding + line[i] : line[i] + padding;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  }
  return text;
}

}  // namespace lockstep::tool
