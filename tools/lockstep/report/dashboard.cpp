#include "tools/lockstep/report/dashboard.h"

#include <httplib.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/loggers/json_rows.h"
#include "tools/lockstep/report/run_data.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kLeastPause{1};  ///< Between what a page is sent.
/// Each page keeps a thread. Of more than so many the oldest ends, and its browser asks again.
constexpr int64_t kMostPages = 24;
constexpr size_t kThreads = 32;

class Dashboard : public detail::JsonRows {
 public:
  explicit Dashboard(DashboardOptions options)
      : options_(std::move(options)), run_(options_.name) {}
  ~Dashboard() override {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }

  void begin(int64_t step, int64_t epochs) override {
    if (thread_.joinable()) return;
    if (step > 0 && std::filesystem::exists(options_.rows))
      run_ = read_run(options_.rows, options_.name);
    serve();
  }

 protected:
  void write(const nlohmann::ordered_json& row) override {
    if (!thread_.joinable()) Logger::begin();
    {
      const std::lock_guard lock(mutex_);
      run_.add(row);
      ++version_;
    }
    changed_.notify_all();
  }

 private:
  void serve() {
    server_.set_write_timeout(kLeastPause);  // Of a page that does not read.
    server_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    server_.Get("/", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(live_page(), "text/html; charset=utf-8");
    });
    server_.Get("/events", [this](const httplib::Request&, httplib::Response& response) {
      response.set_chunked_content_provider(
          "text/event-stream",
          [this, number = ++pages_, seen = int64_t{0}](size_t, httplib::DataSink& sink) mutable {
            return pages_ - number < kMostPages && send_next(seen, sink);
          });
    });
    // Without SO_REUSEPORT, httplib's default, with which two runs would share a port.
    server_.set_socket_options([this](int socket) {
      knows_host_ = true;
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    const auto& [host, port, rows, name] = options_;
    int bound = port;
    if (port == 0) {
      bound = server_.bind_to_any_port(host);
    } else if (!server_.bind_to_port(host, port)) {
      bound = -1;
    }
    if (bound < 0) {
      const int error = knows_host_ ? errno : EADDRNOTAVAIL;
      throw SystemError(
          "the dashboard cannot be served at " + endpoint_text(host, port), error,
          error == EADDRINUSE ? "another program may have the port; port 0 takes a free one" : "");
    }
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    // Also with --quiet: nothing else says where it is.
    lockstep::log(LogLevel::quiet,
                  "dashboard: http://" + endpoint_text(host, static_cast<uint16_t>(bound)) + "/");
  }

  /// One event, when there is news. False ends the stream.
  bool send_next(int64_t& seen, httplib::DataSink& sink) {
    std::string data;
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kLeastPause, [&] { return ended_ || version_ != seen; });
      if (ended_ && version_ == seen) return false;
      if (version_ == seen) {
        data = ":\n\n";  // A comment, which finds out whether the page is still there.
      } else {
        seen = version_;
        const auto runs = nlohmann::json::array({run_.json()});
        using Errors = nlohmann::json::error_handler_t;  // Paths and names need not be UTF-8.
        data = "data: " + runs.dump(-1, ' ', false, Errors::replace) + "\n\n";
      }
    }
    if (!sink.write(data.data(), data.size())) return false;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLeastPause, [&] { return ended_; });
    return true;
  }

  DashboardOptions options_;
  httplib::Server server_;
  std::thread thread_;
  bool knows_host_ = false;         ///< It has an address.
  std::atomic<int64_t> pages_ = 0;  ///< That have come.
  std::mutex mutex_;                ///< Of what follows.
  std::condition_variable changed_;
  RunData run_;
  int64_t version_ = 0;
  bool ended_ = false;
};

}  // namespace

std::shared_ptr<Logger> dashboard(DashboardOptions options) {
  return std::make_shared<Dashboard>(std::move(options));
}

}  // namespace lockstep
