#include <algorithm>
#include <map>

#include "lockstep/base/file.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

constexpr double kPlotWidth = 640;
constexpr double kHeight = 420;
constexpr double kLeft = 60;
constexpr double kRight = 190;  ///< Room for the lines' names.
constexpr double kTop = 40;
constexpr double kBottom = 50;
/// Told apart also by those who do not see red or green (Okabe and Ito 2008).
constexpr const char* kColors[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"};

/// Ranks to the right, speed-up upwards, both from 0 to `most`.
class Plot {
 public:
  explicit Plot(double most) : most_(most) {
    add("<svg xmlns='http://www.w3.org/2000/svg' width='%g' height='%g' font-family='sans-serif' "
        "font-size='13'><rect width='100%%' height='100%%' fill='white'/>\n",
        kPlotWidth, kHeight);
  }

  double x(double ranks) const { return kLeft + ranks / most_ * (kPlotWidth - kLeft - kRight); }
  double y(double speedup) const {
    return kHeight - kBottom - speedup / most_ * (kHeight - kTop - kBottom);
  }

  template <class... Args>
  void add(const char* format, Args... args) {
    svg_ += formatted(format, args...);
  }

  void axes(const std::vector<double>& ranks) {
    add("<text x='%g' y='22' font-size='15'>Speed-up of an epoch over ranks</text>\n", kLeft);
    add("<path d='M%g %gV%gH%g' stroke='#333' fill='none'/>\n", x(0), y(most_), y(0), x(most_));
    for (const double n : ranks) {
      add("<text x='%g' y='%g' text-anchor='middle'>%g</text>\n", x(n), y(0) + 18, n);
      add("<text x='%g' y='%g' text-anchor='end'>%g</text>\n", x(0) - 8, y(n) + 4, n);
      add("<path d='M%g %gH%g' stroke='#ddd'/>\n", x(0), y(n), x(most_));
    }
    add("<text x='%g' y='%g' text-anchor='middle'>ranks</text>\n", x(most_ / 2), kHeight - 10);
    add("<path d='M%g %gL%g %g' stroke='#888' stroke-dasharray='5 4'/>\n", x(ranks.front()), y(1),
        x(ranks.back()), y(ranks.back() / ranks.front()));
    add("<text x='%g' y='%g' fill='#666'>ideal</text>\n", x(most_) + 6,
        y(ranks.back() / ranks.front()));
  }

  void line(const std::string& name, const std::vector<std::pair<double, double>>& points,
            size_t index) {
    const char* color = kColors[index % std::size(kColors)];
    std::string path;
    for (const auto& [ranks, speedup] : points) {
      add("<circle cx='%g' cy='%g' r='4' fill='%s'/>\n", x(ranks), y(speedup), color);
      path +=
          (path.empty() ? "M" : "L") + std::to_string(x(ranks)) + " " + std::to_string(y(speedup));
    }
    svg_ += "<path d='" + path + "' stroke='" + color + "' stroke-width='2' fill='none'/>\n";
    const double height = kTop + 20 * static_cast<double>(index + 2);
    add("<path d='M%g %gh16' stroke='%s' stroke-width='2'/>\n", x(most_) + 6, height - 4, color);
    add("<text x='%g' y='%g'>%s, %.2f</text>\n", x(most_) + 26, height, name.c_str(),
        points.back().second);
  }

  std::string text() const { return svg_ + "</svg>\n"; }

 private:
  double most_;
  std::string svg_;
};

}  // namespace

void write_scaling_plot(const std::filesystem::path& file, const BenchRows& rows) {
  std::map<std::string, std::vector<std::pair<double, double>>> lines;
  std::vector<double> ranks;
  for (const BenchRow& row : rows) {
    const double n = row["ranks"];
    lines[row["model"].get<std::string>() + " " + row["strategy"].get<std::string>()].emplace_back(
        n, row["speedup"].get<double>());
    if (std::find(ranks.begin(), ranks.end(), n) == ranks.end()) ranks.push_back(n);
  }
  std::sort(ranks.begin(), ranks.end());
  Plot plot(ranks.back() * 1.05);
  plot.axes(ranks);
  size_t index = 0;
  for (const auto& [name, points] : lines) plot.line(name, points, index++);
  write_file_atomically(file, plot.text());
}

}  // namespace lockstep::tool
