// One rank of a job that test_comm_faults.py disturbs:
//   lockstep_fault_rank store             hosts a store, prints its port, ends with standard input
//   lockstep_fault_rank loop INIT_METHOD SECONDS
//                                         joins and runs collectives and messages until one fails
//                                         or its time is over; SECONDS is the group's time-out once
//                                         all have joined, for which they get TEST_JOIN_SECONDS
//   lockstep_fault_rank form INIT_METHOD SECONDS
//                                         joins and forms a second group of all ranks, to which
//                                         rank TEST_VICTIM never comes
//   lockstep_fault_rank bequeath INIT_METHOD SECONDS
//                                         as loop, but rank TEST_VICTIM is killed while a child of
//                                         it holds its connections; prints "heir PID" before. The
//                                         others close the group in order when a call has failed
//   lockstep_fault_rank miss|differ INIT_METHOD SECONDS
//                                         joins and makes five calls; the sixth rank TEST_VICTIM
//                                         does not make, or with another tensor
// Prints "joined" and "round N" lines. How it ended is its last line, `error TYPE TEXT` on one
// line, and its exit code: 10 for PeerLostError, 11 for TimeoutError, 1 for any other.
#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/store.h"
#include "lockstep/comm/world.h"

namespace {

/// Ends a rank that nobody disturbs, so that no process is left if the test goes away.
constexpr std::chrono::seconds kLongest{60};

int host_store() {
  lockstep::TcpStoreOptions options;
  options.is_listener = true;
  const auto store = lockstep::tcp_store(options);
  std::cout << lockstep::tcp_store_port(store) << '\n' << std::flush;
  for (char byte; std::cin.get(byte);) {
  }
  return 0;
}

/// Some of everything, of small and large tensors, and more than one operation in flight.
void one_round(const lockstep::ProcessGroup& group, int round) {
  const int rank = group.rank(), size = group.size();
  at::Tensor small = at::ones({3});
  at::Tensor large = at::ones({200'000});
  const auto first = group.all_reduce_async(large);
  const auto second = group.all_reduce_async(small);
  first.wait();
  second.wait();
  TORCH_CHECK(small[0].item<float>() == static_cast<float>(size), "wrong sum");
  group.broadcast(small, round % size);
  at::Tensor all = at::empty({3 * size});
  group.all_gather_into_tensor(all, small);
  at::Tensor incoming = at::empty({4});
  auto works = group.batch_isend_irecv(
      {{lockstep::P2POp::Kind::send, at::ones({4}), (rank + 1) % size, 0},
       {lockstep::P2POp::Kind::recv, incoming, (rank + size - 1) % size, 0}});
  for (auto& work : works) work.wait();
  group.barrier();
}

lockstep::World join(const std::string& method, double seconds) {
  lockstep::InitOptions options;
  const char* backend = std::getenv("TEST_BACKEND");
  options.backend = backend ? backend : "gloo";
  options.init_method = method;
  const char* join_seconds = std::getenv("TEST_JOIN_SECONDS");
  options.timeout = std::chrono::seconds(join_seconds ? std::atoi(join_seconds) : 60);
  if (const char* rank = std::getenv("RANK")) options.rank = std::atoi(rank);
  if (const char* size = std::getenv("WORLD_SIZE")) options.world_size = std::atoi(size);
  auto world = lockstep::init(options);
  lockstep::ProcessGroup group = world.group();
  group.set_timeout(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  std::cout << "joined\n" << std::flush;
  return world;
}

bool is_victim(const lockstep::World& world) {
  const char* victim = std::getenv("TEST_VICTIM");
  return victim && std::atoi(victim) == world.rank();
}

void form(const std::string& method, double seconds) {
  const auto world = join(method, seconds);
  if (is_victim(world)) std::this_thread::sleep_for(kLongest);
  std::vector<int> everyone;
  for (int rank = 0; rank < world.size(); ++rank) everyone.push_back(rank);
  std::cout << "forming\n" << std::flush;
  one_round(world.new_group(everyone), 0);
}

void loop(const std::string& method, double seconds) {
  const auto world = join(method, seconds);
  const auto deadline = std::chrono::steady_clock::now() + kLongest;
  for (int round = 0; std::chrono::steady_clock::now() < deadline; ++round) {
    one_round(world.group(), round);
    std::cout << "round " << round << '\n' << std::flush;
  }
}

/// Dies as a process does that has started a daemon: its connections stay open.
[[noreturn]] void die_with_an_heir() {
  const pid_t heir = ::fork();
  if (heir == 0) {
    ::close(STDOUT_FILENO);
    ::close(STDERR_FILENO);
    ::alarm(2 * static_cast<unsigned>(kLongest.count()));  // Ends it if the test does not.
    while (true) ::pause();
  }
  std::cout << "heir " << heir << '\n' << std::flush;
  std::raise(SIGKILL);
  std::abort();
}

void bequeath(const std::string& method, double seconds) {
  std::exception_ptr failure;
  {
    const auto world = join(method, seconds);
    try {
      // The first ten calls are compared, which sees a death itself.
      for (int round = 0; round < 3; ++round) one_round(world.group(), round);
      if (is_victim(world)) die_with_an_heir();
      one_round(world.group(), 3);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void miss(const std::string& method, double seconds) {
  const auto world = join(method, seconds);
  at::Tensor tensor = at::ones({3, 4});
  for (int call = 0; call < 5; ++call) world.group().all_reduce(tensor);
  if (is_victim(world)) std::this_thread::sleep_for(kLongest);
  world.group().broadcast(tensor, 0);
}

void differ(const std::string& method, double seconds) {
  const auto world = join(method, seconds);
  at::Tensor tensor = at::ones({3, 4});
  for (int call = 0; call < 5; ++call) world.group().all_reduce(tensor);
  if (is_victim(world)) tensor = at::ones({5});
  world.group().all_reduce(tensor);
}

int report(const char* type, const std::exception& error, int code) {
  std::string text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::cout << "error " << type << " " << text << '\n' << std::flush;
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "store") return host_store();
    const std::map<std::string, void (*)(const std::string&, double)> modes{
        {"loop", loop}, {"form", form}, {"bequeath", bequeath}, {"miss", miss}, {"differ", differ}};
    const auto run = modes.find(mode);
    if (run == modes.end() || argc < 4)
      throw lockstep::UsageError("store, or loop, form, bequeath, miss or differ METHOD SECONDS");
    run->second(argv[2], std::strtod(argv[3], nullptr));
    return 0;
  } catch (const lockstep::PeerLostError& error) {
    return report("PeerLostError", error, 10);
  } catch (const lockstep::TimeoutError& error) {
    return report("TimeoutError", error, 11);
  } catch (const std::exception& error) {
    return report("other", error, 1);
  }
}
