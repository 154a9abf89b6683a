#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// While it lives, errors about the collectives that this thread begins say what they are for:
/// "gradients of step 11, GradientAverager".
class CallOrigin {
 public:
  struct Words {
    const char* what = nullptr;  ///< Null: nobody has said.
    const char* caller = nullptr;
    /// `step`: of the rank's loop; 0: not known.
    std::string text(int64_t step) const {
      if (!what) return {};
      const std::string of_step = step > 0 ? " of step " + std::to_string(step) : "";
      return what + of_step + ", " + caller;
    }
  };
  /// Both are literals.
  CallOrigin(const char* what, const char* caller) : before_(current()) {
    current() = {what, caller};
  }
  ~CallOrigin() { current() = before_; }
  CallOrigin(const CallOrigin&) = delete;
  CallOrigin& operator=(const CallOrigin&) = delete;

  static Words& current() {
    thread_local Words words;
    return words;
  }

 private:
  const Words before_;
};

}  // namespace lockstep
