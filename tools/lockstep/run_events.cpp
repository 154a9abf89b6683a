#include "run_events.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kBackends[] = {"static", "c10d", "etcd"};

/// As Python has it: -N after signal N.
Json exit_code_of(const launch::WorkerEvent& worker) {
  if (!worker.end || worker.end->start_errno != 0) return {};
  const int status = worker.end->wait_status;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

void EventLog::begin(const launch::RankLayout& layout, bool live_on) {
  const bool restarts = layout.restart_count > layout_.restart_count;
  layout_ = layout;
  const char* again = !restarts ? "MEMBERSHIP_CHANGE" : live_on ? "REPLACEMENT" : "RESTART";
  write(std::exchange(begun_, true) ? again : "RENDEZVOUS", "", nullptr);
}

void EventLog::tell(const launch::WorkerEvent& worker) {
  if (!worker.end) return write("START", "", &worker);
  if (worker.end->succeeded()) return write("SUCCEEDED", "", &worker);
  write(worker.end->after_stop ? "TERMINATED" : "FAILED", worker.error, &worker);
  // On several hosts the next generation tells it.
  if (!worker.others_go_on || options_.has_meeting()) return;
  if (worker.is_replaced) ++layout_.restart_count;
  write(worker.is_replaced ? "REPLACEMENT" : "MEMBERSHIP_CHANGE", "", nullptr);
}

void EventLog::end(const std::string& error) const {
  write(error.empty() ? "SUCCEEDED" : "FAILED", error, nullptr);
}

void EventLog::write(const std::string& state, const std::string& error,
                     const launch::WorkerEvent* worker) const {
  if (options_.event_log != "console") return;
  using namespace std::chrono;
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  Json details = {
      {"group_world_size", layout_.nodes},
      {"entry_point", std::filesystem::path(options_.program.front()).filename().string()}};
  Json rank, id;
  if (worker) {
    rank = layout_.first_rank + worker->local_rank;
    id = std::to_string(worker->pid);
    details["local_rank"] = Json::array({worker->local_rank});
    details["role_rank"] = Json::array({rank});
    details["role_world_size"] = Json::array({layout_.world_size});
    details["exit_code"] = Json::array({exit_code_of(*worker)});
    details["worker_pid"] = Json::array({worker->pid});
  }
  const auto dump = [](const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  const auto now = system_clock::now().time_since_epoch();
  const Json event = {
      {"name", "torchelastic.worker.status." + state},
      {"source", worker ? "WORKER" : "AGENT"},
      {"timestamp", duration_cast<milliseconds>(now).count()},
      {"metadata",
       {{"run_id", options_.run_id},
        {"global_rank", rank},
        {"group_rank", layout_.node_rank},
        {"worker_id", id},
        {"role", options_.role},
        {"hostname", host},
        {"state", state},
        {"total_run_time", duration_cast<seconds>(steady_clock::now() - started_).count()},
        {"rdzv_backend", kBackends[static_cast<int>(options_.meeting.backend)]},
        {"raw_error", error.empty() ? Json() : Json(dump({{"message", error}}))},
        {"metadata", dump(details)},
        {"agent_restarts", layout_.restart_count},
        {"duration_ms", Json()}}}};
  std::fputs((dump(event) + "\n").c_str(), stderr);
}

}  // namespace lockstep::tool
