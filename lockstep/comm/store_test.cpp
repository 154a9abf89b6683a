#include "lockstep/comm/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/socket.h"
#include "lockstep/comm/checks/limited_tcp_store.h"
#include "tests/support/message_of.h"

namespace lockstep {
namespace store_test {

using std::chrono::milliseconds;
using test::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Store new_tcp_store() {
  TcpStoreOptions options;
  options.is_listener = true;
  return tcp_store(options);
}

/// Every kind of store behaves alike.
class EveryStore : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string kind = GetParam();
    if (kind == "tcp") {
      store_ = new_tcp_store();
    } else if (kind == "file") {
      store_ = file_store(folder_.path() / "store");
    } else if (kind == "hash") {
      store_ = hash_store();
    } else {
      store_ = prefix_store("p", prefix_store("q/", hash_store()));
    }
  }
  TemporaryDirectory folder_;
  Store store_;
};

TEST_P(EveryStore, SetsAndGets) {
  store_.set("key", "value");
  EXPECT_EQ(store_.get("key"), "value");
  store_.set("key", std::string("a\0b", 3));
  EXPECT_EQ(store_.get("key"), std::string("a\0b", 3));
  store_.set("other", "2");
  EXPECT_THAT(store_.multi_get({"other", "key"}), ElementsAre("2", std::string("a\0b", 3)));
}

TEST_P(EveryStore, Adds) {
  EXPECT_EQ(store_.add("count", 2), 2);
  EXPECT_EQ(store_.add("count", -3), -1);
  EXPECT_EQ(store_.get("count"), "-1");
}

TEST_P(EveryStore, ComparesAndSets) {
  EXPECT_EQ(store_.compare_set("lock", "", "first"), "first");
  EXPECT_EQ(store_.compare_set("lock", "", "second"), "first");
  EXPECT_EQ(store_.compare_set("lock", "first", "third"), "third");
  EXPECT_EQ(store_.get("lock"), "third");
}

TEST_P(EveryStore, ChecksAndDeletes) {
  EXPECT_FALSE(store_.check({"a"}));
  store_.set("a", "1");
  EXPECT_TRUE(store_.check({"a"}));
  EXPECT_FALSE(store_.check({"a", "b"}));
  EXPECT_TRUE(store_.delete_key("a"));
  EXPECT_FALSE(store_.check({"a"}));
  if (std::string(GetParam()) != "file") {
    EXPECT_FALSE(store_.delete_key("never"));
  }
}

TEST_P(EveryStore, WaitsForAnotherThread) {
  std::thread setter([other = store_.clone()]() mutable {
    other.set("x", "1");
    other.set("y", "2");
  });
  store_.wait({"x", "y"}, milliseconds(20'000));
  setter.join();
  EXPECT_EQ(store_.get("y"), "2");
}

TEST_P(EveryStore, AWaitOfOneThreadDoesNotHoldUpAnother) {
  store_.set_timeout(milliseconds(10'000));
  for (const std::string key : {"got", "waited for"}) {
    std::atomic<bool> begun{false};
    std::thread waiting([&] {
      begun = true;
      EXPECT_NO_THROW(key == "got" ? static_cast<void>(store_.get(key)) : store_.wait({key}));
    });
    while (!begun) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    // So long that the other thread is surely within its wait.
    while (std::chrono::steady_clock::now() - start < milliseconds(50)) store_.set("other", "1");
    store_.set(key, "1");
    waiting.join();
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5'000));
  }
}

TEST_P(EveryStore, GivesUpAfterItsTimeout) {
  EXPECT_THAT(message_of<TimeoutError>([&] { store_.wait({"never"}, milliseconds(80)); }),
              AllOf(HasSubstr("'never'"), HasSubstr("80ms")));
  EXPECT_THROW(store_.wait({"never"}, milliseconds::max()), UsageError);
  EXPECT_THROW(store_.set_timeout(milliseconds::max()), UsageError);
  store_.set_timeout(milliseconds(60));
  EXPECT_EQ(store_.timeout(), milliseconds(60));
  EXPECT_THROW(store_.get("absent"), TimeoutError);
  store_.set("still", "works");
  EXPECT_EQ(store_.get("still"), "works");
}

TEST_P(EveryStore, KeepsALongValue) {
  std::string value((size_t{9} << 20), 'a');
  value.back() = 'z';
  store_.set("small", "1");
  const int64_t before = std::string(GetParam()) == "file" ? 0 : store_.num_keys();
  store_.set("long", value);
  EXPECT_EQ(store_.get("long"), value);
  EXPECT_THAT(store_.multi_get({"small", "long"}), ElementsAre("1", value));
  EXPECT_EQ(store_.clone().compare_set("long", "other", "short"), value);
  EXPECT_TRUE(store_.delete_key("long"));
  EXPECT_FALSE(store_.check({"long"}));
  if (before > 0) {
    EXPECT_EQ(store_.num_keys(), before);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryStore, ::testing::Values("tcp", "file", "hash", "prefix"));

TEST(PrefixStore, KeepsKeysApart) {
  Store all = hash_store();
  Store a = prefix_store("a", all), b = prefix_store("b", all);
  a.set("key", "1");
  EXPECT_FALSE(b.check({"key"}));
  EXPECT_EQ(all.get("a/key"), "1");
}

TEST(FileStore, NamesAFolderThatIsNotThere) {
  EXPECT_THROW(file_store("/no/such/folder/store"), UsageError);
}

TEST(FileStore, TheLastUserRemovesTheFile) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "store";
  Store first = file_store(path, 2);
  first.set("a", "1");
  {
    Store second = file_store(path, 2);
    EXPECT_EQ(second.get("a"), "1");
  }
  first = {};
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(TcpStore, ServesOthersUnderItsPort) {
  Store server = new_tcp_store();
  TcpStoreOptions options;
  options.port = tcp_store_port(server);
  Store client = tcp_store(options);
  client.set("a", "from the client");
  EXPECT_EQ(server.get("a"), "from the client");
  EXPECT_EQ(tcp_store_port(prefix_store("x", client)), options.port);
  EXPECT_THROW(tcp_store_port(hash_store()), UsageError);
}

TEST(TcpStore, WhatItsServerRefusesIsAUsageErrorAndItsConnectionStays) {
  Store store = prefix_store("prefix", new_tcp_store());
  const std::string longest(LimitedTcpStore::kLongestKey - 7, 'k');
  store.set(longest, "1");
  EXPECT_EQ(store.get(longest), "1");
  EXPECT_EQ(store.add(longest, 1), 2);
  const std::string longer = longest + "k";
  EXPECT_THROW(store.set(longer, "1"), UsageError);
  EXPECT_THROW(store.get(longer), UsageError);
  EXPECT_THROW(store.add(longer, 1), UsageError);
  EXPECT_THROW(store.check({longer}), UsageError);
  EXPECT_THROW(store.wait({longer}), UsageError);
  EXPECT_THROW(store.delete_key(longer), UsageError);
  const std::string most(LimitedTcpStore::kLongestValue, 'v');
  EXPECT_EQ(store.compare_set("c", "", most), most);
  EXPECT_THROW(store.compare_set("c", most, most + "v"), UsageError);
  EXPECT_THROW(store.compare_set("c", most + "v", "v"), UsageError);
  std::vector<std::string> keys(LimitedTcpStore::kMostKeys, "c");
  EXPECT_TRUE(store.check(keys));
  keys.emplace_back("c");
  EXPECT_THROW(store.check(keys), UsageError);
  EXPECT_THROW(store.wait(keys), UsageError);
  EXPECT_THROW(store.multi_get(keys), UsageError);
  EXPECT_EQ(store.get(longest), "2");
}

TEST(TcpStore, TakesOverASocketThatIsBound) {
  UniqueFd fd = listen_on("127.0.0.1", 0);
  const uint16_t port = bound_port(fd.get());
  TcpStoreOptions options;
  options.is_listener = true;
  options.listen_fd = fd.release();
  Store server = tcp_store(options);
  EXPECT_EQ(tcp_store_port(server), port);
  std::shared_ptr<void> host = std::exchange(server, {}).native();
  Store client = tcp_store({.port = port});
  client.set("a", "1");
  EXPECT_EQ(client.get("a"), "1");
  host.reset();
  EXPECT_THROW(client.get("a"), PeerLostError);
}

TEST(TcpStore, ATakenPortIsNamed) {
  const UniqueFd holder = listen_on("127.0.0.1", 0);
  TcpStoreOptions options;
  options.is_listener = true;
  options.port = bound_port(holder.get());
  const std::string text = message_of<CommError>([&] { tcp_store(options); });
  EXPECT_THAT(text, HasSubstr("127.0.0.1:" + std::to_string(options.port) + ": the port is taken"));
}

TEST(TcpStore, NobodyAnswersWithinTheTimeout) {
  TcpStoreOptions options;
  {
    const UniqueFd free = listen_on("127.0.0.1", 0);
    options.port = bound_port(free.get());
  }
  options.timeout = milliseconds(150);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(tcp_store(options), TimeoutError);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5'000));
}

TEST(TcpStore, AnAddressThatDoesNotResolveIsNamed) {
  TcpStoreOptions options;
  options.host = "no-such-host.invalid";
  options.port = 1234;
  options.timeout = milliseconds(300);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(tcp_store(options), CommError);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10'000));
}

TEST(TcpStore, WaitsForAListenerThatComesLater) {
  UniqueFd fd = listen_on("127.0.0.1", 0);
  TcpStoreOptions options;
  options.port = bound_port(fd.get());
  fd.reset();  // The port is free again, and nobody listens.
  options.timeout = milliseconds(20'000);
  Store client;
  std::thread connecting([&] { client = tcp_store(options); });
  TcpStoreOptions listening = options;
  listening.is_listener = true;
  Store server = tcp_store(listening);
  server.set("a", "1");
  connecting.join();
  EXPECT_EQ(client.get("a"), "1");
}

TEST(Store, AnEmptyHandleIsRefused) {
  Store store;
  EXPECT_THROW(store.set("a", "b"), UsageError);
}

}  // namespace store_test
}  // namespace lockstep
