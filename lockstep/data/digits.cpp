#include "lockstep/data/digits.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "lockstep/base/random.h"

// How much the samples differ is chosen so that the mlp (784-128-64-10, SGD 0.05, momentum 0.9,
// batch 64) on 10,000 samples has some 90% of the held-out ones after one epoch and 97% after about
// five.
namespace lockstep {
namespace {

struct Point {
  double x = 0;
  double y = 0;
};

using Stroke = std::vector<Point>;
using Glyph = std::vector<Stroke>;

/// For each stroke x, y, x, y, ... of the points that the pen passes, in a box of 60 x 100 with y
/// downwards. A point given twice is a corner, between others the pen curves (Catmull-Rom).
using PenGlyph = std::vector<std::vector<int>>;

constexpr Point kGlyphCentre{30, 50};
constexpr double kGlyphHeight = 100;

/// The ways to write each digit.
const std::array<std::vector<PenGlyph>, 10>& glyphs() {
  static const std::array<std::vector<PenGlyph>, 10> all{{
      {{{30, 2, 10, 15, 3, 50, 10, 85, 30, 98, 50, 85, 57, 50, 50, 15, 30, 2}},
       {{34, 4, 16, 18, 12, 52, 20, 90, 36, 94, 48, 66, 48, 26, 34, 4, 26, 8}}},
      {{{30, 2, 30, 98}},
       {{14, 22, 32, 2, 32, 2, 32, 98}},
       {{14, 22, 32, 2, 32, 2, 32, 98}, {12, 98, 52, 98}}},
      {{{6, 22, 14, 6, 32, 2, 50, 12, 52, 32, 36, 58, 5, 96, 5, 96, 56, 96}},
       {{8, 20, 20, 4, 42, 6, 50, 25, 38, 55, 14, 88, 5, 90, 10, 80, 25, 88, 56, 96}}},
      {{{6, 12, 26, 2, 48, 10, 50, 30, 24, 46, 24, 46, 52, 58, 54, 82, 30, 98, 5, 88}},
       {{6, 4, 6, 4, 52, 4, 52, 4, 26, 42, 26, 42, 50, 52, 55, 75, 36, 97, 6, 90}}},
      {{{40, 2, 40, 2, 4, 66, 4, 66, 56, 66}, {42, 40, 42, 98}},
       {{10, 4, 8, 50, 8, 50, 52, 50}, {48, 4, 46, 98}},
       {{42, 98, 42, 2, 42, 2, 4, 66, 4, 66, 58, 66}}},
      {{{52, 4, 52, 4, 12, 4, 12, 4, 8, 44, 8, 44, 32, 38, 54, 55, 52, 82, 28, 98, 5, 88}},
       {{12, 6, 8, 44, 32, 40, 54, 58, 50, 86, 24, 98, 4, 90}, {12, 6, 54, 4}}},
      {{{46, 4, 22, 22, 6, 55, 8, 85, 30, 98, 52, 86, 52, 62, 32, 52, 10, 66}},
       {{36, 2, 12, 40, 5, 75, 26, 98, 50, 88, 48, 62, 26, 56, 8, 74}}},
      {{{5, 4, 5, 4, 55, 4, 55, 4, 22, 98}},
       {{5, 4, 5, 4, 55, 4, 55, 4, 22, 98}, {16, 50, 50, 50}},
       {{5, 14, 8, 6, 30, 6, 56, 4, 56, 4, 34, 45, 26, 98}}},
      {{{50, 16, 30, 2, 10, 16, 16, 38, 44, 58, 54, 80, 30, 98, 6, 80, 16, 58, 44, 38, 50, 16}},
       {{30, 2, 14, 12, 14, 34, 30, 46, 46, 34, 46, 12, 30, 2},
        {30, 46, 8, 58, 6, 84, 30, 98, 54, 84, 52, 58, 30, 46}}},
      {{{52, 30, 40, 4, 14, 6, 6, 28, 20, 48, 44, 42, 52, 24, 52, 24, 50, 60, 44, 98}},
       {{50, 26, 30, 2, 8, 22, 18, 46, 44, 40, 50, 26, 50, 26, 50, 70, 30, 98, 8, 90}}},
  }};
  return all;
}

Point catmull_rom(Point a, Point b, Point c, Point d, double t) {
  const auto at = [t](double p, double q, double r, double s) {
    return 0.5 * (2 * q + (r - p) * t + (2 * p - 5 * q + 4 * r - s) * t * t +
                  (3 * q - p - 3 * r + s) * t * t * t);
  };
  return {at(a.x, b.x, c.x, d.x), at(a.y, b.y, c.y, d.y)};
}

/// A floating-point picture of how much ink lies where.
class Canvas {
 public:
  /// Draws a line with a round pen; ink fades over one pixel at `half_width` from its middle.
  void line(Point a, Point b, double half_width) {
    const double reach = half_width + 0.5;
    const double dx = b.x - a.x, dy = b.y - a.y, length = dx * dx + dy * dy;
    const Point low{std::min(a.x, b.x), std::min(a.y, b.y)};
    const Point high{std::max(a.x, b.x), std::max(a.y, b.y)};
    for_pixels_near(low, high, reach, [&](int x, int y, double& pixel) {
      const double px = x - a.x, py = y - a.y;
      const double along = length == 0 ? 0 : (px * dx + py * dy) / length;
      const double t = std::min(std::max(0.0, along), 1.0);
      const double ex = px - t * dx, ey = py - t * dy;
      // Less than 0 out of reach. A branch would be guessed wrongly too often.
      pixel = std::max(pixel, std::min(reach - std::sqrt(ex * ex + ey * ey), 1.0));
    });
  }

  /// Takes the ink away around a point.
  void erase(Point centre, double radius) {
    for_pixels_near(centre, centre, radius + 1, [&](int x, int y, double& pixel) {
      const double distance = std::hypot(x - centre.x, y - centre.y);
      pixel *= std::clamp(distance - radius, 0.0, 1.0);
    });
  }

  const std::array<double, kDigitSide * kDigitSide>& ink() const { return ink_; }

 private:
  /// All pixels that are less than `reach` away from the box, and some more.
  template <class Action>
  void for_pixels_near(Point low, Point high, double reach, const Action& action) {
    const double out = reach + 1e-9;
    const int left = clamped(std::ceil(low.x - out)), right = clamped(high.x + out);
    const int top = clamped(std::ceil(low.y - out)), bottom = clamped(high.y + out);
    for (int y = top; y <= bottom; ++y) {
      for (int x = left; x <= right; ++x)
        action(x, y, ink_[static_cast<size_t>(y * kDigitSide + x)]);
    }
  }

  static int clamped(double position) {
    return static_cast<int>(std::clamp(position, 0.0, kDigitSide - 1.0));
  }

  std::array<double, kDigitSide * kDigitSide> ink_{};
};

void draw_stroke(Canvas& canvas, const Stroke& stroke, double half_width) {
  constexpr int kPieces = 4;
  const size_t last = stroke.size() - 1;
  for (size_t i = 0; i < last; ++i) {
    const Point before = stroke[i == 0 ? 0 : i - 1];
    const Point after = stroke[std::min(i + 2, last)];
    Point from = stroke[i];
    for (int piece = 1; piece <= kPieces; ++piece) {
      const Point to =
          catmull_rom(before, stroke[i], stroke[i + 1], after, piece / double{kPieces});
      canvas.line(from, to, half_width);
      from = to;
    }
  }
}

/// The glyph as this writer writes it: its points displaced, then mapped from glyph units to
/// pixels, by one affine map for all.
Glyph written(const PenGlyph& glyph, KeyedRandom& random) {
  constexpr double kDegrees = 8, kShear = 0.14, kPoint = 2.6;  // Standard deviations.
  constexpr double kShift = 2.1;                               // Pixels, at most.
  const double angle = random.normal() * kDegrees * std::numbers::pi / 180;
  const double shear = random.normal() * kShear;
  const double scale_y = random.uniform(16, 20.5) / kGlyphHeight;
  const double scale_x = scale_y * random.uniform(0.8, 1.15);
  const double c = std::cos(angle), s = std::sin(angle);
  const double xx = c * scale_x, xy = (-c * shear - s) * scale_y;
  const double yx = s * scale_x, yy = (-s * shear + c) * scale_y;
  const double middle = (kDigitSide - 1) / 2.0;
  const Point centre{middle + random.uniform(-kShift, kShift),
                     middle + random.uniform(-kShift, kShift)};
  Glyph result;
  for (const std::vector<int>& numbers : glyph) {
    Stroke& stroke = result.emplace_back();
    for (size_t i = 0; i < numbers.size(); i += 2) {
      const bool corner = i > 0 && numbers[i] == numbers[i - 2] && numbers[i + 1] == numbers[i - 1];
      if (corner) {
        stroke.push_back(stroke.back());
        continue;
      }
      const double x = numbers[i] + random.normal() * kPoint - kGlyphCentre.x;
      const double y = numbers[i + 1] + random.normal() * kPoint - kGlyphCentre.y;
      stroke.push_back({centre.x + xx * x + xy * y, centre.y + yx * x + yy * y});
    }
  }
  return result;
}

Point anywhere(KeyedRandom& random) {
  return {random.uniform(3, kDigitSide - 4), random.uniform(3, kDigitSide - 4)};
}

/// By a stray stroke and an erased spot.
void disturb(Canvas& canvas, const Glyph& glyph, double half_width, KeyedRandom& random) {
  constexpr double kChance = 0.15;  // Of each.
  if (random.uniform() < kChance) {
    const Point from = anywhere(random);
    const Point to{from.x + random.uniform(-6, 6), from.y + random.uniform(-6, 6)};
    canvas.line(from, to, 0.7 * half_width);
  }
  if (random.uniform() < kChance) {
    const Stroke& stroke = glyph[random.below(glyph.size())];
    canvas.erase(stroke[random.below(stroke.size())], random.uniform(0.8, 2.2));
  }
}

void develop(const Canvas& canvas, uint8_t* pixels, KeyedRandom& random) {
  const double pressure = random.uniform(165, 255);
  constexpr double kNoiseStep = 14 / 127.5;  // Of 255, at most 14 up or down.
  uint64_t bits = 0;
  for (size_t i = 0; i < canvas.ink().size(); ++i) {
    if (i % 8 == 0) bits = random.next();
    const double noise = (static_cast<double>(bits & 255) - 127.5) * kNoiseStep;
    bits >>= 8;
    const double value = pressure * canvas.ink()[i] + noise;
    pixels[i] = static_cast<uint8_t>(std::clamp(static_cast<int>(value + 0.5), 0, 255));
  }
}

}  // namespace

uint8_t render_digit(uint64_t seed, uint64_t index, uint8_t* pixels) {
  KeyedRandom random(seed, index);
  const auto label = static_cast<uint8_t>(random.below(10));
  const std::vector<PenGlyph>& ways = glyphs()[label];
  const Glyph glyph = written(ways[random.below(ways.size())], random);
  const double half_width = random.uniform(0.8, 1.6);
  Canvas canvas;
  for (const Stroke& stroke : glyph) draw_stroke(canvas, stroke, half_width);
  disturb(canvas, glyph, half_width, random);
  develop(canvas, pixels, random);
  return label;
}

}  // namespace lockstep
