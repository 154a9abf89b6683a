#include "lockstep/rpc/seal.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/message.h>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/run_workers.h"

namespace lockstep::rpc {
namespace seal_test {

using detail::MessagePtr;
using detail::Seal;
using test::run_workers;
using ::testing::HasSubstr;
using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

constexpr char kSecret[] = "0123456789abcdef";

MessagePtr message(std::vector<at::Tensor> tensors = {}) {
  return c10::make_intrusive<Message>(std::vector<char>{'a', 'b'}, std::move(tensors),
                                      MessageType::SCRIPT_CALL, 1);
}

TEST(Seal, ATensorThatWasChangedIsRefused) {
  Seal sender(1, kSecret, "job"), receiver(2, kSecret, "job");
  const at::Tensor tensor = at::ones({3, 2}).t();
  const auto sent = sender.close(message({tensor}), 2, sender.next_number());
  const auto opened = receiver.open_request(*sent);
  EXPECT_EQ(opened.sender, 1);
  EXPECT_EQ(sent->payload(), (std::vector<char>{'a', 'b'}));
  const auto changed = sender.close(message({tensor}), 2, sender.next_number());
  tensor.mutable_data_ptr<float>()[0] = 7;
  EXPECT_THROW(receiver.open_request(*changed), DataError);
}

TEST(Seal, IsForOneReceiverAndOneJob) {
  Seal sender(1, kSecret, "job");
  Seal other_worker(3, kSecret, "job"), other_job(2, kSecret, "job2");
  EXPECT_THROW(other_worker.open_request(*sender.close(message(), 2, 1)), DataError);
  EXPECT_THROW(other_job.open_request(*sender.close(message(), 2, 1)), DataError);
  Seal caller(2, kSecret, "job");
  EXPECT_THROW(caller.open_answer(*sender.close(message(), 2, 5), 1, 6), DataError);
  EXPECT_THROW(caller.open_answer(*sender.close(message(), 2, 5), 3, 5), DataError);
  caller.open_answer(*sender.close(message(), 2, 5), 1, 5);
}

const auto doubled = function("guarded.doubled", [](const at::Tensor& x) { return 2 * x; });
struct Model {
  at::Tensor weight = at::ones({3}).requires_grad_();
  at::Tensor forward(const at::Tensor& x) const { return (x * weight).sum(); }
};
const auto make_model = function("guarded.make_model", [] { return std::make_shared<Model>(); });
const auto forward = method("guarded.Model.forward", &Model::forward);

TEST(RpcSecret, CallsReferencesAndAutogradWorkWithOne) {
  run_workers(2,
              [](Agent&, int rank) {
                if (rank != 0) return;
                const at::Tensor x = at::full({3}, 2.0).requires_grad_();
                EXPECT_EQ(call("w1", doubled, x).sum().item<double>(), 12);
                const auto model = remote("w1", make_model);
                AutogradContext context;
                context.backward({model.rpc_sync(forward, x)});
                EXPECT_EQ(context.gradient(x).sum().item<double>(), 3);
              },
              {.secret = kSecret});
}

TEST(RpcSecret, AnotherOneIsAnErrorThatNamesTheRanks) {
  spawn(
      [](int rank) {
        const World world = init(InitOptions{});
        try {
          rpc::init(world, "w" + std::to_string(rank),
                    {.secret = rank == 0 ? kSecret : "another secret!!"});
        } catch (const UsageError& error) {
          EXPECT_THAT(error.what(), HasSubstr("ranks 0 and 1 have different secrets"));
          EXPECT_THAT(error.what(), ::testing::Not(HasSubstr(kSecret)));
          if (!::testing::Test::HasFailure()) return;
        }
        throw std::runtime_error("it was taken");
      },
      2);
}

}  // namespace seal_test
}  // namespace lockstep::rpc
