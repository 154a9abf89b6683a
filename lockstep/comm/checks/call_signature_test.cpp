#include "lockstep/comm/checks/call_signature.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace call_signature_test {

const RankNames kNames{0, 1, 2, 3};

CallSignature all_to_all(std::vector<int64_t> input_splits, std::vector<int64_t> output_splits,
                         int64_t rows_in, int64_t rows_out) {
  CallSignature call;
  call.operation = Operation::all_to_all_single;
  call.sequence = 3;
  call.inputs = {{at::kFloat, {rows_in, 5}}};
  call.outputs = {{at::kFloat, {rows_out, 5}}};
  call.input_splits = std::move(input_splits);
  call.output_splits = std::move(output_splits);
  return call;
}

TEST(CallSignature, TravelsWhole) {
  CallSignature call = all_to_all({1, 2}, {2, 1}, 3, 3);
  call.reduction = 4;
  call.root = 1;
  call.inputs.push_back({at::kBFloat16, {}});
  const CallSignature back = decode(encode(call));
  EXPECT_EQ(back.operation, call.operation);
  EXPECT_EQ(back.reduction, 4);
  EXPECT_EQ(back.root, 1);
  EXPECT_EQ(back.sequence, 3u);
  EXPECT_EQ(back.inputs, call.inputs);
  EXPECT_EQ(back.outputs, call.outputs);
  EXPECT_EQ(back.input_splits, call.input_splits);
  EXPECT_EQ(back.output_splits, call.output_splits);
}

TEST(CallSignature, DamagedBytesAreRefusedAtEveryLength) {
  const std::string bytes = encode(all_to_all({1, 2}, {2, 1}, 3, 3));
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_THROW(decode(bytes.substr(0, length)), CommError) << length;
  EXPECT_THROW(decode(bytes + "x"), CommError);
  std::string huge = bytes;
  huge[17 + 3] = 0x7f;  // The number of inputs.
  EXPECT_THROW(decode(huge), CommError);
  std::string unknown = bytes;
  unknown[0] = 99;
  EXPECT_THROW(decode(unknown), CommError);
}

TEST(CallSignature, Describes) {
  CallSignature call;
  call.operation = Operation::reduce;
  call.reduction = 1;
  call.root = 2;
  call.inputs = {{at::kHalf, {3, 4}}};
  EXPECT_EQ(describe(call, {8, 9, 10}), "reduce(avg, root 10) of float16 [3, 4]");
  EXPECT_EQ(describe(all_to_all({1, 2}, {2, 1}, 3, 3), kNames),
            "all_to_all_single of float32 [3, 5] into float32 [3, 5], input splits [1, 2], output "
            "splits [2, 1]");
  EXPECT_EQ(describe(CallSignature{}, kNames), "barrier");
  CallSignature send{.operation = Operation::send, .root = 1};
  send.inputs = signatures_of({at::zeros({2, 0}, at::kBool)});
  EXPECT_EQ(describe(send, kNames), "send(to rank 1) of bool [2, 0]");
  EXPECT_EQ(signature_of(at::Tensor()), (TensorSignature{at::ScalarType::Undefined, {}}));
}

TEST(CallSignature, EveryOperationHasAName) {
  for (int i = 0; i <= static_cast<int>(Operation::recv_any); ++i)
    EXPECT_FALSE(operation_name(static_cast<Operation>(i)).empty());
}

TEST(CallSignature, RankLists) {
  EXPECT_EQ(rank_list({2}, kNames), "rank 2");
  EXPECT_EQ(rank_list({0, 2}, kNames), "ranks 0 and 2");
  EXPECT_EQ(rank_list({0, 1, 2}, {5, 6, 7}), "ranks 5, 6 and 7");
}

TEST(FindMismatch, UnevenSplitsThatFit) {
  // Rank 0 sends rows 1, 2; rank 1 sends 3, 4: rank 0 gets 1, 3 and rank 1 gets 2, 4.
  const auto calls = std::vector<CallSignature>{all_to_all({1, 2}, {1, 3}, 3, 4),
                                                all_to_all({3, 4}, {2, 4}, 7, 6)};
  EXPECT_EQ(find_mismatch(calls, kNames, "g"), std::nullopt);
}

TEST(FindMismatch, SequenceNumber) {
  auto one = all_to_all({}, {}, 4, 4);
  auto two = one;
  two.sequence = 4;
  const auto mismatch = find_mismatch({one, two}, kNames, "g");
  ASSERT_TRUE(mismatch);
  EXPECT_THAT(mismatch->text,
              ::testing::MatchesRegex(".*as collective 3 of group 'g', but rank 1 called.*as "
                                      "collective 4.*"));
}

TEST(FindMismatch, UnevenAllGatherOfBackendsThatHaveIt) {
  CallSignature one;
  one.operation = Operation::all_gather;
  one.outputs = {{at::kFloat, {2}}, {at::kFloat, {3}}};
  one.inputs = {one.outputs[0]};
  CallSignature two = one;
  two.inputs = {two.outputs[1]};
  EXPECT_EQ(find_mismatch({one, two}, kNames, "g"), std::nullopt);
  two.outputs[0].shape = {4};
  EXPECT_TRUE(find_mismatch({one, two}, kNames, "g"));
}

TEST(FindMismatch, AllToAllLists) {
  CallSignature one;
  one.operation = Operation::all_to_all;
  one.inputs = {{at::kFloat, {1}}, {at::kFloat, {2}}};
  one.outputs = {{at::kFloat, {1}}, {at::kFloat, {3}}};
  CallSignature two = one;
  two.inputs = {{at::kFloat, {3}}, {at::kFloat, {4}}};
  two.outputs = {{at::kFloat, {2}}, {at::kFloat, {4}}};
  EXPECT_EQ(find_mismatch({one, two}, kNames, "g"), std::nullopt);
  two.outputs[0].dtype = at::kLong;
  const auto mismatch = find_mismatch({one, two}, kNames, "g");
  ASSERT_TRUE(mismatch);
  EXPECT_THAT(mismatch->text,
              ::testing::MatchesRegex(".*gives rank 1 float32 .2., but rank 1 called.*expects "
                                      "int64 .2..*"));
}

TEST(FindMismatch, ScatterRootsListOfTheWrongLengthIsLeftToTheBackend) {
  CallSignature root;
  root.operation = Operation::scatter;
  root.root = 0;
  root.inputs = {{at::kFloat, {1}}};
  root.outputs = {{at::kFloat, {1}}};
  CallSignature other = root;
  other.inputs.clear();
  EXPECT_EQ(find_mismatch({root, other}, kNames, "g"), std::nullopt);
}

TEST(FindP2PMismatch, SizeAndDtypeButNotShape) {
  CallSignature send;
  send.operation = Operation::send;
  send.root = 1;
  send.sequence = 2;
  send.inputs = {{at::kFloat, {2, 2}}};
  CallSignature recv;
  recv.operation = Operation::recv;
  recv.root = 0;
  recv.outputs = {{at::kFloat, {4}}};
  EXPECT_EQ(find_p2p_mismatch(send, recv, 0, kNames, "g"), std::nullopt);
  recv.outputs = {{at::kDouble, {5}}};
  const auto text = find_p2p_mismatch(send, recv, 7, kNames, "g");
  ASSERT_TRUE(text);
  EXPECT_EQ(*text,
            "rank 0 called send(to rank 1) of float32 [2, 2] as message 2 with tag 7 of group 'g', "
            "but rank 1 called recv(from rank 0) into float64 [5]\n  hint: a receive must have the "
            "dtype and the number of elements of its send");
}

}  // namespace call_signature_test
}  // namespace lockstep
