// The pole on a cart of Barto, Sutton and Anderson (1983), with the constants, the Euler steps and
// the limits of Gymnasium's CartPole-v1.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>

namespace rpc_tutorial {

class CartPole {
 public:
  /// Position of the cart (m), its speed, the pole's angle (rad), its angular speed.
  using State = std::array<float, 4>;
  static constexpr int kMostSteps = 500;

  explicit CartPole(uint64_t seed) : random_(seed) {}

  State reset() {
    std::uniform_real_distribution<double> small(-0.05, 0.05);
    for (auto& value : state_) value = small(random_);
    steps_ = 0;
    return state();
  }

  struct Step {
    State state;
    double reward = 1;  ///< For each step that the pole stands.
    bool done = false;  ///< It fell, the cart left its track, or it stood for long enough.
  };
  /// action: 0 pushes to the left, 1 to the right.
  Step step(int64_t action) {
    const double force = action == 1 ? kForce : -kForce;
    auto& [x, x_speed, angle, angle_speed] = state_;
    const double cosine = std::cos(angle), sine = std::sin(angle);
    const double pushed = (force + kPoleMassLength * angle_speed * angle_speed * sine) / kMass;
    const double angle_acceleration =
        (kGravity * sine - cosine * pushed) /
        (kHalfLength * (4.0 / 3.0 - kPoleMass * cosine * cosine / kMass));
    const double acceleration = pushed - kPoleMassLength * angle_acceleration * cosine / kMass;
    x += kTau * x_speed;
    x_speed += kTau * acceleration;
    angle += kTau * angle_speed;
    angle_speed += kTau * angle_acceleration;
    ++steps_;
    const bool fell = std::abs(x) > kTrack || std::abs(angle) > kAngle;
    return {state(), 1, fell || steps_ >= kMostSteps};
  }

 private:
  static constexpr double kGravity = 9.8, kCartMass = 1, kPoleMass = 0.1;
  static constexpr double kMass = kCartMass + kPoleMass, kHalfLength = 0.5;
  static constexpr double kPoleMassLength = kPoleMass * kHalfLength;
  static constexpr double kForce = 10, kTau = 0.02;  ///< Newton, seconds.
  static constexpr double kTrack = 2.4, kAngle = 12 * 2 * std::numbers::pi / 360;

  State state() const {
    return {static_cast<float>(state_[0]), static_cast<float>(state_[1]),
            static_cast<float>(state_[2]), static_cast<float>(state_[3])};
  }

  std::mt19937_64 random_;
  std::array<double, 4> state_{};
  int steps_ = 0;
};

}  // namespace rpc_tutorial
