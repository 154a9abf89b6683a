#pragma once

#include <pthread.h>

#include <mutex>
#include <set>

namespace lockstep {

/// The objects of one class in this process that a fork without exec must not use as its parent
/// does. In the child `T::left_in_fork()` is called on each, before fork() returns there, and none
/// is known any more. No other thread runs then. A fork waits while the mutex is held.
template <class T>
struct KnownToForks {
  std::mutex mutex;  ///< Guards the rest.
  std::set<T*> all;

  void add(T* one) {
    const std::lock_guard lock(mutex);
    all.insert(one);
  }
  void remove(T* one) {
    const std::lock_guard lock(mutex);
    all.erase(one);
  }

  static KnownToForks& get() {
    static KnownToForks& only = *watched(new KnownToForks);  // Forks go on until the end.
    return only;
  }

 private:
  static KnownToForks* watched(KnownToForks* made) {
    pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                   [] {
                     for (T* one : get().all) one->left_in_fork();
                     get().all.clear();
                     get().mutex.unlock();
                   });
    return made;
  }
};

}  // namespace lockstep
