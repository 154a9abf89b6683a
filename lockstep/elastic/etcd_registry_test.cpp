#include "lockstep/elastic/etcd_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "lockstep/base/text.h"
#include "tests/support/calling_registry.h"
#include "tests/support/etcd_servers.h"
#include "tests/support/test_wait.h"

// What only etcd has: members that fail, TLS, users.
namespace lockstep::elastic {
namespace etcd_registry_test {

using namespace std::chrono_literals;
using test_wait::wait_until;
using Kind = Request::Kind;
using Outcome = Reply::Outcome;
using ErrorKind = RegistryError::Kind;

constexpr auto kLimit = 60s;

/// Kind of the failure of a request; none when it is done.
std::optional<ErrorKind> failure_of(CallingRegistry& registry, Request request) {
  try {
    registry.call(std::move(request));
    return std::nullopt;
  } catch (const RegistryError& error) {
    std::printf("%s\n", error.what());
    return error.kind();
  }
}

void put(CallingRegistry& registry, const std::string& key, const std::string& value) {
  ASSERT_EQ(registry.call({.kind = Kind::put, .key = key, .value = value}).outcome, Outcome::done);
}

/// Follows a watch of "count": each value that it saw.
class Follower {
 public:
  explicit Follower(Registry& registry) : registry_(registry) { registry_.watch("count"); }
  /// Until this value was seen. Throws when it does not come.
  void follow_to(const std::string& last) {
    while (seen_.empty() || seen_.back() != last) {
      const auto event = registry_.next_event(kLimit);
      if (!event) throw std::runtime_error("no change came; expected up to " + last);
      const auto* change = std::get_if<Change>(&*event);
      if (!change) continue;
      if (change->error) throw *change->error;
      wholes_ += change->whole ? 1 : 0;
      for (const Record& record : change->written) seen_.push_back(record.value);
    }
  }
  const std::vector<std::string>& seen() const { return seen_; }
  int wholes() const { return wholes_; }

 private:
  Registry& registry_;
  std::vector<std::string> seen_;
  int wholes_ = 0;
};

std::vector<std::string> numbers(int first, int last) {
  std::vector<std::string> all;
  for (int i = first; i <= last; ++i) all.push_back(std::to_string(i));
  return all;
}

/// By etcd's gateway itself, which its own tool may not be beside.
class Administrator {
 public:
  explicit Administrator(std::string endpoint) : endpoint_(std::move(endpoint)) {}
  void post(const std::string& path, const std::string& body) const {
    const std::string command =
        "curl -sSf " + endpoint_ + "/v3/" + path + " -d '" + body + "' >/dev/null";
    wait_until([&] { return std::system(command.c_str()) == 0; }, path.c_str());
  }

 private:
  const std::string endpoint_;
};

class EtcdFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (!test_etcd::is_there()) GTEST_SKIP() << "etcd is not installed";
  }
  void start(size_t members = 3) {
    cluster_ = std::make_unique<test_etcd::Cluster>(members);
    options_ = {
        .endpoints = cluster_->endpoints(), .request_timeout = kLimit, .try_timeout = 500ms};
    writer_ = call_registry(options_);
    reader_ = call_registry(options_);
    count(0, 0);
  }
  /// By compare and set: so a value that is tried again is not written twice.
  void count(int first, int last) {
    for (int i = first; i <= last; ++i) {
      const Reply reply = writer_->call(
          {.kind = Kind::put, .key = "count", .value = std::to_string(i), .expected = revision_});
      ASSERT_EQ(reply.outcome, Outcome::done);
      revision_ = reply.records.at(0).revision;
    }
  }

  EtcdRegistryOptions options_;
  std::unique_ptr<test_etcd::Cluster> cluster_;
  std::unique_ptr<CallingRegistry> writer_, reader_;
  int64_t revision_ = 0;  ///< Of "count".
};

TEST_F(EtcdFaults, NobodyNoticesThatAMemberIsKilledOrStopped) {
  start();
  Follower follower(*reader_);
  follower.follow_to("0");
  const int64_t lease =
      writer_->call({.kind = Kind::grant_lease, .ttl = std::chrono::seconds(10)}).lease;
  int last = 0;
  for (size_t member = 0; member < cluster_->size(); ++member) {
    cluster_->signal(member, SIGSTOP);  // its connections stay
    count(last + 1, last + 5);
    last += 5;
    // The reader asks as well, as agents do; so it sees that the server of its stream is silent.
    EXPECT_EQ(failure_of(*reader_, {.kind = Kind::list, .key = "count"}), std::nullopt);
    follower.follow_to(std::to_string(last));
    cluster_->kill(member);
    count(last + 1, last + 5);
    last += 5;
    follower.follow_to(std::to_string(last));
    EXPECT_EQ(writer_->call({.kind = Kind::keep_lease, .lease = lease}).outcome, Outcome::done);
    cluster_->start(member);
  }
  EXPECT_EQ(follower.seen(), numbers(0, last));
  EXPECT_EQ(follower.wholes(), 1);
}

TEST_F(EtcdFaults, AllGoesOnAfterAllMembersWereAway) {
  start();
  Follower follower(*reader_);
  follower.follow_to("0");
  for (size_t i = 0; i < cluster_->size(); ++i) cluster_->kill(i);
  EXPECT_EQ(failure_of(*writer_, {.kind = Kind::list, .key = "count", .timeout = 1s}),
            ErrorKind::unreachable);
  writer_->submit({.kind = Kind::put, .key = "count", .value = "1", .expected = revision_});
  EXPECT_FALSE(writer_->next_event(300ms)) << "it is still tried";
  for (size_t i = 0; i < cluster_->size(); ++i) cluster_->start(i);
  const auto event = writer_->next_event(kLimit);
  ASSERT_TRUE(event);
  EXPECT_EQ(std::get<Reply>(*event).outcome, Outcome::done);
  revision_ = std::get<Reply>(*event).records.at(0).revision;
  count(2, 5);
  follower.follow_to("5");
  EXPECT_EQ(follower.seen(), numbers(0, 5));
  EXPECT_EQ(follower.wholes(), 1);
}

TEST_F(EtcdFaults, AWatchListsAnewWhereItsChangesAreNoLongerKept) {
  start();
  options_.endpoints = {cluster_->endpoint(0)};
  const auto far = call_registry(options_);
  Follower follower(*far);
  follower.follow_to("0");
  cluster_->kill(0);
  count(1, 3);
  Administrator(cluster_->endpoint(1))
      .post("kv/compaction", "{\"revision\":\"" + std::to_string(revision_) + "\"}");
  cluster_->start(0);
  count(4, 5);
  follower.follow_to("5");
  EXPECT_EQ(follower.wholes(), 2);
  EXPECT_EQ(follower.seen().at(0), "0");
  EXPECT_NE(follower.seen().at(1), "1") << "forgotten";
}

std::string make_certificates(const std::filesystem::path& folder) {
  const std::string in = "cd " + folder.string() + " && ";
  const std::string text = R"(
    set -e
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem
    for name in server client; do
      openssl req -newkey rsa:2048 -nodes -subj /CN=$name -keyout $name.key -out $name.csr
      printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth' > $name.ext
      openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
        -extfile $name.ext -out $name.pem
    done
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other -keyout o.key -out other.pem)";
  if (std::system(("(" + in + text + ") >/dev/null 2>&1").c_str()) != 0)
    throw std::runtime_error("openssl makes no certificates");
  return folder.string() + "/";
}

TEST(EtcdTls, ServerAndClientShowCertificates) {
  if (!test_etcd::is_there()) GTEST_SKIP() << "etcd is not installed";
  const TemporaryDirectory folder;
  const std::string files = make_certificates(folder.path());
  const test_etcd::Cluster cluster(
      1,
      {"--cert-file", files + "server.pem", "--key-file", files + "server.key",
       "--client-cert-auth", "--trusted-ca-file", files + "ca.pem"},
      "https");
  const EtcdRegistryOptions right{.endpoints = cluster.endpoints(),
                                  .ca_file = files + "ca.pem",
                                  .certificate = files + "client.pem",
                                  .key = files + "client.key",
                                  .request_timeout = kLimit};
  const auto registry = call_registry(right);
  put(*registry, "count", "1");
  Follower(*registry).follow_to("1");

  EtcdRegistryOptions other_authority = right;
  other_authority.ca_file = files + "other.pem";
  const auto wrong = call_registry(other_authority);
  EXPECT_EQ(failure_of(*wrong, {.kind = Kind::list, .key = "count"}), ErrorKind::refused);

  EtcdRegistryOptions no_certificate = right;
  no_certificate.certificate = no_certificate.key = "";
  const auto without = call_registry(no_certificate);
  EXPECT_NE(failure_of(*without, {.kind = Kind::list, .key = "count", .timeout = 1s}),
            std::nullopt);
}

TEST(EtcdUsers, ThePasswordCountsAndATokenIsRenewed) {
  if (!test_etcd::is_there()) GTEST_SKIP() << "etcd is not installed";
  test_etcd::Cluster cluster(1);
  const Administrator administrator(cluster.endpoint(0));
  administrator.post("auth/user/add", R"({"name":"root","password":"r"})");
  administrator.post("auth/user/grant", R"({"user":"root","role":"root"})");
  administrator.post("auth/user/add", R"({"name":"agent","password":"a"})");
  administrator.post("auth/role/add", R"({"name":"agents"})");
  // From "a" to "d": "count" and what is before it.
  administrator.post(
      "auth/role/grant",
      R"({"name":"agents","perm":{"permType":"READWRITE","key":"YQ==","range_end":"ZA=="}})");
  administrator.post("auth/user/grant", R"({"user":"agent","role":"agents"})");
  administrator.post("auth/enable", "{}");

  EtcdRegistryOptions options{.endpoints = cluster.endpoints(),
                              .user = "agent",
                              .password = "a",
                              .request_timeout = kLimit};
  const auto registry = call_registry(options);
  put(*registry, "count", "1");
  const auto reader = call_registry(options);
  Follower follower(*reader);
  follower.follow_to("1");
  EXPECT_EQ(failure_of(*registry, {.kind = Kind::list, .key = "x"}), ErrorKind::refused)
      << "no permission";
  cluster.kill(0);  // it forgets the tokens
  cluster.start(0);
  put(*registry, "count", "2");
  follower.follow_to("2");

  options.password = "b";
  const auto wrong = call_registry(options);
  EXPECT_EQ(failure_of(*wrong, {.kind = Kind::list, .key = "count"}), ErrorKind::refused);
  options.user = options.password = "";
  const auto nobody = call_registry(options);
  EXPECT_TRUE(failure_of(*nobody, {.kind = Kind::list, .key = "count"}));

  const auto forbidden =
      call_registry({.endpoints = cluster.endpoints(), .user = "agent", .password = "a"});
  const uint64_t watch = forbidden->watch("x");
  const auto event = forbidden->next_event(kLimit);
  ASSERT_TRUE(event);
  const auto& change = std::get<Change>(*event);
  EXPECT_EQ(change.watch, watch);
  ASSERT_TRUE(change.error);
  EXPECT_EQ(change.error->kind(), ErrorKind::refused);
}

}  // namespace etcd_registry_test
}  // namespace lockstep::elastic
