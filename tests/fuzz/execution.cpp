#include "tests/fuzz/execution.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/fuzz/laid_out.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/oracle.h"

namespace lockstep::fuzz {
namespace {

using Tensors = std::vector<at::Tensor>;

std::chrono::milliseconds patience(const Call& call) {
  return std::chrono::milliseconds(static_cast<int64_t>(call.job.timeout * 1000)) * 2;
}

/// One of the ways to learn of the end of a Work, which throws what it failed of.
void wait_somehow(const Call& call, const Work& work, KeyedRandom& random) {
  const auto patience = fuzz::patience(call);
  switch (random.below(4)) {
    case 0: {
      const auto deadline = std::chrono::steady_clock::now() + patience;
      while (!work.is_completed()) {
        if (std::chrono::steady_clock::now() > deadline)
          throw Finding("is_completed() stays false for two time-outs");
        std::this_thread::yield();
      }
      break;
    }
    case 1: {
      auto told = std::make_shared<std::promise<std::exception_ptr>>();
      work.then([told](std::exception_ptr error) { told->set_value(std::move(error)); });
      auto error = told->get_future();
      if (error.wait_for(patience) != std::future_status::ready)
        throw Finding("then() has not called back after two time-outs");
      if (const auto failed = error.get()) std::rethrow_exception(failed);
      break;
    }
    default:
      break;
  }
  work.wait();
}

Tensors views(const std::vector<LaidOut>& all) {
  Tensors result;
  for (const auto& one : all) result.push_back(one.view);
  return result;
}

/// A collective of tensors, or a barrier.
class RunningCollective final : public Running {
 public:
  explicit RunningCollective(const Call& call)
      : call_(call),
        step_(call.mine()),
        random_(step_.key, static_cast<uint64_t>(call.rank()), 2),
        expected_(fuzz::expect(step_, call.group.carrier, call.rank(), call.group.size())) {
    lay_out_all();
    const bool guarded = random_.below(2) == 0;
    std::optional<c10::NoGradGuard> guard;
    if (guarded) guard.emplace();
    const bool async = random_.below(2) == 0;
    if (async) {
      work_ = begin();
    } else {
      call_blocking();
    }
  }

  void wait() override {
    if (work_) wait_somehow(call_, work_, random_);
  }

  void check() override {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!expected_.in_place) {
        expect(inputs_[i], i, "input", {});
      } else if (expected_.outputs[i].defined()) {
        expect(inputs_[i], i, "in-place", expected_.outputs[i]);
      }
    }
    for (size_t i = 0; i < outputs_.size(); ++i)
      expect(outputs_[i], i, "output", expected_.outputs[i]);
  }

 private:
  void lay_out_all() {
    LayoutChoice choice;
    choice.plain_only = call_.group.carrier == Carrier::gloo;
    choice.repeated = step_.repeated;
    choice.is_input = !expected_.in_place;
    for (const auto& values : expected_.inputs)
      inputs_.push_back(step_.kind == Kind::symmetric ? lay_out_in(symmetric_memory(values), values)
                                                      : lay_out(values, random_, choice));
    if (expected_.in_place) return;
    choice.is_input = false;
    for (const auto& values : expected_.outputs)
      outputs_.push_back(
          lay_out(at::zeros_like(values, at::MemoryFormat::Contiguous), random_, choice));
  }

  at::Tensor symmetric_memory(const at::Tensor& values) const {
    return call_.group.handle.symmetric_empty(values.numel() + 3, step_.dtype);
  }

  static void expect(const LaidOut& tensor, size_t index, const char* what,
                     const at::Tensor& values) {
    const std::string found = difference(tensor, values);
    if (!found.empty())
      throw Finding(std::string(what) + " " + std::to_string(index) + ", " + found);
  }

  Work begin() {
    const ProcessGroup& group = call_.group.handle;
    Tensors in = views(inputs_), out = views(outputs_);
    const Step& s = step_;
    switch (s.kind) {
      case Kind::all_reduce:
      case Kind::symmetric:
        return group.all_reduce_async(in[0], s.reduction);
      case Kind::all_reduce_coalesced:
        return group.all_reduce_coalesced_async(in, s.reduction);
      case Kind::reduce:
        return group.reduce_async(in[0], s.root, s.reduction);
      case Kind::broadcast:
        return group.broadcast_async(in[0], s.root);
      case Kind::all_gather:
        return group.all_gather_async(out, in[0]);
      case Kind::all_gather_into_tensor:
        return group.all_gather_into_tensor_async(out[0], in[0]);
      case Kind::gather:
        return group.gather_async(out, in[0], s.root);
      case Kind::scatter:
        return group.scatter_async(out[0], in, s.root);
      case Kind::reduce_scatter:
        return group.reduce_scatter_async(out[0], in, s.reduction);
      case Kind::reduce_scatter_tensor:
        return group.reduce_scatter_tensor_async(out[0], in[0], s.reduction);
      case Kind::all_to_all:
        return group.all_to_all_async(out, in);
      case Kind::all_to_all_single:
        return group.all_to_all_single_async(out[0], in[0], expected_.output_splits,
                                             expected_.input_splits);
      case Kind::barrier:
        return group.barrier_async();
      default:
        throw std::logic_error("not a collective");
    }
  }

  void call_blocking() {
    const ProcessGroup& group = call_.group.handle;
    Tensors in = views(inputs_), out = views(outputs_);
    const Step& s = step_;
    switch (s.kind) {
      case Kind::all_reduce:
      case Kind::symmetric:
        return group.all_reduce(in[0], s.reduction);
      case Kind::all_reduce_coalesced:
        return group.all_reduce_coalesced(in, s.reduction);
      case Kind::reduce:
        return group.reduce(in[0], s.root, s.reduction);
      case Kind::broadcast:
        return group.broadcast(in[0], s.root);
      case Kind::all_gather:
        return group.all_gather(out, in[0]);
      case Kind::all_gather_into_tensor:
        return group.all_gather_into_tensor(out[0], in[0]);
      case Kind::gather:
        return group.gather(out, in[0], s.root);
      case Kind::scatter:
        return group.scatter(out[0], in, s.root);
      case Kind::reduce_scatter:
        return group.reduce_scatter(out[0], in, s.reduction);
      case Kind::reduce_scatter_tensor:
        return group.reduce_scatter_tensor(out[0], in[0], s.reduction);
      case Kind::all_to_all:
        return group.all_to_all(out, in);
      case Kind::all_to_all_single:
        return group.all_to_all_single(out[0], in[0], expected_.output_splits,
                                       expected_.input_splits);
      case Kind::barrier:
        return group.barrier();
      default:
        throw std::logic_error("not a collective");
    }
  }

  const Call call_;
  const Step step_;
  KeyedRandom random_;
  const Expectation expected_;
  std::vector<LaidOut> inputs_;
  std::vector<LaidOut> outputs_;
  Work work_;
};

/// The calls that block always, checked as they return.
class RunningBlocking final : public Running {
 public:
  explicit RunningBlocking(const Call& call) {
    if (call.step.kind == Kind::objects) {
      objects(call);
    } else if (call.step.kind == Kind::monitored_barrier) {
      call.group.handle.monitored_barrier(patience(call) / 2);
    } else {
      use_new_group(call);
    }
  }
  void wait() override {}
  void check() override {}

 private:
  static nlohmann::json object_of(const Step& step, int rank) {
    KeyedRandom random(step.key, static_cast<uint64_t>(rank), 3);
    nlohmann::json object = {{"rank", rank}, {"list", nlohmann::json::array()}};
    const uint64_t length = random.below(random.below(4) == 0 ? 20'000 : 30);
    for (uint64_t i = 0; i < length; ++i) object["list"].push_back(random.below(1000));
    if (random.below(3) == 0) return static_cast<int>(random.below(100));
    return object;
  }

  static void objects(const Call& call) {
    const ProcessGroup& group = call.group.handle;
    std::vector<nlohmann::json> all;
    for (int rank = 0; rank < group.size(); ++rank) all.push_back(object_of(call.step, rank));
    const auto& mine = all[static_cast<size_t>(group.rank())];
    const int root = call.step.root;
    const bool at_root = group.rank() == root;
    bool right = false;
    switch (call.step.key % 4) {
      case 0:
        right = group.all_gather_object(mine) == all;
        break;
      case 1:
        right = group.gather_object(mine, root) == (at_root ? all : decltype(all)());
        break;
      case 2:
        right = group.broadcast_object(mine, root) == all[static_cast<size_t>(root)];
        break;
      default:
        right = group.scatter_object(at_root ? all : decltype(all)(), root) == mine;
    }
    if (!right) throw Finding("another object than was sent");
  }

  static void use_new_group(const Call& call) {
    KeyedRandom random(call.step.key, 5, 5);
    const auto plan = make_group_plan(random, call.job.size());
    for (const auto& group : form(call.job, call.world, plan)) {
      if (!group.handle) continue;
      at::Tensor sum = at::full({3}, call.world.rank() + 1, at::kLong);
      group.handle.all_reduce(sum);
      int64_t wanted = 0;
      for (const int member : group.members) wanted += member + 1;
      if (sum[2].item<int64_t>() != wanted) throw Finding("the sum in a new group is wrong");
    }
  }
};

}  // namespace

int Group::rank_of(int global) const {
  const auto found = std::find(members.begin(), members.end(), global);
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

std::vector<Group> form(const Job& job, const World& world, const GroupPlan& plan) {
  ProcessGroup handle;
  const auto me = static_cast<size_t>(world.rank());
  if (plan.by_split) {
    handle = world.group().split(plan.colors[me], plan.keys[me]);
  } else {
    handle = world.new_group(plan.ranks);
  }
  std::vector<Group> groups;
  for (const auto& members : plan.groups()) {
    Group group{members, carrier_of(job, members), {}};
    if (group.rank_of(world.rank()) >= 0) {
      if (!handle || handle.global_ranks() != members ||
          handle.rank() != group.rank_of(world.rank()))
        throw Finding("a new group has other ranks than expected");
      group.handle = handle;
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

std::unique_ptr<Running> start(const Call& call) {
  switch (call.step.kind) {
    case Kind::exchange:
      return start_exchange(call);
    case Kind::collect_any:
      return start_collection(call);
    case Kind::objects:
    case Kind::monitored_barrier:
    case Kind::form_group:
      return std::make_unique<RunningBlocking>(call);
    default:
      return std::make_unique<RunningCollective>(call);
  }
}

bool names_rank(const std::string& text, int rank) {
  static const std::regex kNamed("ranks? ([0-9]+((, | and )[0-9]+)*)");
  static const std::regex kNumber("[0-9]+");
  for (std::sregex_iterator named(text.begin(), text.end(), kNamed), end; named != end; ++named) {
    const std::string numbers = (*named)[1];
    for (std::sregex_iterator number(numbers.begin(), numbers.end(), kNumber); number != end;
         ++number)
      if (std::stoi(number->str()) == rank) return true;
  }
  return false;
}

}  // namespace lockstep::fuzz
