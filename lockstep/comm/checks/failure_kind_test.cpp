#include "lockstep/comm/checks/failure_kind.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "lockstep/base/error.h"

namespace lockstep {
namespace failure_kind_test {

struct Example {
  const char* message;
  FailureKind kind;
};

// As the libraries and the kernel write them.
const Example kExamples[] = {
    {"[/src/gloo/transport/tcp/pair.cc:553] Read error [10.0.0.2]:4711: Connection timed out",
     FailureKind::silence},
    {"[/src/gloo/transport/tcp/unbound_buffer.cc:133] Application timeout caused pair closure",
     FailureKind::silence},
    {"[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41331",
     FailureKind::connection},
    {"NCCL WARN [Service thread] Connection closed by localRank 1", FailureKind::connection},
    {"Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or "
     "crash?",
     FailureKind::connection},
    {"recvValue failed on SocketImpl(fd=41, addr=[localhost]:40612, remote=[localhost]:29500): "
     "Failed to recv",
     FailureKind::connection},
    {"[/src/gloo/transport/tcp/pair.cc:281] Socket closed [127.0.0.1]:9", FailureKind::connection},
    {"ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
     "prematurely.",
     FailureKind::connection},
    {"Read error [127.0.0.1]:4: Connection reset by peer", FailureKind::connection},
    {"Call to connect returned Connection refused, retrying", FailureKind::connection},
    {"accept: Software caused connection abort", FailureKind::connection},
    {"sendBytes failed on SocketImpl(fd=3): Broken pipe", FailureKind::connection},
    {"getpeername: Transport endpoint is not connected", FailureKind::connection},
    {"connect [10.0.0.2]:29500: No route to host", FailureKind::connection},
    {"connect [10.0.0.2]:29500: Network is unreachable", FailureKind::connection},
    {"[/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms for recv operation to "
     "complete",
     FailureKind::timeout},
    {"The client socket has timed out after 60000ms while trying to connect to (10.0.0.2, 29500).",
     FailureKind::timeout},
    {"wait timeout after 300000ms, keys: /default_pg/0", FailureKind::timeout},
    {"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
     FailureKind::timeout},
    {"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms", FailureKind::timeout},
    {"Invalid scalar type", FailureKind::other},
};

std::exception_ptr as_runtime_error(const char* message) {
  return std::make_exception_ptr(std::runtime_error(message));
}

TEST(FailureKind, AMessagesWordsTellItsKind) {
  for (const auto& [message, kind] : kExamples) {
    EXPECT_EQ(failure_kind(as_runtime_error(message)), kind) << message;
  }
}

TEST(FailureKind, TheTypeSaysMoreThanTheText) {
  EXPECT_EQ(failure_kind(std::make_exception_ptr(MismatchError("timeout"))), FailureKind::ours);
  EXPECT_EQ(failure_kind(std::make_exception_ptr(1)), FailureKind::other);
  try {
    C10_THROW_ERROR(DistNetworkError, "something else");
  } catch (const c10::Error& error) {
    EXPECT_EQ(failure_kind(std::current_exception()), FailureKind::connection);
    EXPECT_TRUE(is_store_lost(error));
  }
}

TEST(FailureKind, TheTextIsOneLineWithoutThePlaceInTheSource) {
  EXPECT_EQ(failure_text(as_runtime_error("[/src/pair.cc:553] Connection closed by peer\nstack")),
            "Connection closed by peer");
  EXPECT_EQ(failure_text(as_runtime_error("[a] b")), "[a] b");
}

TEST(FailureKind, ATranslatedErrorIsOneOfOurs) {
  EXPECT_EQ(translate(nullptr), nullptr);
  const auto ours = std::make_exception_ptr(UsageError("no ranks"));
  EXPECT_EQ(translate(ours), ours);
  for (const auto& [message, kind] : kExamples) {
    const auto rethrow = [error = translate(as_runtime_error(message))] {
      std::rethrow_exception(error);
    };
    if (is_lost(kind) && kind != FailureKind::silence) {
      EXPECT_THROW(rethrow(), CommError) << message;
    } else if (kind != FailureKind::other) {
      EXPECT_THROW(rethrow(), TimeoutError) << message;
    }
  }
  EXPECT_THROW(translated([] { throw std::runtime_error("Invalid scalar type"); }), CommError);
  EXPECT_EQ(translated([] { return 7; }), 7);
}

}  // namespace failure_kind_test
}  // namespace lockstep
