#pragma once

namespace lockstep::shm {

/// While one lives, this thread runs callbacks of some group's calls. It must not wait for the
/// threads of any group then: one of them may be this thread, or wait for it in turn.
class CallbackScope {
 public:
  CallbackScope() { ++depth; }
  ~CallbackScope() { --depth; }
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  static bool active() { return depth > 0; }

 private:
  inline static thread_local int depth = 0;
};

}  // namespace lockstep::shm
