// Damaged requests for the embedded registry: each gets an answer, and never crashes it, hangs or
// leaves records that cannot be read. `LLVMFuzzerTestOneInput` is also a target of libFuzzer:
// tests/fuzz/test_registry_fuzz.py.
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/file.h"
#include "lockstep/base/random.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/elastic/embedded_registry.h"
#include "lockstep/elastic/embedded_store.h"
#include "lockstep/elastic/gateway.h"
#include "lockstep/elastic/proof.h"

namespace lockstep::elastic {
namespace registry_fuzz_test {

void expect(bool holds) {
  if (!holds) std::abort();
}

void expect_object(const std::string& text) {
  expect(text.starts_with('{') && Json::accept(text));
}

void expect_answer(const Answer& answer) {
  expect(answer.status == 200 || (answer.status >= 400 && answer.status < 600));
  expect_object(answer.body);
}

/// Stands in an input for the number of the store's lease, which is another one each time.
const std::string kLease = "471147";

/// Requests to a store of their own, so that an input that was found fails again by itself.
class Session {
 public:
  /// A path, a line's end, a body.
  void handle(std::string input) {
    for (size_t at = 0; (at = input.find(kLease, at)) != std::string::npos; at += lease().size())
      input.replace(at, kLease.size(), lease());
    const size_t end = std::min(input.find('\n'), input.size());
    const std::string path = input.substr(0, end),
                      body = input.substr(std::min(end + 1, input.size()));
    if (path == "/v3/watch") return watch(body);
    expect_answer(store_.handle(path, body));
    static ProofChecker checker("0123456789abcdef");
    expect(!checker.open(path, body, "a test"));
    // What a client makes of such an answer.
    const Json answer = parse_json(body);
    for (int kind = 0; kind <= static_cast<int>(Request::Kind::revoke_lease); ++kind)
      reply_of({.kind = static_cast<Request::Kind>(kind), .expected = 1}, answer);
  }

  /// The changes that those who watch are told of.
  void end() {
    for (auto& watcher : watchers_) {
      for (const auto& line : store_.next_lines(watcher, std::chrono::seconds(0)))
        expect_object(line);
    }
  }

 private:
  const std::string& lease() {
    if (!lease_.empty()) return lease_;
    const Answer granted = store_.handle("/v3/lease/grant", R"({"TTL":"1000"})");
    return lease_ = std::to_string(int_field(parse_json(granted.body), "ID").value());
  }

  void watch(const std::string& body) {
    auto watcher = store_.watch(body);
    if (const auto* refused = std::get_if<Answer>(&watcher)) return expect_answer(*refused);
    watchers_.push_back(std::get<EmbeddedStore::Watcher>(std::move(watcher)));
  }

  EmbeddedStore store_{8};
  std::string lease_;
  std::vector<EmbeddedStore::Watcher> watchers_;
};

/// Requests with a zero between them.
void handle(const std::string& input) {
  Session session;
  for (const auto& request : split(input, '\0')) session.handle(request);
  session.end();
}

}  // namespace registry_fuzz_test
}  // namespace lockstep::elastic

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lockstep::elastic::registry_fuzz_test::handle({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef LOCKSTEP_LIBFUZZER
#include <gtest/gtest.h>

namespace lockstep::elastic {
namespace registry_fuzz_test {

using namespace std::chrono_literals;
using Kind = Request::Kind;

/// What a client sends, one by one and two at a time.
std::vector<std::string> corpus() {
  const int64_t lease = std::stoll(kLease);
  std::vector<std::string> all;
  const auto add = [&](const Request& request) {
    const EtcdMessage message = message_of(request);
    all.push_back(message.path + "\n" + message.body);
  };
  for (const char* key : {"a", "b/c"}) {
    add({.kind = Kind::list, .key = key});
    all.push_back("/v3/watch\n" + watch_message(key, 1, 2) + watch_message(key, 2, 0));
    add({.kind = Kind::put, .key = key, .value = "value", .lease = lease});
    add({.kind = Kind::put, .key = key, .value = "value"});
    add({.kind = Kind::put, .key = key, .value = "value", .expected = 0});
    add({.kind = Kind::put, .key = key, .value = "value", .expected = 3, .lease = lease});
  }
  add({.kind = Kind::grant_lease, .ttl = 1s});
  add({.kind = Kind::keep_lease, .lease = lease});
  add({.kind = Kind::revoke_lease, .lease = lease});
  for (size_t i = all.size() - 1; i > 0; --i) all.push_back(all[i - 1] + '\0' + all[i]);
  // What a server answers, which `handle` reads as a client does.
  all.emplace_back(R"(/v3/kv/range
{"header":{"revision":"5"},"succeeded":false,"ID":"3","TTL":"2","kvs":[{"key":"YQ==","value":"YQ==",
"mod_revision":"4","lease":"2"}],"responses":[{"response_range":{"kvs":[{"key":"YQ=="}]}}],
"result":{"header":{"revision":"5"},"ID":"3","TTL":"2"}})");
  return all;
}

/// One to four changes: a bit, a byte, a cut, a doubled or removed piece, a piece of another.
std::string damaged(std::string text, const std::vector<std::string>& others, KeyedRandom& random) {
  for (uint64_t i = 1 + random.below(4); i > 0 && !text.empty(); --i) {
    const size_t at = random.below(text.size());
    const size_t length = std::min<size_t>(1 + random.below(16), text.size() - at);
    const std::string& other = others[random.below(others.size())];
    switch (random.below(7)) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
        break;
      case 1:
        text[at] = static_cast<char>(random.below(256));
        break;
      case 2:
        text.resize(at);
        break;
      case 3:
        text.insert(at, text.substr(at, length));
        break;
      case 4:
        text.erase(at, length);
        break;
      case 5:
        text.insert(at, other.substr(random.below(other.size()), length));
        break;
      default:
        text.replace(at, length, "9223372036854775807");
    }
  }
  return text;
}

class RegistryFuzz : public testing::Test {
 protected:
  RegistryFuzz()
      : seed_(
            static_cast<uint64_t>(env_int("LOCKSTEP_TEST_SEED").value_or(std::random_device{}()))) {
    std::printf("seed %llu (set LOCKSTEP_TEST_SEED to repeat)\n",
                static_cast<unsigned long long>(seed_));
  }
  uint64_t seed_;
};

TEST_F(RegistryFuzz, EachRequestGetsAnAnswer) {
  testing::internal::CaptureStderr();  // The checker's warnings.
  const auto whole = corpus();
  for (const std::string& text : whole) handle(text);
  if (const auto folder = env_string("LOCKSTEP_FUZZ_CORPUS")) {
    for (size_t i = 0; i < whole.size(); ++i)
      write_file_atomically(*folder + "/" + std::to_string(i), whole[i]);
  }
  const auto end = std::chrono::steady_clock::now() + 4s;
  uint64_t rounds = 0;
  for (; std::chrono::steady_clock::now() < end; ++rounds) {
    KeyedRandom random(seed_, rounds);
    handle(damaged(whole[random.below(whole.size())], whole, random));
  }
  testing::internal::GetCapturedStderr();
  std::printf("%llu requests\n", static_cast<unsigned long long>(rounds));
  EXPECT_GT(rounds, 1000U);
}

TEST_F(RegistryFuzz, AnyBytesMayComeOverAConnection) {
  const auto server =
      serve_registry({.host = "127.0.0.1", .most_bytes = 10'000, .idle_limit = 50ms});
  const auto whole = corpus();
  std::vector<std::string> requests;
  for (const std::string& text : whole) {
    const size_t end = text.find('\n');
    const std::string body = text.substr(end + 1);
    requests.push_back("POST " + text.substr(0, end) +
                       " HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
                       std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  for (uint64_t round = 0; round < 500; ++round) {
    KeyedRandom random(seed_, round);
    const UniqueFd client = connect_to("127.0.0.1", server.port, 30s);
    const std::string text = damaged(requests[random.below(requests.size())], requests, random);
    (void)::send(client.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  const UniqueFd client = connect_to("127.0.0.1", server.port, 30s);
  ASSERT_GT(::send(client.get(), requests[0].data(), requests[0].size(), MSG_NOSIGNAL), 0);
  char status[12] = {};
  pollfd entry{client.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 30'000), 1);
  ASSERT_EQ(::recv(client.get(), status, sizeof status, 0), 12);
  EXPECT_EQ(std::string(status, sizeof status), "HTTP/1.1 200");
}

}  // namespace registry_fuzz_test
}  // namespace lockstep::elastic
#endif
