#include <algorithm>
#include <cstdio>

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {
namespace {

constexpr double kWidth = 960, kRow = 36, kLeft = 70, kTop = 56, kGap = 6;

/// "12.5", without digits that say nothing.
std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string short_text = text;
  while (short_text.ends_with('0')) short_text.pop_back();
  if (short_text.ends_with('.')) short_text.pop_back();
  return short_text;
}

/// Later stages of a rank are lighter.
std::string colour(const PipelineSchedule& schedule, const PipelineAction& action) {
  int hue = 210;  // F
  if (action.op == PipelineOp::backward) hue = 140;
  if (action.op == PipelineOp::backward_input) hue = 165;
  if (action.op == PipelineOp::backward_weight) hue = 35;
  const int turn = action.stage / schedule.num_ranks;
  const int light = std::min(90, 62 + 24 * turn / std::max(1, schedule.stages_per_rank()));
  return "hsl(" + std::to_string(hue) + ",65%," + std::to_string(light) + "%)";
}

std::string text_at(double x, double y, const std::string& attributes, const std::string& text) {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" " + attributes + ">" + text +
         "</text>\n";
}

std::string box(double x, double y, double width, double height, const std::string& fill,
                const std::string& title) {
  return "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) +
         "\" height=\"" + number(height) + "\" fill=\"" + fill +
         "\" stroke=\"#333\" stroke-width=\"0.6\"><title>" + title + "</title></rect>\n";
}

std::string heading(const PipelineSchedule& schedule, const PipelineTimeline& timeline) {
  return schedule.name + ", " + std::to_string(schedule.num_ranks) + " ranks, " +
         std::to_string(schedule.num_stages) + " stages, " +
         std::to_string(schedule.num_micro_batches) +
         " micro-batches: " + number(100 * timeline.bubble) + "% of the time is bubble";
}

}  // namespace

std::string draw_as_svg(const PipelineSchedule& schedule, const PipelineTimeline& timeline) {
  const double height = kTop + (kRow + kGap) * static_cast<double>(timeline.ranks.size()) + 10;
  const double scale = timeline.length > 0 ? (kWidth - kLeft - 10) / timeline.length : 1;
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number(kWidth) +
                    " " + number(height) + "\" font-family=\"sans-serif\" font-size=\"12\">\n" +
                    "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  svg += text_at(10, 20, "font-size=\"15\"", heading(schedule, timeline));
  svg += text_at(10, 40, "fill=\"#555\"",
                 "F forward, B backward, I backward for the input, W for the weights; the number "
                 "is the micro-batch, a lighter colour a later stage of the rank");
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    const double y = kTop + (kRow + kGap) * static_cast<double>(rank);
    svg += text_at(10, y + 0.62 * kRow, "", "rank " + std::to_string(rank));
    for (const TimedAction& timed : timeline.ranks[rank]) {
      const double x = kLeft + timed.start * scale, width = (timed.end - timed.start) * scale;
      const std::string name = to_string(timed.action);
      svg += box(x, y, width, kRow, colour(schedule, timed.action), name);
      if (width < 14) continue;
      const size_t letter = name.find_first_of("FBIW");
      svg += text_at(x + width / 2, y + 0.62 * kRow, "text-anchor=\"middle\"", name.substr(letter));
    }
  }
  return svg + "</svg>\n";
}

}  // namespace lockstep
