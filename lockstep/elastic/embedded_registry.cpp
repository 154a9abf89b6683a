#include "lockstep/elastic/embedded_registry.h"

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/socket.h"
#include "lockstep/elastic/proof.h"

namespace lockstep::elastic {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr size_t kMostHeadBytes = 16 * 1024;
/// How often a stream without changes looks whether its client is still there.
constexpr milliseconds kLookAfterClient{500};

/// A connection, with limits of what a client may send and of its silence. httplib's own has none
/// for all headers together, nor for a client that sends a byte now and then.
class LimitedStream : public httplib::Stream {
 public:
  LimitedStream(int fd, size_t most_bytes, milliseconds limit)
      : fd_(fd), bytes_left_(most_bytes), limit_(limit), deadline_(Clock::now() + limit) {}

  bool is_readable() const override { return begin_ < end_ || wait(POLLIN, deadline_); }
  /// False also where the client has gone.
  bool is_writable() const override {
    char byte = 0;
    const ssize_t count = ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
  }

  ssize_t read(char* to, size_t size) override {
    if (begin_ == end_ && !fill()) return -1;
    const size_t count = std::min(size, end_ - begin_);
    std::copy_n(buffer_.data() + begin_, count, to);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }

  ssize_t write(const char* from, size_t size) override {
    const auto deadline = Clock::now() + limit_;
    for (size_t sent = 0; sent < size;) {
      const ssize_t count = ::send(fd_, from + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count < 0 && errno != EAGAIN && errno != EINTR) return -1;
      if (count < 0 && !wait(POLLOUT, deadline)) return -1;
      if (count > 0) sent += static_cast<size_t>(count);
    }
    return static_cast<ssize_t>(size);
  }

  /// To close a connection on which more has come would take the answer away from the client.
  void finish() {
    ::shutdown(fd_, SHUT_WR);
    while (fill()) continue;
    ::shutdown(fd_, SHUT_RDWR);
  }

  void get_remote_ip_and_port(std::string& ip, int& port) const override {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (::getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0)
      ip = numeric_text(address);
    port = 0;
  }
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return fd_; }

 private:
  bool wait(short what, Clock::time_point deadline) const {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd entry{fd_, what, 0};
    return ::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left.count(), 0))) == 1;
  }

  bool fill() {
    if (!wait(POLLIN, deadline_)) return false;
    const ssize_t count = ::recv(fd_, buffer_.data(), std::min(buffer_.size(), bytes_left_), 0);
    if (count <= 0) return false;
    bytes_left_ -= static_cast<size_t>(count);
    begin_ = 0;
    end_ = static_cast<size_t>(count);
    return true;
  }

  const int fd_;
  size_t bytes_left_;
  const milliseconds limit_;
  const Clock::time_point deadline_;
  std::array<char, 4096> buffer_{};
  size_t begin_ = 0, end_ = 0;
};

/// httplib reads requests and writes answers. Its own loop of accept ends at the first error and
/// looks at each waiting connection every 10 ms, so there is one here.
class Server : public httplib::Server {
 public:
  explicit Server(EmbeddedRegistryOptions options)
      : options_(std::move(options)),
        listener_(listen_on(options_.host, options_.port)),
        store_(options_.history),
        checker_(options_.token) {
    svr_sock_ = listener_.get();  // httplib takes none for a server that is shutting down
    set_payload_max_length(options_.most_bytes);
    // What httplib would unpack or take apart may become larger than it came.
    set_pre_routing_handler([](const httplib::Request& request, httplib::Response& response) {
      if (request.method == "POST" && request.has_header("Content-Length") &&
          !request.has_header("Content-Encoding") && !request.has_header("Transfer-Encoding") &&
          request.get_header_value("Content-Type") == "application/json")
        return HandlerResponse::Unhandled;
      response.status = 400;
      return HandlerResponse::Handled;
    });
    Post(".*", [this](const auto& request, auto& response) { answer(request, response); });
    acceptor_ = std::thread([this] { accept_all(); });
  }

  ~Server() override {
    stopping_ = true;
    store_.close();
    ::shutdown(listener_.get(), SHUT_RDWR);  // wakes the acceptor
    acceptor_.join();
    for (const Connection& connection : connections_) ::shutdown(connection.fd.get(), SHUT_RDWR);
    for (Connection& connection : connections_) connection.thread.join();
    svr_sock_ = INVALID_SOCKET;
  }

  uint16_t port() const { return bound_port(listener_.get()); }

 private:
  struct Connection {
    UniqueFd fd;
    std::atomic<bool> done = false;
    std::thread thread{};
    explicit Connection(UniqueFd socket) : fd(std::move(socket)) {}
  };

  void accept_all() {
    while (!stopping_) {
      const auto left = std::chrono::ceil<milliseconds>(store_.expire_leases() - Clock::now());
      try {
        UniqueFd fd = accept_from(listener_.get(), std::max(left, milliseconds(1)));
        connections_.remove_if([](Connection& connection) {
          if (!connection.done) return false;
          connection.thread.join();
          return true;
        });
        if (fd && !stopping_ && connections_.size() < options_.most_connections)
          serve(std::move(fd));
      } catch (const std::exception& error) {  // no descriptor or thread is free
        if (stopping_) return;
        log_warning(std::string("the registry cannot take a connection: ") + error.what());
        ::poll(nullptr, 0, 100);
      }
    }
  }

  void serve(UniqueFd fd) {
    Connection& connection = connections_.emplace_back(std::move(fd));
    limit_silence_of(connection.fd.get(), options_.idle_limit);
    try {
      connection.thread = std::thread([this, &connection] {
        LimitedStream stream(connection.fd.get(), kMostHeadBytes + options_.most_bytes,
                             options_.idle_limit);
        bool closed = false;
        process_request(stream, true, closed, nullptr);
        stream.finish();
        connection.done = true;
      });
    } catch (...) {
      connections_.pop_back();
      throw;
    }
  }

  void answer(const httplib::Request& request, httplib::Response& response) {
    if (request.path == kNoncePath) {
      response.set_content(Json{{"nonce", checker_.nonce()}}.dump(), "application/json");
      return;
    }
    std::optional<AnswerSeal> seal;
    std::string text = request.body;
    if (!options_.token.empty()) {
      auto opened = checker_.open(request.path, request.body, request.remote_addr);
      if (!opened) {
        response.status = 401;
        return;
      }
      text = std::move(opened->text);
      seal = std::move(opened->answer);
    }
    const auto reply = [&](const Answer& given) {
      response.status = given.status;
      response.set_content(seal ? seal->seal(given.status, 0, given.body) : given.body,
                           "application/json");
    };
    if (request.path != "/v3/watch") return reply(store_.handle(request.path, text));
    auto watcher = store_.watch(text);
    if (const auto* refused = std::get_if<Answer>(&watcher)) return reply(*refused);
    stream(std::get<EmbeddedStore::Watcher>(std::move(watcher)), seal, response);
  }

  void stream(EmbeddedStore::Watcher first, const std::optional<AnswerSeal>& seal,
              httplib::Response& response) {
    auto watcher = std::make_shared<EmbeddedStore::Watcher>(std::move(first));
    response.set_chunked_content_provider(
        "application/json",
        [this, watcher, seal, index = uint64_t{0}](size_t, httplib::DataSink& sink) mutable {
          for (const std::string& line : store_.next_lines(*watcher, kLookAfterClient)) {
            const std::string text = (seal ? seal->seal(200, index++, line) : line) + "\n";
            if (!sink.write(text.data(), text.size())) return false;
          }
          return !stopping_ && sink.is_writable();
        });
  }

  const EmbeddedRegistryOptions options_;
  const UniqueFd listener_;
  EmbeddedStore store_;
  ProofChecker checker_;
  std::atomic<bool> stopping_ = false;
  std::list<Connection> connections_;  ///< Of the acceptor until it has ended.
  std::thread acceptor_;
};

}  // namespace

EmbeddedRegistry serve_registry(EmbeddedRegistryOptions options) {
  auto server = std::make_shared<Server>(std::move(options));
  return {server, server->port()};
}

}  // namespace lockstep::elastic
