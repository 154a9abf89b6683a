// A worker's handler, to which messages are given as if they had come.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rref_impl.h>
#include <torch/csrc/distributed/rpc/script_call.h>

#include <atomic>

#include "lockstep/rpc/call_runner.h"
#include "lockstep/rpc/guarded_agent.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/run_workers.h"

namespace lockstep::rpc::detail {
namespace request_handler_test {

namespace native = torch::distributed::rpc;

std::atomic<int> sums = 0;
const auto add_two = function("handler.add", [](int64_t a, int64_t b) {
  ++sums;
  return a + b;
});

MessagePtr message_of(std::vector<at::IValue> arguments) {
  return native::ScriptCall(c10::QualifiedName("lockstep"),
                            packed_call(add_two.signature(), std::move(arguments)))
      .toMessage();
}

struct Served {
  explicit Served(const std::string& secret)
      : guard(std::make_shared<Guard>(0, secret, "job")),
        handler(make_request_handler(std::make_shared<CallRunner>("w0"), guard, threads,
                                     /*on_transport=*/8)) {}

  bool refuses(const MessagePtr& message) const {
    const auto answer = (*handler)(*message, {});
    return answer->completed() && answer->hasError();
  }
  MessagePtr sealed() const {
    return guard->seal.close(message_of({1, 2}), 0, guard->seal.next_number());
  }

  HandlerThreads threads{4};
  std::shared_ptr<Guard> guard;
  std::unique_ptr<native::RequestCallback> handler;
};

TEST(RequestHandler, WithoutTheSecretNoFunctionRuns) {
  test::run_workers(1, [](Agent&, int) {
    const Served served("a secret of 16 letters"), other("another one of 16 letters"), none("");
    EXPECT_TRUE(served.refuses(other.sealed()));
    EXPECT_TRUE(served.refuses(none.sealed()));
    EXPECT_TRUE(served.refuses(message_of({1, 2})));
    for (size_t i = 0; i < served.sealed()->payload().size(); ++i) {
      const auto changed = served.sealed();
      changed->payload()[i] ^= 1;
      EXPECT_TRUE(served.refuses(changed)) << i;
    }
    EXPECT_EQ(sums, 0);
    const auto good = served.sealed();
    const auto again = c10::make_intrusive<native::Message>(
        std::vector<char>(good->payload()), std::vector<at::Tensor>(), good->type(), 1);
    EXPECT_FALSE(served.refuses(good));
    EXPECT_EQ(sums, 1);
    EXPECT_TRUE(served.refuses(again)) << "the same message twice";
    EXPECT_EQ(sums, 1);
  });
}

TEST(References, AreFoundInAMessage) {
  test::run_workers(1, [](Agent&, int) {
    const auto first = RRef<int>::own(1), second = RRef<int>::own(2);
    const auto message =
        message_of({-7, int64_t{1} << 40, 70'000, 2.5, "rref", make_tuple({first.native(), "Any"}),
                    at::IValue(), first.native(), true, second.native()});
    const auto found = references_in(*message);
    ASSERT_EQ(found.size(), 2);  // One that comes twice is one fork.
    const auto id_of = [](const RRef<int>& reference) {
      return c10::static_intrusive_pointer_cast<native::RRef>(reference.native())->rrefId();
    };
    EXPECT_EQ(found[0].reference, id_of(first));
    EXPECT_EQ(found[1].reference, id_of(second));
    for (const auto& one : found) EXPECT_EQ(one.owner, 0);
    EXPECT_FALSE(found[0].fork == found[1].fork);
    ReferenceHolders(0).take_back(found);  // Nobody gets the message.
  });
}

}  // namespace request_handler_test
}  // namespace lockstep::rpc::detail
