#include "lockstep/comm/checks/flight_recorder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace flight_recorder_test {

using Dict = c10::Dict<c10::IValue, c10::IValue>;

class FlightRecorders : public ::testing::Test {
 protected:
  std::string file() const { return folder_.path() / "deep" / "rank_"; }
  /// What rank 5 has written.
  Dict written() const {
    const std::string bytes = read_file(file() + "5");
    return torch::jit::unpickle(bytes.data(), bytes.size()).toGenericDict();
  }
  std::vector<Dict> entries() const {
    std::vector<Dict> found;
    const c10::IValue list = written().at("entries");
    for (const auto& value : list.toListRef()) found.push_back(value.toGenericDict());
    return found;
  }
  std::vector<int64_t> numbers(const char* key) const {
    std::vector<int64_t> found;
    for (const Dict& entry : entries()) found.push_back(entry.at(key).toInt());
    return found;
  }

  TemporaryDirectory folder_;
};

CallSignature call_of(uint64_t sequence) {
  CallSignature call{.operation = Operation::all_reduce, .sequence = sequence};
  call.inputs = signatures_of({at::ones({3, 4}), at::ones({2})});
  return call;
}

TEST_F(FlightRecorders, WritesTheLastCallsAndWhatBecameOfThem) {
  FlightRecorder recorder(4, file());
  const size_t group = recorder.add_group("0", "shm", {2, 5}, 1);
  std::vector<uint64_t> calls;
  for (uint64_t i = 1; i <= 6; ++i) calls.push_back(recorder.begin(group, call_of(i)));
  recorder.end(calls[0], nullptr);  // No longer in the ring: its place is another call's.
  recorder.end(calls[3], nullptr);
  recorder.end(calls[4], std::make_exception_ptr(std::runtime_error("no failure between ranks")));
  EXPECT_FALSE(std::filesystem::exists(file() + "5"));
  ASSERT_TRUE(recorder.dump());
  EXPECT_EQ(numbers("collective_seq_id"), (std::vector<int64_t>{3, 4, 5, 6}));
  std::vector<std::string> states;
  for (const Dict& entry : entries()) states.push_back(entry.at("state").toStringRef());
  EXPECT_EQ(states, (std::vector<std::string>{"started", "completed", "started", "started"}));
  const Dict entry = entries()[0];
  EXPECT_EQ(entry.at("profiling_name").toStringRef(), "gloo:all_reduce");
  EXPECT_EQ(entry.at("input_sizes").toListRef()[0].toListRef()[1].toInt(), 4);
  EXPECT_EQ(entry.at("input_sizes").toListRef().size(), 2U);
  EXPECT_EQ(entry.at("output_dtypes").toListRef()[0].toStringRef(), "Float");
  const Dict config = written().at("pg_config").toGenericDict().at("0").toGenericDict();
  EXPECT_EQ(config.at("ranks").toStringRef(), "[2, 5]");
  EXPECT_EQ(config.at("desc").toStringRef(), "shm");
}

TEST_F(FlightRecorders, AFailureBetweenRanksIsWrittenOncePerWorld) {
  FlightRecorder recorder(8, file());
  const auto lost = std::make_exception_ptr(PeerLostError("gone"));
  const size_t first = recorder.add_group("0", "shm", {5}, 0);
  recorder.end(recorder.begin(first, call_of(1)), std::make_exception_ptr(UsageError("a mistake")));
  EXPECT_FALSE(std::filesystem::exists(file() + "5"));
  recorder.end(recorder.begin(first, call_of(2)), lost);
  EXPECT_EQ(numbers("collective_seq_id"), (std::vector<int64_t>{1, 2}));
  recorder.end(recorder.begin(first, call_of(3)), lost);
  EXPECT_EQ(numbers("collective_seq_id"), (std::vector<int64_t>{1, 2}));

  const size_t next = recorder.add_group("0", "shm", {4, 5}, 1);
  recorder.begin(first, call_of(4));  // Of a group that lives on.
  recorder.end(recorder.begin(next, call_of(1)), lost);
  EXPECT_EQ(numbers("collective_seq_id"), std::vector<int64_t>{1});
}

TEST_F(FlightRecorders, AMessageSaysWhereItGoes) {
  FlightRecorder recorder(8, file());
  const size_t group = recorder.add_group("1", "gloo", {3, 5}, 1);
  CallSignature call = call_of(7);
  call.root = 0;
  for (const auto operation : {Operation::send, Operation::recv}) {
    call.operation = operation;
    recorder.begin(group, call);
  }
  ASSERT_TRUE(recorder.dump());
  EXPECT_EQ(entries()[0].at("profiling_name").toStringRef(), "gloo:send 1->0");
  EXPECT_EQ(entries()[1].at("profiling_name").toStringRef(), "gloo:recv 1<-0");
  EXPECT_TRUE(entries()[1].at("is_p2p").toBool());
}

TEST_F(FlightRecorders, WithoutARingNothingIsNoted) {
  FlightRecorder recorder(0, file());
  const size_t group = recorder.add_group("0", "shm", {5}, 0);
  EXPECT_EQ(recorder.begin(group, call_of(1)), 0U);
  recorder.end(0, std::make_exception_ptr(PeerLostError("gone")));
  EXPECT_FALSE(std::filesystem::exists(file() + "5"));
}

}  // namespace flight_recorder_test
}  // namespace lockstep
