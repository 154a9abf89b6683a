#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/socket.h"

namespace lockstep::test_etcd {

/// For tests: whether etcd is installed.
inline bool is_there() {
  return std::system("etcd --version >/dev/null 2>&1") == 0;
}

/// For tests: a program with its output in a file, until it is killed.
class Program {
 public:
  Program(std::vector<std::string> words, const std::string& output) {
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    process_ = ::fork();
    if (process_ < 0) throw std::runtime_error("fork");
    if (process_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int file = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(file, STDOUT_FILENO);
    ::dup2(file, STDERR_FILENO);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ~Program() {
    signal(SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  void signal(int number) const { ::kill(process_, number); }

 private:
  pid_t process_ = -1;
};

/// For tests: etcd in several processes on this host, with its data in a temporary folder.
class Cluster {
 public:
  /// `more`: flags for each; "https" makes the endpoints so.
  explicit Cluster(size_t members = 3, std::vector<std::string> more = {},
                   std::string scheme = "http")
      : more_(std::move(more)), scheme_(std::move(scheme)), programs_(members) {
    std::vector<UniqueFd> held;  // so that all ports differ
    for (size_t i = 0; i < 2 * members; ++i) {
      held.push_back(listen_on("127.0.0.1", 0));
      ports_.push_back(bound_port(held.back().get()));
    }
    held.clear();
    for (size_t i = 0; i < members; ++i) start(i);
  }

  void start(size_t member) {
    const std::string name = "m" + std::to_string(member);
    const std::string client = endpoint(member), peer = peer_of(member);
    std::string all;
    for (size_t i = 0; i < programs_.size(); ++i)
      all += (i == 0 ? "m" : ",m") + std::to_string(i) + "=" + peer_of(i);
    std::vector<std::string> words = {"etcd",
                                      "--name",
                                      name,
                                      "--data-dir",
                                      (folder_.path() / name).string(),
                                      "--listen-client-urls",
                                      client,
                                      "--advertise-client-urls",
                                      client,
                                      "--listen-peer-urls",
                                      peer,
                                      "--initial-advertise-peer-urls",
                                      peer,
                                      "--initial-cluster",
                                      all};
    words.insert(words.end(), more_.begin(), more_.end());
    programs_[member] =
        std::make_unique<Program>(words, (folder_.path() / (name + ".log")).string());
  }
  void kill(size_t member) { programs_[member].reset(); }
  void signal(size_t member, int number) { programs_[member]->signal(number); }
  size_t size() const { return programs_.size(); }
  std::string log(size_t member) const {
    return read_file(folder_.path() / ("m" + std::to_string(member) + ".log"));
  }

  std::string endpoint(size_t member) const {
    return scheme_ + "://127.0.0.1:" + std::to_string(ports_[2 * member]);
  }
  std::vector<std::string> endpoints() const {
    std::vector<std::string> all;
    for (size_t i = 0; i < programs_.size(); ++i) all.push_back(endpoint(i));
    return all;
  }

 private:
  std::string peer_of(size_t member) const {
    return "http://127.0.0.1:" + std::to_string(ports_[2 * member + 1]);
  }

  const TemporaryDirectory folder_;
  const std::vector<std::string> more_;
  const std::string scheme_;
  std::vector<uint16_t> ports_;
  std::vector<std::unique_ptr<Program>> programs_;
};

}  // namespace lockstep::test_etcd
