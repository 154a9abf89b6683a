#include "lockstep/elastic/proof.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/elastic/embedded_registry.h"
#include "lockstep/elastic/etcd_registry.h"
#include "tests/support/calling_registry.h"

namespace lockstep::elastic {
namespace proof_test {

using namespace std::chrono_literals;
using Kind = Request::Kind;
using ErrorKind = RegistryError::Kind;

constexpr char kToken[] = "0123456789abcdef";
constexpr char kOther[] = "fedcba9876543210";

TEST(Token, ItsFileIsOnlyItsOwners) {
  const TemporaryDirectory folder;
  const auto path = folder.path() / "token";
  write_file_atomically(path, std::string(" ") + kToken + "\n");
  for (const mode_t mode : {0644, 0640, 0620, 0604, 0700, 0660}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_THROW(read_token(path, "NONE"), UsageError) << std::oct << mode;
  }
  for (const mode_t mode : {0600, 0400}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_EQ(read_token(path, "NONE"), kToken);
  }
  EXPECT_THROW(read_token(folder.path(), "NONE"), UsageError);
  EXPECT_THROW(read_token(folder.path() / "none", "NONE"), SystemError);
}

TEST(Token, AVariableMayHoldIt) {
  const std::string name = "LOCKSTEP_TEST_TOKEN";
  ::unsetenv(name.c_str());
  EXPECT_EQ(read_token("", name), std::nullopt);
  ::setenv(name.c_str(), kToken, 1);
  EXPECT_EQ(read_token("", name), kToken);
  for (const char* poor : {"short", " \n"}) {
    ::setenv(name.c_str(), poor, 1);
    EXPECT_THROW(read_token("", name), UsageError);
  }
  ::unsetenv(name.c_str());
}

class Proof : public testing::Test {
 protected:
  bool takes(const std::string& path, const std::string& sealed) {
    return checker_.open(path, sealed, "a test").has_value();
  }

  ProofChecker checker_{kToken};
  ProofSession session_{kToken, checker_.nonce()};
  AnswerSeal seal_;
};

TEST_F(Proof, ARequestIsTakenOnceAsItWasSent) {
  const std::string first = session_.seal("/a", "{}", seal_),
                    second = session_.seal("/a", "", seal_);
  EXPECT_EQ(checker_.open("/a", second, "a test")->text, "") << "in any order";
  EXPECT_EQ(checker_.open("/a", first, "a test")->text, "{}");
  EXPECT_FALSE(takes("/a", first));
  EXPECT_FALSE(takes("/a", second));
}

TEST_F(Proof, WhatIsMissingWrongOrChangedIsRefused) {
  EXPECT_FALSE(takes("/a", ""));
  EXPECT_FALSE(takes("/a", "{}"));
  EXPECT_FALSE(takes("/a", "{}\t\t\t"));
  const std::string sealed = session_.seal("/a", "{}", seal_);
  EXPECT_FALSE(takes("/b", sealed));
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::string changed = sealed;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(takes("/a", changed)) << i;
  }
  EXPECT_FALSE(takes("/a", sealed + "\t"));
  EXPECT_FALSE(takes("/a", ProofSession(kOther, checker_.nonce()).seal("/a", "{}", seal_)));
  const ProofChecker before(kToken);
  EXPECT_FALSE(takes("/a", ProofSession(kToken, before.nonce()).seal("/a", "{}", seal_)))
      << "of a server before this one";
  EXPECT_TRUE(takes("/a", sealed));
}

TEST_F(Proof, AnAnswerCountsOnlyForItsRequestAndPlace) {
  const std::string sealed = session_.seal("/a", "{}", seal_);
  const AnswerSeal server = checker_.open("/a", sealed, "a test")->answer;
  const std::string line = server.seal(200, 1, "x");
  EXPECT_EQ(seal_.open(200, 1, line), "x");
  EXPECT_EQ(seal_.open(200, 0, line), std::nullopt);
  EXPECT_EQ(seal_.open(404, 1, line), std::nullopt);
  EXPECT_EQ(seal_.open(200, 1, "y" + line.substr(1)), std::nullopt);
  EXPECT_EQ(seal_.open(200, 1, "x"), std::nullopt);
  EXPECT_EQ(seal_.open(200, 1, ""), std::nullopt);
  AnswerSeal next;
  session_.seal("/a", "{}", next);
  EXPECT_EQ(next.open(200, 1, line), std::nullopt);
}

TEST_F(Proof, RefusalsAreLoggedNowAndThen) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 100; ++i) takes("/a", "{}");
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1);
  EXPECT_THAT(log, testing::HasSubstr("a test"));
}

/// How a client's read fails; none when it is carried out.
std::optional<ErrorKind> failure_with(int port, const std::string& token) {
  const auto client =
      call_registry({.endpoints = {"http://127.0.0.1:" + std::to_string(port)}, .token = token});
  const uint64_t watch = client->watch("x");
  std::optional<ErrorKind> failure;
  try {
    client->call({.kind = Kind::list, .key = "x"});
  } catch (const RegistryError& error) {
    failure = error.kind();
  }
  const auto event = client->next_event(30s);
  if (!event) throw std::runtime_error("the watch says nothing");
  const auto& change = std::get<Change>(*event);
  EXPECT_EQ(change.watch, watch);
  EXPECT_EQ(change.error.has_value(), failure.has_value());
  return failure;
}

TEST(ProofOfServers, OneWithAnotherTokenOrNoneIsRefusedAndRefuses) {
  const auto secret = serve_registry({.host = "127.0.0.1", .token = kToken});
  const auto open = serve_registry({.host = "127.0.0.1"});
  EXPECT_EQ(failure_with(secret.port, kToken), std::nullopt);
  EXPECT_EQ(failure_with(secret.port, kOther), ErrorKind::refused);
  EXPECT_EQ(failure_with(secret.port, ""), ErrorKind::refused);
  EXPECT_EQ(failure_with(open.port, kToken), ErrorKind::refused);
  EXPECT_EQ(failure_with(open.port, ""), std::nullopt);
}

TEST(ProofOfServers, AFalseServersAnswersDoNotCount) {
  httplib::Server server;
  server.Post(".*", [](const httplib::Request& request, httplib::Response& response) {
    const bool nonce = request.path == kNoncePath;
    response.set_content(nonce ? R"({"nonce":"0123"})" : R"({"header":{"revision":"1"}})",
                         "application/json");
  });
  const int port = server.bind_to_any_port("127.0.0.1");
  std::thread thread([&] { server.listen_after_bind(); });
  EXPECT_EQ(failure_with(port, ""), std::nullopt);
  EXPECT_EQ(failure_with(port, kToken), ErrorKind::refused);
  server.stop();
  thread.join();
}

TEST(ProofOfServers, ARequestThatWasOverheardCannotBeSentAgain) {
  const auto server = serve_registry({.host = "127.0.0.1", .token = kToken});
  httplib::Client client("127.0.0.1", server.port);
  const auto post = [&](const std::string& path, const std::string& body) {
    return client.Post(path, body, "application/json");
  };
  const auto told = post(kNoncePath, "{}");
  ProofSession session(kToken, parse_json(told->body).at("nonce"));
  AnswerSeal seal;
  const std::string put = session.seal("/v3/kv/put", R"({"key":"eA=="})", seal);
  const auto done = post("/v3/kv/put", put);
  EXPECT_EQ(done->status, 200);
  EXPECT_TRUE(seal.open(200, 0, done->body));
  EXPECT_EQ(post("/v3/kv/put", put)->status, 401);
  const std::string watch = session.seal("/v3/watch", "{}", seal);
  EXPECT_EQ(post("/v3/watch", watch)->status, 400);
  EXPECT_EQ(post("/v3/watch", watch)->status, 401);
  EXPECT_EQ(post("/v3/watch", "{}")->status, 401);
}

}  // namespace proof_test
}  // namespace lockstep::elastic
