// What a worker does with bytes that no worker of ours sends.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/autograd/rpc_messages/cleanup_autograd_context_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/propagate_gradients_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rpc_with_autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_req.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <atomic>
#include <bit>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/call_runner.h"
#include "lockstep/rpc/guarded_agent.h"
#include "lockstep/rpc/handler_threads.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/wire_call.h"
#include "tests/support/run_workers.h"

namespace lockstep::rpc::detail {
namespace message_fuzz_test {

namespace native = torch::distributed::rpc;
namespace autograd = torch::distributed::autograd;
using ::testing::HasSubstr;
using Random = std::mt19937_64;

constexpr PickleLimits kLimits{1 << 20, 8, 2};

std::atomic<int> sums = 0;
const auto add_two = function("fuzz.add", [](int64_t a, int64_t b) {
  ++sums;
  return a + b;
});

const Promise<int> gate;
const auto at_gate = function("fuzz.gate", [] { return gate.future(); });

/// LOCKSTEP_FUZZ_SEED repeats a run.
uint64_t fuzz_seed() {
  const auto given = env_string("LOCKSTEP_FUZZ_SEED");
  const uint64_t seed = given ? std::stoull(*given) : std::random_device{}();
  std::printf("LOCKSTEP_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  return seed;
}

uint64_t below(Random& random, uint64_t limit) {
  return random() % limit;
}

std::string pickled(const at::IValue& value, std::vector<at::Tensor>& tensors) {
  const auto bytes = torch::jit::pickle(value, &tensors);
  return {bytes.begin(), bytes.end()};
}

std::string refusal(const std::string& bytes, const PickleLimits& limits = kLimits) {
  try {
    check_pickle(bytes, limits);
  } catch (const DataError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(PickleCheck, AcceptsWhatRpcSends) {
  std::vector<at::Tensor> tensors;
  const at::IValue value =
      make_tuple({-7, int64_t{1} << 40, 70'000, 2.5, true, at::IValue(), "abc", "abc",
                  make_tuple({}), make_tuple({at::ones({2}), at::ones({3}), 1})});
  const std::string bytes = pickled(value, tensors);
  const PickleShape shape = check_pickle(bytes, kLimits);
  EXPECT_TRUE(shape.is_tuple);
  EXPECT_EQ(shape.count, 10);
  EXPECT_EQ(shape.first_number, -7);
  // Every shorter text is refused.
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(refusal(bytes.substr(0, size)), "accepted") << size;
  }
}

TEST(PickleCheck, RefusesLyingLengthsHugeCountsAndDepth) {
  const std::string head("\x80\x02", 2);
  EXPECT_THAT(refusal(head + "X" + std::string("\xff\xff\xff\x7f", 4) + "ab."),
              HasSubstr("a length beyond the end"));
  // LibTorch would make room for four billion values.
  EXPECT_THAT(refusal(head + "Nr" + std::string("\xff\xff\xff\xff", 4) + "."),
              HasSubstr("a memo's place out of order"));
  EXPECT_THAT(refusal(head + "h" + std::string(1, '\x05') + "."),
              HasSubstr("an unknown memo's place"));
  EXPECT_THAT(refusal(head + "N" + std::string(100'000, '\x85') + "."),
              HasSubstr("deeper than the limit"));
  EXPECT_THAT(refusal(head + std::string(100'000, '(') + "."), HasSubstr("not one value"));
  // Each tuple holds the one before twice: 2 to the power of 30 values in 200 bytes.
  std::string shared = head + "N";
  for (int i = 0; i < 30; ++i) {
    shared += "q" + std::string(1, static_cast<char>(i)) + "h" +
              std::string(1, static_cast<char>(i)) + "\x86";
  }
  EXPECT_THAT(refusal(shared + ".", {1 << 20, 64, 0}), HasSubstr("more bytes than the limit"));
  EXPECT_THAT(refusal(head + "cos\nsystem\n."), HasSubstr("a name that RPC does not use"));
  EXPECT_THAT(refusal(head + "ctorch.jit._pickle\nbuild_tensor_from_id\n(K\x02tR."),
              HasSubstr("a tensor that the message does not have"));
  EXPECT_THAT(refusal(head + "ctorch.distributed.rpc\nrref\n(K\x01K\x01K\x01K\x01K\x01K\x01X" +
                      std::string("\x03\0\0\0", 4) + "intt" + "R."),
              HasSubstr("a reference to an unknown type"));
}

at::IValue random_value(Random& random, int depth) {
  switch (below(random, depth > 0 ? 9 : 7)) {
    case 0:
      return {};
    case 1:
      return static_cast<int64_t>(random());
    case 2:
      return std::bit_cast<double>(random());
    case 3:
      return below(random, 2) == 1;
    case 4:
      return std::string(below(random, 40), static_cast<char>(random()));
    case 5:
      return at::ones({static_cast<int64_t>(below(random, 4))});
    case 6:
      return at::ones({2, 2}, at::kByte).t();
    default: {
      std::vector<at::IValue> parts;
      for (uint64_t left = below(random, 6); left > 0; --left) {
        parts.push_back(random_value(random, depth - 1));
      }
      return make_tuple(std::move(parts));
    }
  }
}

/// The value is read, or refused.
template <class... T>
void read_as(const at::IValue& sent, int64_t& read) {
  const auto one = [&](auto type) {
    try {
      Value<decltype(type)>::from(sent);
      ++read;
    } catch (const DataError&) {
    }
  };
  (one(T{}), ...);
}

TEST(ValueFuzz, AnyValueIsReadOrRefused) {
  const uint64_t seed = fuzz_seed();
  SCOPED_TRACE(seed);
  Random random(seed);
  int64_t read = 0;
  for (int i = 0; i < 3'000; ++i) {
    const at::IValue sent = random_value(random, 4);
    read_as<bool, int8_t, int64_t, uint64_t, float, std::string, at::Tensor, std::vector<double>,
            std::vector<uint8_t>, std::vector<bool>, std::vector<std::string>,
            std::vector<at::Tensor>, std::map<std::string, int>, std::optional<std::vector<int>>,
            std::pair<int, std::string>, std::tuple<at::Tensor, std::optional<bool>>>(sent, read);
  }
  EXPECT_GT(read, 1'500);
}

/// As worker 1 sends them to worker 0.
std::vector<MessagePtr> good_messages() {
  const auto stack = [] {
    WireCall call("fuzz.add", add_two.signature().hash, 1, {1, 2});
    return std::move(call).stack();
  };
  const c10::QualifiedName carrier("lockstep");
  const native::RRefId rref(0, 1'000'001);
  const native::ForkId fork(0, 1'000'002);
  const auto script_call = [&] { return native::ScriptCall(carrier, stack()).toMessage(); };
  return {
      script_call(),
      script_call(),  // Twice, as most messages are calls.
      native::ScriptRemoteCall(carrier, stack(), native::RRefId(1, 8), native::ForkId(1, 9), false)
          .toMessage(),
      native::ScriptRRefFetchCall(0, rref).toMessage(),
      native::RRefUserDelete(rref, fork).toMessage(),
      native::RRefForkRequest(rref, fork).toMessage(),
      native::RRefChildAccept(fork).toMessage(),
      autograd::CleanupAutogradContextReq(77).toMessage(),
      autograd::PropagateGradientsReq(autograd::AutogradMetadata(5, 6), {at::ones({2})}, false)
          .toMessage(),
      autograd::RRefBackwardReq(rref, 7, false).toMessage(),
      autograd::RpcWithAutograd(0, native::MessageType::FORWARD_AUTOGRAD_REQ,
                                autograd::AutogradMetadata(5, 6), script_call())
          .toMessage(),
  };
}

void spoil(std::vector<char>& bytes, Random& random) {
  const auto place = [&] {
    return bytes.begin() + static_cast<int64_t>(below(random, bytes.size()));
  };
  if (bytes.empty()) bytes.push_back(0);
  switch (below(random, 7)) {
    case 0:
      *place() ^= static_cast<char>(1 << below(random, 8));
      return;
    case 1:
      *place() = static_cast<char>(random());
      return;
    case 2:
      bytes.resize(below(random, bytes.size()));
      return;
    case 3:
      bytes.insert(place(), 1 + below(random, 30), "(N.Kt\x85\xff"[below(random, 7)]);
      return;
    case 4:  // A huge length.
      for (auto at = place(); at != bytes.end() && below(random, 5) > 0; ++at) *at = '\xff';
      return;
    case 5: {
      const auto from = place();
      std::vector<char> part(from, bytes.end());
      bytes.insert(place(), part.begin(), part.end());
      return;
    }
    default:
      for (auto& byte : bytes) byte = static_cast<char>(random());
      return;
  }
}

/// A worker's handler, to which messages are given as if they had come.
struct Served {
  explicit Served(const std::string& secret, const ServeLimits& limits = {})
      : guard(std::make_shared<Guard>(0, secret, "job", MessageLimits{1 << 20, 8})),
        handler(make_request_handler(std::make_shared<CallRunner>("w0", limits), guard, threads,
                                     /*on_transport=*/8)) {}

  c10::intrusive_ptr<native::JitFuture> take(const MessagePtr& message) {
    return (*handler)(*message, {});
  }
  MessagePtr sealed(const MessagePtr& message) {
    return guard->seal.close(message, 0, guard->seal.next_number());
  }

  HandlerThreads threads{4};
  std::shared_ptr<Guard> guard;
  std::unique_ptr<native::RequestCallback> handler;
};

TEST(MessageFuzz, SpoiltMessagesAreErrorsAndTheWorkerGoesOn) {
  const uint64_t seed = fuzz_seed();
  SCOPED_TRACE(seed);
  test::run_workers(2, [seed](Agent&, int rank) {
    if (rank == 1) return;
    Random random(seed);
    Served served("");
    served.guard->holders.know(1);
    Seal theirs(1, "", "job");
    int64_t refused = 0, answered = 0;
    const auto messages = good_messages();
    for (int i = 0; i < 2'000; ++i) {
      const auto& good = messages[below(random, messages.size())];
      auto bytes = good->payload();
      for (uint64_t times = below(random, 3); times > 0; --times) spoil(bytes, random);
      auto tensors = good->tensors();
      auto type = good->type();
      if (below(random, 20) == 0)
        type = static_cast<native::MessageType>(0x100 + below(random, 40));
      const auto answer = served.take(theirs.close(
          c10::make_intrusive<native::Message>(std::move(bytes), std::move(tensors), type, i), 0,
          theirs.next_number()));
      if (!answer->completed()) continue;  // It waits for a reference that will never come.
      ++(answer->hasError() ? refused : answered);
    }
    EXPECT_GT(refused, 200);
    EXPECT_GT(answered, 200);
    EXPECT_EQ(call("w0", add_two, 1, 2), 3);
    // What its messages made it hold here is freed when it is gone. So the shutdown waits for none.
    served.guard->holders.release(1);
  });
}

TEST(MessageFuzz, ReferencesOfWorkersThatThereAreNotAreRefused) {
  test::run_workers(1, [](Agent&, int) {
    Served served("");
    const auto refusal_of = [&](const MessagePtr& message) {
      const auto answer = served.take(served.sealed(message));
      return answer->hasError() ? answer->tryRetrieveErrorMessage() : "accepted";
    };
    const auto remote_call = [](const native::RRefId& result, const native::ForkId& fork) {
      WireCall call("fuzz.add", add_two.signature().hash, 1, {1, 2});
      return native::ScriptRemoteCall(c10::QualifiedName("lockstep"), std::move(call).stack(),
                                      result, fork, false)
          .toMessage();
    };
    const native::RRefId ours(0, 1'000'001), theirs(7, 8);
    for (const auto& call : {remote_call(theirs, theirs), remote_call(ours, theirs)}) {
      EXPECT_THAT(refusal_of(call), HasSubstr("the reference to a result is not its sender's"));
      EXPECT_THAT(refusal_of(autograd::RpcWithAutograd(0, native::MessageType::FORWARD_AUTOGRAD_REQ,
                                                       autograd::AutogradMetadata(5, 6), call)
                                 .toMessage()),
                  HasSubstr("the reference to a result is not its sender's"));
    }
    const auto fork = [&] { return native::RRefForkRequest(ours, theirs).toMessage(); };
    EXPECT_THAT(refusal_of(fork()),
                HasSubstr("a reference of worker number 7, which there is not"));
    EXPECT_THAT(refusal_of(autograd::RpcWithAutograd(0, native::MessageType::FORWARD_AUTOGRAD_REQ,
                                                     autograd::AutogradMetadata(5, 6), fork())
                               .toMessage()),
                HasSubstr("of a kind that no autograd context has"));
    const auto& holders = served.guard->holders;
    holders.check_known({CarriedReference{0, 0, 1, 0, 2, 0}});
    for (const auto& carried :
         {CarriedReference{7, 0, 1, 0, 2, 0}, CarriedReference{0, 7, 1, 0, 2, 0},
          CarriedReference{0, 0, 1, 7, 2, 0}, CarriedReference{0, 0, 1, 0, 2, 7}}) {
      EXPECT_THROW(holders.check_known({carried}), DataError);
    }
  });
}

TEST(MessageFuzz, WithoutTheSecretNoFunctionRuns) {
  const uint64_t seed = fuzz_seed();
  SCOPED_TRACE(seed);
  test::run_workers(1, [seed](Agent&, int) {
    Random random(seed);
    Served served("a secret of 16 letters"), other("another one of 16 letters"), none("");
    const auto message = [] { return good_messages().front(); };
    const auto refused = [&](const MessagePtr& sent) {
      const auto answer = served.take(sent);
      return answer->completed() && answer->hasError();
    };
    EXPECT_TRUE(refused(other.sealed(message())));
    EXPECT_TRUE(refused(none.sealed(message())));
    EXPECT_TRUE(refused(message()));
    EXPECT_EQ(sums, 0);
    for (int i = 0; i < 500; ++i) {
      const auto sent = served.sealed(message());
      const auto before = sent->payload();
      while (sent->payload() == before) spoil(sent->payload(), random);
      EXPECT_TRUE(refused(sent));
    }
    EXPECT_EQ(sums, 0);
    const auto good = served.sealed(message());
    const auto again = c10::make_intrusive<native::Message>(
        std::vector<char>(good->payload()), std::vector<at::Tensor>(), good->type(), 1);
    EXPECT_FALSE(refused(good));
    EXPECT_EQ(sums, 1);
    EXPECT_TRUE(refused(again)) << "the same message twice";
    EXPECT_EQ(sums, 1);
  });
}

TEST(MessageFuzz, CallsBeyondTheLimitAreRefusedUntilOthersAreAnswered) {
  test::run_workers(1, [](Agent&, int) {
    Served served("", {.at_once = 2});
    const auto call_gate = [&] {
      WireCall call("fuzz.gate", at_gate.signature().hash, 1, {});
      return served.take(served.sealed(
          native::ScriptCall(c10::QualifiedName("lockstep"), std::move(call).stack()).toMessage()));
    };
    const auto first = call_gate(), second = call_gate(), third = call_gate();
    EXPECT_FALSE(first->completed());
    EXPECT_FALSE(second->completed());
    ASSERT_TRUE(third->hasError());
    EXPECT_THAT(third->tryRetrieveErrorMessage(), HasSubstr("Options::max_served"));
    gate.set_value(1);
    EXPECT_TRUE(first->hasValue());
    EXPECT_TRUE(call_gate()->hasValue());
  });
}

}  // namespace message_fuzz_test
}  // namespace lockstep::rpc::detail
