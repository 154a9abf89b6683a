#include "tests/support/run_group.h"

#include <numeric>

namespace lockstep::test {

std::shared_ptr<GroupContext> test_context(int rank, int size, const RankOptions& options) {
  auto context = std::make_shared<GroupContext>();
  context->store = prefix_store("default_pg", options.store);
  context->own_store = prefix_store("lockstep/0", options.store);
  context->rank = rank;
  context->world_size = size;
  context->backend = options.backend;
  context->address = "127.0.0.1";
  if (!options.hosts.empty()) context->host = options.hosts.substr(static_cast<size_t>(rank), 1);
  context->timeout = options.timeout;
  context->debug = options.debug;
  return context;
}

void run_group(int size, const std::function<void(ProcessGroup)>& body, RankOptions options) {
  if (!options.store) options.store = hash_store();
  options.store.set_timeout(options.timeout);
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  rethrow_first(run_ranks(size, [&](int rank) {
    RankOptions mine = options;
    mine.store = options.store.clone();  // A TCP store's connection carries one request at a time.
    auto impl = form_group(test_context(rank, size, mine), "0", ranks, mine.backend);
    body(ProcessGroup(impl));
    impl->close(false);
  }));
}

}  // namespace lockstep::test
