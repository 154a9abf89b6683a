#include "lockstep/base/unforked_port.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <vector>

#include "lockstep/base/socket.h"

namespace lockstep {
namespace {

/// Of this process. They are looked up before a fork: the child must not take memory.
struct PortsInThisProcess {
  std::mutex mutex;  ///< Held during a fork as well.
  std::multiset<uint16_t> ports;
  std::vector<int> sockets;

  static PortsInThisProcess& get() {
    static PortsInThisProcess& only = *watched(new PortsInThisProcess);  // Forks go on to the end.
    return only;
  }

 private:
  static PortsInThisProcess* watched(PortsInThisProcess* made) {
    pthread_atfork([] { get().before_fork(); }, [] { get().mutex.unlock(); },
                   [] { get().in_child(); });
    return made;
  }

  void before_fork() {
    mutex.lock();
    sockets.clear();
    for (auto port = ports.begin(); port != ports.end(); port = ports.upper_bound(*port))
      for (const int fd : sockets_at(*port)) sockets.push_back(fd);
  }

  void in_child() {
    const int nothing = sockets.empty() ? -1 : ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : sockets) nothing < 0 ? ::close(fd) : ::dup3(nothing, fd, O_CLOEXEC);
    if (nothing >= 0) ::close(nothing);
    mutex.unlock();
  }
};

}  // namespace

UnforkedPort::UnforkedPort(uint16_t port) : port_(port) {
  auto& ours = PortsInThisProcess::get();
  const std::lock_guard lock(ours.mutex);
  ours.ports.insert(port_);
}

UnforkedPort::~UnforkedPort() {
  auto& ours = PortsInThisProcess::get();
  const std::lock_guard lock(ours.mutex);
  ours.ports.erase(ours.ports.find(port_));
}

}  // namespace lockstep
