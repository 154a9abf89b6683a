#pragma once

#include "lockstep/rpc/fast_path.h"

namespace lockstep::rpc::detail {

/// This thread looks for messages, so that others wake nobody. Whoever ends it takes out once more
/// what has come.
class FastPath::Look {
 public:
  explicit Look(FastLink& link) : link_(link) {}
  ~Look() { end(); }
  Look(const Look&) = delete;
  Look& operator=(const Look&) = delete;

  void begin() {
    if (!on_) link_.begin_look();
    on_ = true;
  }
  void end() {
    if (on_) link_.end_look();
    on_ = false;
  }

 private:
  FastLink& link_;
  bool on_ = false;
};

}  // namespace lockstep::rpc::detail
