#include "lockstep/rpc/sent_tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc {
namespace sent_tensors_test {

using test::run_workers;
using test_wait::wait_until;

at::Tensor with_too_little_memory() {
  const at::Tensor tensor = at::ones({4});
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(4);
  return tensor;
}

std::vector<at::Tensor> odd_tensors() {
  const at::Tensor complex = at::ones({3}, at::kComplexFloat) * c10::complex<float>(2, 3);
  return {
      at::empty({0, 5}).select(1, 4),
      at::empty({0, 5}).requires_grad_().select(1, 4),
      at::ones({10}).as_strided({3, 0}, {1, 1}, 9),
      at::_efficientzerotensor({3}),
      complex.conj(),
      at::imag(complex.conj()),  // Its memory is complex, and negative.
      at::ones({3}).requires_grad_() * 2,
      at::ones({2, 3}).t().expand({4, 3, 2}),
      at::arange(10, at::kByte).slice(0, 1, 9),
      at::ones({3}).to(at::kFloat8_e4m3fn),
      at::ones({3}).to(at::kUInt16),
      at::quantize_per_tensor(at::ones({3}), 0.1, 0, at::kQInt8),
      at::empty({0}).to(at::kComplexHalf),
      at::Tensor(),
  };
}

std::vector<at::Tensor> unsendable_tensors() {
  return {with_too_little_memory(),
          at::eye(3).to_sparse(),
          at::eye(3).to_sparse_csr(),
          at::eye(4).to_sparse_bsr({2, 2}),
          at::ones({3}).to_mkldnn(),
          at::_nested_tensor_from_tensor_list({at::ones({3}), at::ones({2})}),
          at::empty({3}, at::device(at::kMeta))};
}

using Nested = std::map<std::string, std::optional<at::Tensor>>;
const auto echo = function("tensors.echo", [](const at::Tensor& tensor) { return tensor; });
const auto echo_nested =
    function("tensors.echo_nested", [](const Nested& nested) { return nested; });
const auto echo_two = function(
    "tensors.echo_two", [](const at::Tensor& a, const at::Tensor& b) { return std::pair(a, b); });
const auto give = function("tensors.give", [](size_t i) { return unsendable_tensors().at(i); });
const auto forty_two = function("tensors.forty_two", [] { return 42; });
const auto give_both = function("tensors.give_both", [](const RRef<int>& reference) {
  return std::pair(reference, with_too_little_memory());
});
const auto take_both =
    function("tensors.take_both", [](const RRef<int>&, const at::Tensor&) { return 1; });

const auto count_left = function("tensors.count_left", [] {
  const auto left = torch::distributed::rpc::RRefContext::getInstance().getDebugInfo();
  return std::stoi(left.at("num_owner_rrefs")) + std::stoi(left.at("num_forks")) +
         std::stoi(left.at("num_pending_users"));
});

void expect_same(const at::Tensor& got, const at::Tensor& sent) {
  ASSERT_EQ(got.defined(), sent.defined());
  if (!sent.defined()) return;
  EXPECT_EQ(got.scalar_type(), sent.scalar_type());
  EXPECT_EQ(got.sizes(), sent.sizes());
  EXPECT_EQ(got.requires_grad(), sent.requires_grad());
  const auto plain = [](const at::Tensor& tensor) {
    const at::Tensor flat = tensor.is_quantized() ? tensor.dequantize() : tensor.resolve_conj();
    return flat.is_complex() ? flat.to(at::kComplexDouble) : flat.to(at::kDouble);
  };
  EXPECT_TRUE(at::equal(plain(got), plain(sent))) << got << sent;
}

// All by LibTorch's way.
const Options kSlow{.shutdown_timeout = std::chrono::seconds(60), .fast_calls = false};

TEST(SentTensors, OddOnesArriveInBothDirectionsAndEveryForm) {
  run_workers(
      2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        for (const auto& tensor : odd_tensors()) {
          SCOPED_TRACE(tensor.toString() + " " + std::to_string(tensor.defined()));
          expect_same(call("w1", echo, tensor), tensor);
          expect_same(remote("w1", echo, tensor).to_here(), tensor);
          expect_same(*call("w1", echo_nested, Nested{{"it", tensor}}).at("it"), tensor);
          const AutogradContext context;
          expect_same(call("w1", echo, tensor), tensor);
        }
      },
      kSlow);
}

TEST(SentTensors, ViewsOfOtherDtypesArriveWithTheirOwn) {
  run_workers(
      2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        const auto numbers = at::arange(6, at::kFloat), bytes = numbers.view(at::kByte);
        const auto check = [](const at::Tensor& a, const at::Tensor& b) {
          const auto [x, y] = call("w1", echo_two, a, b);
          expect_same(x, a);
          expect_same(y, b);
        };
        check(numbers, bytes);
        check(bytes, numbers);
      },
      kSlow);
}

TEST(SentTensors, WhatCannotTravelIsAnErrorAndBothWorkersGoOn) {
  run_workers(
      2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        const auto tensors = unsendable_tensors();
        for (size_t i = 0; i < tensors.size(); ++i) {
          SCOPED_TRACE(i);
          EXPECT_THROW(call("w1", echo, tensors[i]), UsageError);
          EXPECT_THROW(remote("w1", echo, tensors[i]), UsageError);
          EXPECT_THROW(call("w1", give, i), Error);
          EXPECT_THROW(remote("w1", give, i).to_here(), Error);
        }
        EXPECT_EQ(call("w1", forty_two), 42);
      },
      kSlow);
}

// Else each graceful shutdown would wait for them.
TEST(SentTensors, AMessageThatWasNotSentLeavesNoReferenceBehind) {
  run_workers(
      2,
      [](Agent&, int rank) {
        if (rank != 0) return;
        const at::Tensor bad = with_too_little_memory();
        const auto kept = RRef<int>::own(42);
        EXPECT_THROW(call("w1", give_both, kept), RemoteError);
        EXPECT_THROW(call("w1", give_both, remote("w1", forty_two)), RemoteError);
        {
          const auto theirs = remote("w1", forty_two);
          const auto ours = RRef<int>::own(42);
          EXPECT_EQ(theirs.to_here(), 42);
          for (const auto* worker : {"w0", "w1"}) {
            for (const auto& reference : {theirs, ours}) {
              EXPECT_THROW(call(worker, take_both, reference, bad), UsageError);
              EXPECT_THROW(remote(worker, take_both, reference, bad), UsageError);
            }
          }
        }
        for (const auto* worker : {"w0", "w1"}) {
          wait_until([&] { return call(worker, count_left) == 0; }, "all to be freed");
        }
      },
      kSlow);
}

}  // namespace sent_tensors_test
}  // namespace lockstep::rpc
