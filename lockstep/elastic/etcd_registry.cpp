#include "lockstep/elastic/etcd_registry.h"

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/base/host_address.h"
#include "lockstep/base/log.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/elastic/event_queue.h"
#include "lockstep/elastic/gateway.h"
#include "lockstep/elastic/http_transfer.h"
#include "lockstep/elastic/proof.h"

namespace lockstep::elastic {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using ErrorKind = RegistryError::Kind;

/// Of one request, before it fails: a member may not know a new token of etcd's at once.
constexpr size_t kMostRefusals = 3;

void check(const EtcdRegistryOptions& options) {
  if (options.endpoints.empty()) throw UsageError("registry: no endpoint is given");
  for (const std::string& endpoint : options.endpoints) {
    const bool known = endpoint.starts_with("http://") || endpoint.starts_with("https://");
    if (!known || !parse_endpoint(endpoint.substr(endpoint.find("://") + 3))) {
      throw UsageError("registry: endpoint '" + endpoint +
                       "'; expected http://HOST:PORT or https://HOST:PORT");
    }
  }
  if (options.certificate.empty() != options.key.empty())
    throw UsageError("registry: a certificate and its key belong together");
}

/// In a row, before it is told: a registry that ends or begins may break off some.
constexpr size_t kManyHangUps = 20;

/// It is ssh or the like.
bool is_no_http(CURLcode code) {
  return code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_WEIRD_SERVER_REPLY;
}

/// As torchrun's store does, or redis, or a proxy whose server is not up yet.
bool is_hang_up(CURLcode code) {
  return code == CURLE_GOT_NOTHING || code == CURLE_RECV_ERROR;
}

/// How a try ended.
struct Verdict {
  enum class Kind {
    answered,
    may_pass,
    no_credentials,  ///< Those that were sent no longer count.
    refused,
    invalid,
  };
  Kind kind{};
  std::string problem{};
  Json answer{};
  const char* hint = "";  ///< What the user may do about it.
  bool hung_up = false;
};

constexpr const char* kSameToken =
    "hosts of a job share one token: give each the same --token-file or LOCKSTEP_TOKEN";

bool is_tls_problem(CURLcode code) {
  return code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CERTPROBLEM ||
         code == CURLE_SSL_CACERT_BADFILE || code == CURLE_SSL_CONNECT_ERROR;
}

constexpr GrpcCode kMayPass[] = {GrpcCode::cancelled,         GrpcCode::unknown,
                                 GrpcCode::deadline_exceeded, GrpcCode::resource_exhausted,
                                 GrpcCode::aborted,           GrpcCode::unavailable};

Verdict::Kind kind_of_error(int status, int64_t grpc) {
  const auto code = GrpcCode(grpc);
  if (code == GrpcCode::unauthenticated || status == 401) return Verdict::Kind::no_credentials;
  if (code == GrpcCode::permission_denied || status == 403) return Verdict::Kind::refused;
  const bool passes =
      grpc == 0 ? (status >= 500 && status != 501) || status == 408 || status == 429
                : std::find(std::begin(kMayPass), std::end(kMayPass), code) != std::end(kMayPass);
  return passes ? Verdict::Kind::may_pass : Verdict::Kind::invalid;
}

/// One request, tried until it is carried out or its time is over, or the stream of all watches.
struct Operation {
  enum class Purpose { reply, listing, credentials, stream };
  Purpose purpose{};
  uint64_t id = 0;  ///< The reply's request, or the watch whose prefix is listed.
  Request request{};
  EtcdMessage message{};
  Clock::time_point deadline = Clock::time_point::max();
  Clock::time_point next_try{};
  size_t tries = 0, refusals = 0, hang_ups = 0;
  std::string problem{};  ///< Of the last try.
  // Of the try that is under way.
  std::unique_ptr<HttpTransfer> transfer{};
  size_t endpoint = 0;
  uint64_t credentials = 0;
  AnswerSeal seal{};
  // Of the stream.
  uint64_t lines = 0;
  size_t to_begin = 0;  ///< Watches that the server has not yet said to have begun.
};
using Purpose = Operation::Purpose;

struct WatchState {
  std::string prefix;
  bool listed = false;   ///< `revision` counts.
  bool listing = false;  ///< An operation for it is under way.
  int64_t revision = 0;  ///< Up to which its changes were told.
};

/// All but the public functions belongs to its thread.
class EtcdRegistry : public Registry {
 public:
  explicit EtcdRegistry(EtcdRegistryOptions options)
      : options_(std::move(options)), multi_(::curl_multi_init()) {
    if (!multi_) throw Error("libcurl cannot start");
    thread_ = std::thread([this] { run(); });
  }

  ~EtcdRegistry() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ::curl_multi_wakeup(multi_);
    thread_.join();
    operations_.clear();
    ::curl_multi_cleanup(multi_);
  }

  uint64_t submit(Request request) override {
    if (request.timeout <= milliseconds(0)) request.timeout = options_.request_timeout;
    const auto deadline = Clock::now() + request.timeout;
    return post([this, request = std::move(request), deadline](uint64_t id) {
      operations_.push_back({.purpose = Purpose::reply,
                             .id = id,
                             .request = request,
                             .message = message_of(request),
                             .deadline = deadline});
    });
  }

  uint64_t watch(const std::string& prefix) override {
    return post([this, prefix](uint64_t id) { watches_[id] = {.prefix = prefix}; });
  }

  void unwatch(uint64_t watch) override {
    post([this, watch](uint64_t) { watches_.erase(watch); });
  }

  std::optional<RegistryEvent> next_event(milliseconds timeout) override {
    return events_.take(timeout);
  }

  int descriptor() const override { return events_.descriptor(); }

 private:
  uint64_t post(const std::function<void(uint64_t)>& task) {
    const std::lock_guard lock(mutex_);
    const uint64_t id = ++last_id_;
    tasks_.push_back([task, id] { task(id); });
    ::curl_multi_wakeup(multi_);
    return id;
  }

  bool take_tasks() {
    std::vector<std::function<void()>> tasks;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return false;
      tasks.swap(tasks_);
    }
    for (const auto& task : tasks) task();
    return true;
  }

  void run() {
    while (take_tasks()) {
      int running = 0;
      ::curl_multi_perform(multi_, &running);
      read_stream();
      finish_transfers();
      fail_late();
      keep_watches();
      start_operations();
      ::curl_multi_poll(multi_, nullptr, 0, static_cast<int>(time_to_wait().count()), nullptr);
    }
  }

  milliseconds time_to_wait() const {
    const auto now = Clock::now();
    auto next = now + std::chrono::seconds(1);
    for (const Operation& operation : operations_) {
      if (!operation.transfer) next = std::min(next, operation.deadline);
      if (!operation.transfer && operation.next_try > now)
        next = std::min(next, operation.next_try);
    }
    return std::max(std::chrono::ceil<milliseconds>(next - now), milliseconds(0));
  }

  Operation* find(Purpose purpose) {
    const auto found = std::find_if(operations_.begin(), operations_.end(),
                                    [&](const auto& one) { return one.purpose == purpose; });
    return found == operations_.end() ? nullptr : &*found;
  }

  // Credentials: etcd's token of a user, or a session with proofs.

  bool lacks_credentials() const {
    return !have_credentials_ && !(options_.user.empty() && options_.token.empty());
  }

  void ask_for_credentials() {
    if (find(Purpose::credentials)) return;
    const Json user = {{"name", options_.user}, {"password", options_.password}};
    operations_.push_back({.purpose = Purpose::credentials,
                           .message = options_.token.empty()
                                          ? EtcdMessage{"/v3/auth/authenticate", user.dump()}
                                          : EtcdMessage{kNoncePath, "{}"}});
  }

  bool take_credentials(const Json& answer) {
    const Json& text = field(answer, options_.token.empty() ? "token" : "nonce");
    if (!text.is_string()) return false;
    if (options_.token.empty())
      authorization_ = text.get<std::string>();
    else
      session_.emplace(options_.token, text.get<std::string>());
    have_credentials_ = true;
    ++credentials_;
    return true;
  }

  // The life of an operation.

  void start_operations() {
    const auto now = Clock::now();
    const bool all_listed = std::all_of(watches_.begin(), watches_.end(),
                                        [](const auto& entry) { return entry.second.listed; });
    for (Operation& operation : operations_) {  // one may be added at the end
      if (operation.transfer || operation.next_try > now) continue;
      if (operation.purpose == Purpose::stream && !all_listed) continue;
      if (operation.purpose != Purpose::credentials && lacks_credentials())
        ask_for_credentials();
      else
        start(operation);
    }
  }

  void start(Operation& operation) {
    const auto left = std::chrono::ceil<milliseconds>(operation.deadline - Clock::now());
    milliseconds timeout = std::clamp(left, milliseconds(1), options_.try_timeout);
    if (operation.purpose == Purpose::stream) {
      timeout = milliseconds(0);
      begin_stream(operation);
    }
    operation.endpoint = current_;
    operation.credentials = credentials_;
    const auto& [path, body] = operation.message;
    const bool seals = session_ && operation.purpose != Purpose::credentials;
    operation.transfer = std::make_unique<HttpTransfer>(
        multi_, options_,
        HttpRequest{.url = options_.endpoints[current_] + path,
                    .body = seals ? session_->seal(path, body, operation.seal) : body,
                    .authorization = have_credentials_ ? authorization_ : "",
                    .timeout = timeout});
  }

  void finish_transfers() {
    int left = 0;
    while (const CURLMsg* message = ::curl_multi_info_read(multi_, &left)) {
      const CURLcode code = message->data.result;
      const auto found = std::find_if(operations_.begin(), operations_.end(),
                                      [handle = message->easy_handle](const auto& one) {
                                        return one.transfer && one.transfer->handle() == handle;
                                      });
      if (found != operations_.end()) settle(*found, judge(*found, code));
    }
  }

  Verdict judge(const Operation& operation, CURLcode code) const {
    using Kind = Verdict::Kind;
    const HttpTransfer& transfer = *operation.transfer;
    if (code != CURLE_OK)
      return {.kind = is_tls_problem(code) || (options_.embedded && is_no_http(code))
                          ? Kind::refused
                          : Kind::may_pass,
              .problem = transfer.problem(code),
              .hung_up = is_hang_up(code)};
    const int status = transfer.status();
    const std::string with_status = " (HTTP status " + std::to_string(status) + ")";
    if (operation.purpose == Purpose::stream && status == 200)
      return {Kind::may_pass, "the stream has ended"};
    std::string text = transfer.received();
    const bool asks = operation.purpose == Purpose::credentials;
    if (session_ && !asks) {
      if (status == 401)
        return {Kind::no_credentials, "it refuses our proof of the token", {}, kSameToken};
      auto opened = operation.seal.open(status, 0, text);
      if (!opened)
        return {Kind::refused,
                "it does not prove that it knows the token" + with_status,
                {},
                kSameToken};
      text = std::move(*opened);
    }
    Json answer = parse_json(text);
    if (status == 401 && !answer.is_object())  // etcd's refusals are objects
      return {Kind::no_credentials, "it wants a proof of a token", {}, kSameToken};
    if (status == 200 || (!asks && is_reply(operation.request, answer)))
      return {Kind::answered, "not an answer of etcd's version 3", std::move(answer)};
    auto kind = kind_of_error(status, int_field(answer, "code").value_or(0));
    // "Invalid" are also a wrong password, and a token from before a change of etcd's users.
    if (kind == Kind::invalid && !options_.user.empty() && status == 400)
      kind = asks ? Kind::refused : Kind::no_credentials;
    const Json& words = field(answer, "error");
    return {kind, (words.is_string() ? words.get<std::string>() : "an error") + with_status};
  }

  /// Ends a try, and the operation where it is done or has failed.
  void settle(Operation& operation, Verdict verdict) {
    using Kind = Verdict::Kind;
    operation.transfer.reset();
    operation.problem = options_.endpoints[operation.endpoint] + ": " + verdict.problem;
    if (verdict.kind == Kind::answered) {
      if (deliver(operation, verdict.answer)) return remove(operation);
      verdict.kind = Kind::invalid;
    }
    last_problem_ = operation.problem;
    if (verdict.kind == Kind::no_credentials && operation.credentials == credentials_)
      have_credentials_ = false;
    const bool refuses = verdict.kind == Kind::refused || verdict.kind == Kind::no_credentials;
    const bool often =
        refuses && ++operation.refusals >= std::max(kMostRefusals, options_.endpoints.size());
    operation.hang_ups = verdict.hung_up ? operation.hang_ups + 1 : 0;
    if (options_.embedded && cluster_.empty() && operation.hang_ups == kManyHangUps &&
        !std::exchange(told_hang_ups_, true))
      log_warning(other_program().what());
    if (often || verdict.kind == Kind::invalid)
      return fail(operation, ErrorKind::refused, verdict.hint);
    const bool round_is_over = ++operation.tries % options_.endpoints.size() == 0;
    operation.next_try = Clock::now() + (round_is_over ? options_.retry_pause : milliseconds(0));
    if (verdict.kind != Kind::no_credentials) leave(operation.endpoint);
  }

  void leave(size_t endpoint) {
    if (endpoint != current_ || options_.endpoints.size() == 1) return;
    current_ = (current_ + 1) % options_.endpoints.size();
    // The stream's server may be silent as well.
    Operation* stream = find(Purpose::stream);
    if (stream && stream->endpoint == endpoint) stream->transfer.reset();
  }

  bool deliver(Operation& operation, const Json& answer) {
    if (operation.purpose == Purpose::credentials) return take_credentials(answer);
    auto reply = reply_of(operation.request, answer);
    if (!reply) return false;
    reply->request = operation.id;
    if (operation.purpose == Purpose::listing)
      deliver_listing(std::move(*reply), field(answer, "header"));
    else
      events_.push(std::move(*reply));
    return true;
  }

  RegistryError other_program() const {
    const std::string& url = options_.endpoints.front();
    const auto [host, port] = parse_endpoint(url.substr(url.find("://") + 3)).value();
    return {ErrorKind::refused,
            "another program than `lockstep run` has port " + std::to_string(port) + " of " + host +
                ": " + what_answers(without_brackets(host), port),
            "end it, or give all hosts another --master-port (--rdzv-endpoint)"};
  }

  void fail(Operation& operation, ErrorKind kind, const char* hint) {
    const bool late = kind == ErrorKind::unreachable;
    const bool ours = operation.purpose == Purpose::reply;
    const std::string what =
        ours ? describe(operation.request) : "to take us in or to tell changes";
    const std::string message =
        "the registry at " + join(options_.endpoints, ", ") +
        (late ? " did not carry out " + what + " within " + seconds_text(operation.request.timeout)
              : " refuses " + what) +
        ": " + (operation.problem.empty() ? last_problem_ : operation.problem);
    const bool is_other = options_.embedded && !late && hint != kSameToken;
    const RegistryError error = is_other ? other_program() : RegistryError(kind, message, hint);
    const bool all = operation.purpose == Purpose::credentials;  // they wait for it
    for (auto at = operations_.begin(); at != operations_.end();) {
      const auto one = at++;
      if (&*one != &operation && !all) continue;
      if (one->purpose == Purpose::reply)
        events_.push(Reply{.request = one->id, .outcome = Reply::Outcome::failed, .error = error});
      if (&*one != &operation) operations_.erase(one);
    }
    remove(operation);
    if (ours) return;
    for (const auto& [id, _] : watches_) events_.push(Change{.watch = id, .error = error});
    watches_.clear();
  }

  void remove(const Operation& operation) {
    operations_.remove_if([&](const Operation& one) { return &one == &operation; });
  }

  void fail_late() {
    const auto now = Clock::now();
    for (auto at = operations_.begin(); at != operations_.end();) {
      Operation& operation = *at++;
      if (!operation.transfer && operation.deadline <= now)
        fail(operation, ErrorKind::unreachable,
             "are the servers up, and do the endpoints lead to them?");
    }
  }

  // Watches: a list each, then changes by one stream.

  void keep_watches() {
    for (auto& [id, watch] : watches_) {
      if (watch.listed || watch.listing) continue;
      watch.listing = true;
      const Request list{.kind = Request::Kind::list, .key = watch.prefix};
      operations_.push_back(
          {.purpose = Purpose::listing, .id = id, .request = list, .message = message_of(list)});
    }
    Operation* stream = find(Purpose::stream);
    if (watches_.empty() && stream) return remove(*stream);
    if (!watches_.empty() && !stream) operations_.push_back({.purpose = Purpose::stream});
  }

  void deliver_listing(Reply reply, const Json& header) {
    const auto found = watches_.find(reply.request);
    if (found == watches_.end()) return;
    same_cluster(header);
    found->second.listed = true;
    found->second.listing = false;
    found->second.revision = reply.revision;
    // It begins again with this watch.
    if (Operation* stream = find(Purpose::stream)) stream->transfer.reset();
    events_.push(Change{.watch = reply.request,
                        .whole = true,
                        .written = std::move(reply.records),
                        .revision = reply.revision});
  }

  /// False where it is another one than before, with other data: then all is listed anew.
  bool same_cluster(const Json& header) {
    std::string cluster = field(header, "cluster_id").dump();
    const bool same = cluster_.empty() || cluster_ == cluster;
    cluster_ = std::move(cluster);
    if (!same)
      for (auto& [_, watch] : watches_) watch.listed = false;
    return same;
  }

  void begin_stream(Operation& stream) {
    stream.message = {"/v3/watch", ""};
    for (const auto& [id, watch] : watches_)
      stream.message.body += watch_message(watch.prefix, id, watch.revision + 1);
    stream.lines = 0;
    stream.to_begin = watches_.size();
  }

  void read_stream() {
    Operation* stream = find(Purpose::stream);
    while (stream && stream->transfer && stream->transfer->status() == 200) {
      auto line = stream->transfer->take_line();
      if (!line) return;
      if (session_) line = stream->seal.open(200, stream->lines++, *line);
      Verdict verdict{Verdict::Kind::may_pass, "it does not prove that it knows the token"};
      if (line) verdict = take_result(*stream, field(parse_json(*line), "result"));
      if (verdict.kind != Verdict::Kind::answered) return settle(*stream, std::move(verdict));
    }
  }

  /// "Answered" where the stream goes on.
  Verdict take_result(Operation& stream, const Json& result) {
    using Kind = Verdict::Kind;
    if (!result.is_object()) return {Kind::may_pass, "the stream has ended"};  // by an error
    const auto found =
        watches_.find(static_cast<uint64_t>(int_field(result, "watch_id").value_or(0)));
    if (field(result, "canceled") == true) {
      // Without a revision: no permission, or no longer. etcd gives no code here.
      if (int_field(result, "compact_revision").value_or(0) == 0)
        return {Kind::no_credentials, "it refuses to watch"};
      if (found != watches_.end()) found->second.listed = false;
    } else if (field(result, "created") == true) {
      if (!same_cluster(field(result, "header")))
        return {Kind::may_pass, "it is another registry than before"};
      if (stream.to_begin > 0 && --stream.to_begin == 0) stream.tries = stream.refusals = 0;
    }
    if (found != watches_.end()) take_events(found->first, found->second, field(result, "events"));
    return {Kind::answered};
  }

  void take_events(uint64_t id, WatchState& watch, const Json& events) {
    const int64_t told = watch.revision;
    for (const Json& event : events) {
      auto record = record_of(field(event, "kv"));
      if (!record || record->revision <= told) continue;
      watch.revision = record->revision;
      Change change{.watch = id, .revision = record->revision};
      if (field(event, "type") == "DELETE")
        change.erased.push_back(std::move(record->key));
      else
        change.written.push_back(std::move(*record));
      events_.push(std::move(change));
    }
  }

  const EtcdRegistryOptions options_;
  EventQueue<RegistryEvent> events_;
  std::mutex mutex_;
  bool stopping_ = false;
  uint64_t last_id_ = 0;
  std::vector<std::function<void()>> tasks_;

  CURLM* const multi_;
  std::list<Operation> operations_;  ///< In the order of their submission.
  size_t current_ = 0;               ///< The endpoint that is asked.
  std::string last_problem_ = "no server has been asked";
  bool told_hang_ups_ = false;

  bool have_credentials_ = false;
  uint64_t credentials_ = 0;  ///< Their number.
  std::string authorization_;
  std::optional<ProofSession> session_;

  std::map<uint64_t, WatchState> watches_;
  std::string cluster_;  ///< Its number, as the servers say it; empty: not known.
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Registry> connect_registry(EtcdRegistryOptions options) {
  check(options);
  return std::make_unique<EtcdRegistry>(std::move(options));
}

}  // namespace lockstep::elastic
