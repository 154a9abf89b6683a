// One rank of a job, for comm_test.py and whoever needs a small C++ rank:
//   comm_rank MODE [init_method]
// init       joins, all-reduces one number, prints {"sum", "init_ms", ...}
// hold       joins and stays until standard input ends
// ops        runs the operations that comm_peer.py runs too and prints their results
// groups     new_group as in comm_peer.py
// fail       joins, then rank 1 throws while rank 0 waits in a collective
// absent     joins, then all but rank 1 enter a monitored barrier of one second
#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"

namespace {

using lockstep::ReduceOp;
using nlohmann::json;

json numbers(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kDouble).reshape({-1});
  return std::vector<double>(flat.const_data_ptr<double>(),
                             flat.const_data_ptr<double>() + flat.numel());
}

json numbers(const std::vector<at::Tensor>& tensors) {
  json list = json::array();
  for (const auto& tensor : tensors) list.push_back(numbers(tensor));
  return list;
}

// What comm_peer.py makes too: small fractions that float32 holds and whose sums it rounds.
at::Tensor input(int rank, int64_t size, at::ScalarType dtype = at::kFloat) {
  return ((at::arange(size, at::kDouble) * 0.37 + rank * 1.1).sin() * 3).to(dtype);
}

json run_ops(const lockstep::ProcessGroup& group) {
  const int rank = group.rank(), size = group.size();
  json results;
  for (const auto& [name, op] : {std::pair{"sum", ReduceOp::sum},
                                 {"avg", ReduceOp::avg},
                                 {"max", ReduceOp::max},
                                 {"product", ReduceOp::product}}) {
    at::Tensor t = input(rank, 1001);
    group.all_reduce(t, op);
    results[std::string("all_reduce_") + name] = numbers(t);
  }
  at::Tensor whole = input(rank, 17).mul(10).to(at::kLong);
  group.all_reduce(whole);
  results["all_reduce_int64"] = numbers(whole);
  at::Tensor shared = input(rank, 9);
  group.broadcast(shared, size - 1);
  results["broadcast"] = numbers(shared);
  at::Tensor root = input(rank, 9);
  group.reduce(root, 0);
  if (rank == 0) results["reduce"] = numbers(root);
  std::vector<at::Tensor> gathered;
  for (int i = 0; i < size; ++i) gathered.push_back(at::empty({5}));
  group.all_gather(gathered, input(rank, 5));
  results["all_gather"] = numbers(gathered);
  at::Tensor flat = at::empty({5 * size});
  group.all_gather_into_tensor(flat, input(rank, 5));
  results["all_gather_into_tensor"] = numbers(flat);
  std::vector<at::Tensor> parts;
  if (rank == 0) {
    for (int i = 0; i < size; ++i) parts.push_back(input(i + 10, 4));
  }
  at::Tensor part = at::empty({4});
  group.scatter(part, parts, 0);
  results["scatter"] = numbers(part);
  std::vector<at::Tensor> collected;
  if (rank == 0) {
    for (int i = 0; i < size; ++i) collected.push_back(at::empty({4}));
  }
  group.gather(collected, input(rank, 4), 0);
  results["gather"] = numbers(collected);
  at::Tensor piece = at::empty({3});
  group.reduce_scatter_tensor(piece, input(rank, 3 * size));
  results["reduce_scatter_tensor"] = numbers(piece);
  at::Tensor swapped = at::empty({2 * size});
  group.all_to_all_single(swapped, input(rank, 2 * size));
  results["all_to_all_single"] = numbers(swapped);
  at::Tensor passed = input(rank, 6);
  at::Tensor taken = at::empty({6});
  auto works =
      group.batch_isend_irecv({{lockstep::P2POp::Kind::send, passed, (rank + 1) % size, 7},
                               {lockstep::P2POp::Kind::recv, taken, (rank + size - 1) % size, 7}});
  for (auto& work : works) work.wait();
  results["ring"] = numbers(taken);
  group.barrier();
  return results;
}

json run_groups(lockstep::World& world) {
  const auto first = world.new_group({0});
  const auto pair = world.new_group({world.size() - 1, 0});
  json results;
  results["member"] = {static_cast<bool>(first), static_cast<bool>(pair)};
  if (pair && world.size() > 1) {
    at::Tensor t = input(world.rank(), 11);
    pair.all_reduce(t);
    results["pair"] = numbers(t);
  }
  return results;
}

int run(const std::string& mode, const std::string& method) {
  const auto start = std::chrono::steady_clock::now();
  lockstep::InitOptions options;
  options.init_method = method;
  // Their sums are compared with Gloo's to the last bit.
  if (mode == "ops" || mode == "groups") options.backend = "gloo";
  auto world = lockstep::init(options);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  const auto& group = world.group();
  json out{{"rank", world.rank()},
           {"size", world.size()},
           {"local_rank", world.local_rank()},
           {"local_size", world.local_size()},
           {"node_rank", world.node_rank()},
           {"launcher", world.launcher()},
           {"backend", group.backend()},
           {"init_ms", took.count()}};
  if (mode == "init") {
    at::Tensor one = at::full({1}, world.rank() + 1, at::kLong);
    group.all_reduce(one);
    out["sum"] = one.item<int64_t>();
  } else if (mode == "hold") {
    std::cout << "joined" << std::endl;
    while (std::cin.get() != std::istream::traits_type::eof()) {
    }
  } else if (mode == "ops") {
    out["results"] = run_ops(group);
  } else if (mode == "groups") {
    out["results"] = run_groups(world);
  } else if (mode == "fail") {
    at::Tensor t = at::ones({4});
    group.all_reduce(t);
    if (world.rank() == 1) {
      const auto pending = group.all_reduce_async(t);
      throw lockstep::DataError("the data of rank 1 is damaged");
    }
    group.all_reduce(t);
    group.all_reduce(t);
  } else if (mode == "absent") {
    if (world.rank() != 1) {
      try {
        group.monitored_barrier(std::chrono::milliseconds(1000));
      } catch (const lockstep::TimeoutError& error) {
        out["error"] = error.what();
      }
      lockstep::Store(world.store()).set("seen/" + std::to_string(world.rank()), "1");
    } else {
      std::vector<std::string> keys;
      for (int i = 0; i < world.size(); ++i) {
        if (i != 1) keys.push_back("seen/" + std::to_string(i));
      }
      lockstep::Store(world.store()).wait(keys);
    }
  } else {
    throw lockstep::UsageError("unknown mode '" + mode + "'");
  }
  world.close();
  std::cout << out.dump() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "init", argc > 2 ? argv[2] : "env://");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return lockstep::exit_code_of(error);
  }
}
