#include "tests/support/test_ranks.h"

#include <numeric>
#include <thread>

namespace lockstep::testing {

std::shared_ptr<GroupContext> test_context(int rank, int size, const RankOptions& options) {
  auto context = std::make_shared<GroupContext>();
  context->store = prefix_store("default_pg", options.store);
  context->own_store = prefix_store("lockstep/0", options.store);
  context->rank = rank;
  context->world_size = size;
  context->backend = options.backend;
  context->address = "127.0.0.1";
  context->timeout = options.timeout;
  context->debug = options.debug;
  return context;
}

void run_ranks(int size, const std::function<void(ProcessGroup)>& body,
               const RankOptions& options) {
  RankOptions used = options;
  if (!used.store) used.store = hash_store();
  used.store.set_timeout(used.timeout);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        RankOptions mine = used;
        mine.store = used.store.clone();  // A TCP store's connection carries one request at a time.
        auto impl = form_group(test_context(rank, size, mine), "0", ranks, mine.backend);
        body(ProcessGroup(impl));
        impl->close(false);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace lockstep::testing
