#include "lockstep/elastic/embedded_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <list>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/socket.h"
#include "lockstep/elastic/etcd_registry.h"
#include "tests/support/calling_registry.h"

// What only the embedded server has: its end, its limits, its store's clock and memory.
namespace lockstep::elastic {
namespace embedded_registry_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Kind = Request::Kind;
using Outcome = Reply::Outcome;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kLimit = 30s;

std::string endpoint_of(const EmbeddedRegistry& server) {
  return "http://127.0.0.1:" + std::to_string(server.port);
}

Change next_change(Registry& registry) {
  while (auto event = registry.next_event(kLimit))
    if (auto* change = std::get_if<Change>(&*event)) return *change;
  throw std::runtime_error("no change came");
}

UniqueFd raw_connection(const EmbeddedRegistry& server) {
  return connect_to("127.0.0.1", server.port, kLimit);
}

void send_text(const UniqueFd& to, const std::string& text) {
  EXPECT_EQ(::send(to.get(), text.data(), text.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(text.size()));
}

/// All that comes until the server closes the connection.
std::string text_until_end(const UniqueFd& from) {
  std::string text;
  const auto deadline = Clock::now() + kLimit;
  char buffer[4096];
  while (Clock::now() < deadline) {
    pollfd entry{from.get(), POLLIN, 0};
    ::poll(&entry, 1, 1000);
    const ssize_t count = ::recv(from.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN)) return text;
    if (count > 0) text.append(buffer, static_cast<size_t>(count));
  }
  throw std::runtime_error("the server does not close the connection");
}

std::string post(const std::string& path, const std::string& body, const std::string& more = "") {
  return "POST " + path + " HTTP/1.1\r\nContent-Type: application/json\r\n" + more +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

TEST(EmbeddedRegistry, ItsEndLeavesNobodyWaitingAndAnotherTakesItsPlace) {
  auto server = serve_registry({.host = "127.0.0.1"});
  const uint16_t port = server.port;
  const auto client = call_registry({.endpoints = {endpoint_of(server)}});
  const int64_t lease = client->call({.kind = Kind::grant_lease, .ttl = 60s}).lease;
  client->call({.kind = Kind::put, .key = "a/x", .value = "1", .lease = lease});
  client->watch("a/");
  EXPECT_EQ(next_change(*client).written.size(), 1U);
  const UniqueFd silent = raw_connection(server), half = raw_connection(server);
  send_text(half, "POST /v3/kv/put HTTP/1.1\r\nContent-Length: 100\r\n\r\n{");

  const auto begin = Clock::now();
  server = {};
  EXPECT_LT(Clock::now() - begin, 5s);
  text_until_end(silent);
  text_until_end(half);
  EXPECT_THROW(client->call({.kind = Kind::list, .key = "a/x", .timeout = 200ms}), RegistryError);

  server = serve_registry({.host = "127.0.0.1", .port = port});
  const Change anew = next_change(*client);
  EXPECT_TRUE(anew.whole) << "it is another registry";
  EXPECT_TRUE(anew.written.empty());
  EXPECT_EQ(client->call({.kind = Kind::keep_lease, .lease = lease}).outcome, Outcome::lease_gone);
  client->call({.kind = Kind::put, .key = "a/y", .value = "2"});
  EXPECT_EQ(next_change(*client).written.at(0).key, "a/y");
}

TEST(EmbeddedRegistry, APortThatIsTakenIsSaid) {
  const auto server = serve_registry({.host = "127.0.0.1"});
  EXPECT_THROW(serve_registry({.host = "127.0.0.1", .port = server.port}), CommError);
}

TEST(EmbeddedRegistry, ALargeRequestIsRefused) {
  const auto server =
      serve_registry({.host = "127.0.0.1", .most_bytes = 10'000, .idle_limit = 500ms});
  const auto client = call_registry({.endpoints = {endpoint_of(server)}});
  const auto put = [&](size_t size) {
    return client->call({.kind = Kind::put, .key = "x", .value = std::string(size, 'x')}).outcome;
  };
  EXPECT_EQ(put(7'000), Outcome::done);
  try {
    put(8'000);
    FAIL();
  } catch (const RegistryError& error) {
    EXPECT_EQ(error.kind(), RegistryError::Kind::refused);
  }
  EXPECT_EQ(put(1), Outcome::done);
  const UniqueFd other = raw_connection(server);
  send_text(other,
            "POST /v3/kv/put HTTP/1.1\r\nContent-Type: application/json\r\n"
            "Content-Length: 99999999999\r\n\r\n");
  EXPECT_THAT(text_until_end(other), HasSubstr("413"));
}

TEST(EmbeddedRegistry, HeadersWithoutEndEndTheConnection) {
  const auto server =
      serve_registry({.host = "127.0.0.1", .most_bytes = 10'000, .idle_limit = 60s});
  const UniqueFd client = raw_connection(server);
  std::string head = "POST /v3/kv/put HTTP/1.1\r\n";
  for (int i = 0; i < 5000; ++i) head += "X-" + std::to_string(i) + ": y\r\n";
  (void)::send(client.get(), head.data(), head.size(), MSG_NOSIGNAL);
  text_until_end(client);
}

TEST(EmbeddedRegistry, ARequestMustComeInTime) {
  const auto server = serve_registry({.host = "127.0.0.1", .idle_limit = 200ms});
  const UniqueFd silent = raw_connection(server), slow = raw_connection(server);
  std::string text = post("/v3/kv/range", "{}") + std::string(100'000, ' ');
  for (size_t sent = 0; sent < text.size(); ++sent) {
    if (::send(slow.get(), &text[sent], 1, MSG_NOSIGNAL) != 1) break;
    pollfd entry{slow.get(), POLLIN, 0};
    if (::poll(&entry, 1, 20) == 1) break;
    ASSERT_LT(sent, 1000U) << "it is still served";
  }
  text_until_end(silent);
  text_until_end(slow);
}

TEST(EmbeddedRegistry, MoreConnectionsThanItServesAreClosed) {
  const auto server =
      serve_registry({.host = "127.0.0.1", .most_connections = 2, .idle_limit = 60s});
  std::list<UniqueFd> held;
  for (int i = 0; i < 2; ++i) {
    held.push_back(raw_connection(server));
    send_text(held.back(), "POST");
  }
  EXPECT_EQ(text_until_end(raw_connection(server)), "");
  held.clear();  // Room for others.
  const auto client =
      call_registry({.endpoints = {endpoint_of(server)}, .request_timeout = kLimit});
  EXPECT_EQ(client->call({.kind = Kind::list, .key = "x"}).outcome, Outcome::done);
}

TEST(EmbeddedRegistry, WhatIsNoRequestOfOursGetsAnError) {
  const auto server = serve_registry({.host = "127.0.0.1"});
  const auto answer_to = [&](const std::string& text) {
    const UniqueFd client = raw_connection(server);
    send_text(client, text);
    return text_until_end(client).substr(0, 12);
  };
  EXPECT_EQ(answer_to(post("/v3/kv/range", R"({"key":"eA=="})")), "HTTP/1.1 200");
  EXPECT_EQ(answer_to(post("/v3/kv/range", "[]")), "HTTP/1.1 400");
  EXPECT_EQ(answer_to(post("/v3/watch", "[]")), "HTTP/1.1 400");
  EXPECT_EQ(answer_to(post("/v3/maintenance/snapshot", "{}")), "HTTP/1.1 501");
  EXPECT_EQ(answer_to("GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 400");
  EXPECT_EQ(answer_to(post("/v3/kv/range", "x", "Content-Encoding: gzip\r\n")), "HTTP/1.1 400");
  EXPECT_EQ(answer_to("\r\n\r\n"), "HTTP/1.1 400");
}

/// A store whose clock stands until it is moved.
class Store : public testing::Test {
 protected:
  Json ask(const std::string& path, const Json& body, int status = 200) {
    const Answer answer = store_.handle(path, body.dump());
    EXPECT_EQ(answer.status, status) << answer.body;
    return parse_json(answer.body);
  }
  void put(const std::string& key, int64_t lease = 0) {
    ask("/v3/kv/put", {{"key", to_base64(key)}, {"lease", std::to_string(lease)}});
  }
  /// Of 2 s.
  int64_t grant() { return *int_field(ask("/v3/lease/grant", {{"TTL", "2"}}), "ID"); }
  size_t count() {
    return field(ask("/v3/kv/range", {{"key", "AA=="}, {"range_end", "AA=="}}), "kvs").size();
  }
  /// As the server's thread looks at the leases.
  void pass(std::chrono::milliseconds time, std::chrono::milliseconds step = 500ms) {
    for (; time > 0ms; time -= step) {
      now_ += step;
      store_.expire_leases();
    }
  }

  static std::string watch_line(int64_t revision) {
    return Json{
        {"create_request", {{"key", to_base64("a")}, {"start_revision", std::to_string(revision)}}}}
        .dump();
  }

  EmbeddedStore::Clock::time_point now_ = EmbeddedStore::Clock::now();
  EmbeddedStore store_{3, [this] { return now_; }};
};

TEST_F(Store, ALeaseEndsAfterItsTimeUnlessItIsKept) {
  put("a", grant());
  const int64_t kept = grant();
  put("b", kept);
  pass(1500ms);
  ask("/v3/lease/keepalive", {{"ID", kept}});
  EXPECT_EQ(count(), 2U);
  pass(500ms);
  EXPECT_EQ(count(), 1U);
  pass(1500ms);
  EXPECT_EQ(count(), 0U);
}

TEST_F(Store, LeasesOutliveATimeInWhichTheServerStoodStill) {
  put("a", grant());
  pass(1000ms);
  pass(60s, 60s);
  EXPECT_EQ(count(), 1U);
  pass(1000ms);
  EXPECT_EQ(count(), 0U);
}

TEST_F(Store, AWatchThatIsTooFarBehindIsCancelled) {
  const auto watch_from = [&](int64_t revision) {
    auto watcher = std::get<EmbeddedStore::Watcher>(store_.watch(watch_line(revision)));
    std::string all;
    for (const std::string& line : store_.next_lines(watcher, 0ms)) all += line;
    return all;
  };
  for (int i = 0; i < 5; ++i) put("a");  // Revisions 2 to 6, of which 4 to 6 are kept.
  EXPECT_THAT(watch_from(4), HasSubstr(R"("mod_revision":"4")"));
  EXPECT_THAT(watch_from(3), HasSubstr(R"("canceled":true)"));
  EXPECT_THAT(watch_from(7), Not(HasSubstr("mod_revision")));
}

TEST_F(Store, AWatchEndsItsWaitWhenTheStoreIsClosed) {
  auto watcher = std::get<EmbeddedStore::Watcher>(store_.watch(watch_line(0)));
  EXPECT_EQ(store_.next_lines(watcher, 0ms).size(), 1U);
  std::thread closer([this] { store_.close(); });
  EXPECT_TRUE(store_.next_lines(watcher, 1h).empty());
  closer.join();
}

TEST_F(Store, ATransactionThatItCannotCarryOutAsAWholeIsRefused) {
  const Json put = {{"request_put", {{"key", "eA=="}}}};
  ask("/v3/kv/txn", {{"success", {put, put}}}, 501);
  const Json version = {{"key", "eA=="}, {"target", "VERSION"}, {"result", "EQUAL"}};
  ask("/v3/kv/txn", {{"compare", {version}}, {"success", {put}}}, 501);
  EXPECT_EQ(count(), 0U);
}

}  // namespace embedded_registry_test
}  // namespace lockstep::elastic
