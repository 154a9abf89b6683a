#include "lockstep/base/arrival.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

namespace lockstep {
namespace arrival_test {

std::vector<std::string> keys_of(size_t count) {
  std::vector<std::string> keys;
  for (size_t i = 0; i < count; ++i) keys.push_back(std::to_string(i));
  return keys;
}

/// A store that counts what it is asked.
struct Asked {
  std::set<std::string> there;
  size_t questions = 0, keys = 0;

  bool operator()(const std::vector<std::string>& wanted) {
    ++questions;
    keys += wanted.size();
    return std::all_of(wanted.begin(), wanted.end(),
                       [&](const std::string& key) { return there.contains(key); });
  }
};

TEST(Arrival, NothingIsCompleteWithoutAQuestion) {
  Asked store;
  EXPECT_TRUE(Arrival({}).complete(std::ref(store)));
  EXPECT_EQ(store.questions, 0U);
}

TEST(Arrival, KeysThatAreThereTakeFewQuestions) {
  Asked store;
  for (const auto& key : keys_of(1000)) store.there.insert(key);
  EXPECT_TRUE(Arrival(keys_of(1000)).complete(std::ref(store)));
  EXPECT_EQ(store.keys, 1000U);
  EXPECT_LE(store.questions, 10U);
}

TEST(Arrival, WhileOneIsMissingOnlyThatOneIsAskedFor) {
  Asked store;
  for (const auto& key : keys_of(1000)) store.there.insert(key);
  store.there.erase("600");
  Arrival arrival(keys_of(1000));
  EXPECT_FALSE(arrival.complete(std::ref(store)));
  EXPECT_EQ(arrival.seen(), 600U);
  EXPECT_LE(store.keys, 3000U);
  store.keys = 0;
  EXPECT_FALSE(arrival.complete(std::ref(store)));
  EXPECT_EQ(store.keys, 1U);
  store.there.insert("600");
  EXPECT_TRUE(arrival.complete(std::ref(store)));
  EXPECT_EQ(arrival.seen(), 1000U);
}

TEST(Arrival, InAnyOrderTheKeysSentGrowWithTheirNumber) {
  constexpr size_t kCount = 256;
  Asked store;
  Arrival arrival(keys_of(kCount));
  for (size_t i = 0; i < kCount; ++i) {
    EXPECT_FALSE(arrival.complete(std::ref(store)));
    store.there.insert(std::to_string((i * 77 + 5) % kCount));
  }
  EXPECT_TRUE(arrival.complete(std::ref(store)));
  EXPECT_LE(store.keys, 5 * kCount);
}

}  // namespace arrival_test
}  // namespace lockstep
