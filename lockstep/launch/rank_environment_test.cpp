#include "lockstep/launch/rank_environment.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace rank_environment_test {

std::string bound_address(int nodes, const std::string& master, const Resolver& resolve) {
  RankLayout layout;
  layout.nodes = nodes;
  layout.master_addr = master;
  const UniqueFd listener = listen_for_ranks(layout, resolve);
  EXPECT_EQ(layout.master_port, bound_port(listener.get()));
  return numeric_text(local_name(listener.get()));
}

/// What Debian's /etc/hosts says of the host's own name.
std::vector<ResolvedAddress> debians_own_name(const std::string&) {
  return resolve_host("127.0.1.1", std::chrono::milliseconds(0));
}

TEST(ListenForRanks, OtherHostsReachANameThatIsLoopbackHere) {
  const std::string address = bound_address(2, "own-name", debians_own_name);
  EXPECT_TRUE(address == "::" || address == "0.0.0.0") << address;
  EXPECT_EQ(bound_address(1, "own-name", debians_own_name), "127.0.1.1");
}

TEST(ListenForRanks, AMistypedNameIsTold) {
  const Resolver unknown = [](const std::string& host) -> std::vector<ResolvedAddress> {
    throw CommError("cannot resolve the address '" + host + "'");
  };
  for (const int nodes : {1, 2}) EXPECT_THROW(bound_address(nodes, "hots0", unknown), CommError);
}

}  // namespace rank_environment_test
}  // namespace lockstep::launch
