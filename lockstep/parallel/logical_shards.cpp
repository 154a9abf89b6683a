#include "lockstep/parallel/logical_shards.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/check_equal.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/scaled_copy.h"
#include "lockstep/parallel/shard_tree.h"
#include "lockstep/parallel/whole_model.h"

namespace lockstep {
namespace {

constexpr const char* kWhat = "LogicalShards";

/// Sums views of all pieces.
using PieceTree = detail::ShardTree<FlatViews>;

/// The sizes of the tree's nodes that lie within a range, in their order.
std::vector<int64_t> node_sizes(const ShardRange& range) {
  const auto nothing = [](char&, char&) {};
  detail::ShardTree<char> tree(nothing);
  for (int64_t shard = range.begin; shard < range.end; ++shard) tree.push({shard, 1, 0});
  std::vector<int64_t> sizes;
  for (const auto& node : tree.nodes()) sizes.push_back(node.size);
  return sizes;
}

}  // namespace

ShardRange shards_of_rank(int64_t shards, int rank, int ranks) {
  if (shards < ranks) {
    throw UsageError(counted(shards, "logical shard") + " for " + counted(ranks, "rank") +
                         ": each rank needs one at least",
                     "cut batches into as many shards as there are to be ranks at most");
  }
  return {shards * rank / ranks, shards * (rank + 1) / ranks};
}

DataShare share_of(const ShardRange& own, int64_t shards) {
  return {static_cast<int>(own.begin), static_cast<int>(shards), static_cast<int>(own.size())};
}

std::string arithmetic_of_process() {
  return "LibTorch " TORCH_VERSION ", " + at::get_cpu_capability() + ", " +
         counted(at::get_num_threads(), "thread");
}

std::string processor_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return {};
}

class LogicalShards::Impl {
 public:
  Impl(torch::nn::Module& module, ProcessGroup group, int64_t count, uint64_t seed,
       bool check_drift)
      : group_(std::move(group)),
        count_(count),
        seed_(seed),
        checks_drift_(check_drift),
        own_(shards_of_rank(count, group_.rank(), group_.size())),
        state_(detail::whole_module_state(module)),
        tree_([this](FlatViews& left, FlatViews& right) { join(left, right); }) {
    start_alike();
    if (one_node_each() && own_.size() == 1 && group_.size() > 1)
      core_ = detail::make_ddp_core(
          module, group_, {.broadcast_buffers = false, .init_sync = false, .check_drift = false},
          {}, kWhat);
    find_pieces();
  }

  int64_t count() const { return count_; }
  ShardRange own() const { return own_; }

  void run(int64_t step, int64_t shard, const std::function<at::Tensor()>& loss, bool last) {
    if (!std::exchange(within_shard_, false)) begin(step, shard);
    if (shard != shard_) refuse(shard, shard_);
    backward_of(loss, last);
    within_shard_ = !last;
    if (last) end(step);
  }

  double sum(const std::vector<double>& of_own) const {
    if (static_cast<int64_t>(of_own.size()) != own_.size()) {
      throw UsageError(place() + ": " + counted(of_own.size(), "number") + " for " +
                       counted(own_.size(), "shard"));
    }
    return detail::sum_over_shards<double>(
        group_, of_own, [](const nlohmann::json& number) { return number.get<double>(); },
        [](double& left, double& right) { left += right; });
  }

 private:
  /// Of which the tree sums the gradient, or a buffer's change.
  struct Piece {
    std::string name;
    at::Tensor tensor;
    std::optional<size_t> buffer;  ///< None for a parameter.
  };

  std::string place() const {
    return std::string(kWhat) + ", rank " + std::to_string(group_.rank());
  }

  void start_alike() const {
    if (group_.size() == 1) return;
    for (const nlohmann::json& other : group_.all_gather_object(arithmetic_of_process())) {
      if (other == arithmetic_of_process()) continue;
      throw MismatchError(place() + " computes with " + arithmetic_of_process() +
                              ", another rank with " + other.get<std::string>(),
                          "the same bits at any size need the same LibTorch, instruction set and "
                          "number of threads on all ranks");
    }
    detail::start_alike(state_, group_, kWhat);
  }

  /// Whether each rank has one node of the tree, all of one size, and the group's own sum over
  /// ranks is the rest of the tree. Two numbers have one sum.
  bool one_node_each() const {
    const int64_t ranks = group_.size();
    return count_ % ranks == 0 && std::has_single_bit(static_cast<uint64_t>(count_ / ranks)) &&
           (ranks <= 2 || group_.backend() == "shm");
  }

  void find_pieces() {
    if (!core_) {
      for (const auto& item : state_.reduced) pieces_.push_back({item.name, item.tensor, {}});
    }
    for (size_t i = 0; i < state_.buffers.size(); ++i) {
      const at::Tensor& tensor = state_.buffers[i].tensor;
      if (tensor.is_floating_point()) pieces_.push_back({"", tensor, i});
    }
  }

  FlatViews take_flat() {
    if (!spare_.empty()) {
      FlatViews flat = std::move(spare_.back());
      spare_.pop_back();
      return flat;
    }
    std::vector<at::Tensor> tensors;
    for (const Piece& piece : pieces_) tensors.push_back(piece.tensor);
    return flat_views(tensors, [ranks = group_.size()](int64_t elements, const auto& options) {
      // Ranks sum equal parts of it.
      return at::zeros({(elements + ranks - 1) / ranks * ranks}, options);
    });
  }

  void join(FlatViews& left, FlatViews& right) {
    for (size_t kind = 0; kind < left.memory.size(); ++kind)
      left.memory[kind].add_(right.memory[kind]);
    spare_.push_back(std::move(right));
  }

  [[noreturn]] void refuse(int64_t shard, int64_t expected) const {
    throw UsageError(place() + ": shard " + std::to_string(shard) + " was run, expected shard " +
                         std::to_string(expected),
                     "run shards " + std::to_string(own_.begin) + " to " +
                         std::to_string(own_.end - 1) + " in each step, one after the other");
  }

  void begin(int64_t step, int64_t shard) {
    const c10::AutoGradMode no_grad(false);
    if (shard == own_.begin) {
      begin_step();
      check_drift(step);
    } else if (shard != shard_ + 1 || shard >= own_.end) {
      refuse(shard, shard_ + 1 < own_.end ? shard_ + 1 : own_.begin);
    } else {
      for (size_t i = 0; i < before_.size(); ++i)
        state_.buffers[i].tensor.variable_data().copy_(before_[i]);
    }
    shard_ = shard;
    at::manual_seed(KeyedRandom(seed_, step, shard).next());
  }

  /// Ranks have the same bits between steps.
  void check_drift(int64_t step) {
    if (!checks_drift_ || !detail::is_compared_after(step) ||
        std::exchange(compared_, step) == step)
      return;
    detail::Compared mine{.what = kWhat, .steps = step};
    for (const auto* items : {&state_.parameters, &state_.buffers}) {
      for (const auto& item : *items) mine.tensors.emplace_back(item.name, item.tensor.detach());
    }
    detail::check_equal(mine, group_);
  }

  void begin_step() {
    for (const auto& item : state_.reduced) item.tensor.mutable_grad().reset();
    for (auto& node : tree_.nodes()) spare_.push_back(std::move(node.value));
    tree_.nodes().clear();
    if (!total_.memory.empty()) spare_.push_back(std::exchange(total_, {}));
    before_.clear();
    for (const auto& item : state_.buffers) before_.push_back(item.tensor.detach().clone());
  }

  void backward_of(const std::function<at::Tensor()>& loss, bool last) {
    if (!core_) return backward(loss());
    core_->synchronizing() = last;
    core_->before_forward();
    const at::Tensor value = loss();
    core_->after_forward();
    backward(value);
  }

  void end(int64_t step) {
    const c10::AutoGradMode no_grad(false);
    if (!pieces_.empty()) {
      tree_.push({shard_, 1, leaf()});
      if (shard_ + 1 == own_.end) finish();
    }
    // What a program draws between steps is alike at each size, too.
    if (shard_ + 1 == own_.end)
      at::manual_seed(KeyedRandom(seed_, step, static_cast<uint64_t>(count_)).next());
  }

  /// What this shard has made of the gradients and buffers, divided as DistributedDataParallel
  /// divides.
  FlatViews leaf() {
    FlatViews flat = take_flat();
    const double factor = 1.0 / static_cast<double>(count_);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      at::Tensor& view = flat.views[i];
      if (!piece.buffer) {
        detail::scaled_copy(view, gradient_of(piece), factor);
        piece.tensor.mutable_grad().reset();
        continue;
      }
      const at::Tensor& before = before_[*piece.buffer];
      if (at::equal(piece.tensor, before)) {
        view.zero_();  // It may be infinite.
      } else {
        at::sub_out(view, piece.tensor, before).mul_(factor);
      }
    }
    return flat;
  }

  at::Tensor gradient_of(const Piece& piece) const {
    const at::Tensor gradient = piece.tensor.grad();
    if (gradient.defined() && gradient.layout() == at::kStrided) return gradient.detach();
    throw UsageError(place() + ": shard " + std::to_string(shard_) + " gave parameter " +
                         piece.name + (gradient.defined() ? " a sparse gradient" : " no gradient"),
                     "make the loss depend on every parameter in each batch, or freeze it before");
  }

  void finish() {
    const CallOrigin origin("gradients", "LogicalShards");
    if (one_node_each()) {
      total_ = tree_.take_total();
      if (group_.size() > 1)
        for (at::Tensor& memory : total_.memory) group_.all_reduce(memory);
    } else {
      total_ = exchange();
    }
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (piece.buffer) {
        at::Tensor now = piece.tensor.variable_data();
        at::add_out(now, before_[*piece.buffer], total_.views[i]);
      } else {
        piece.tensor.mutable_grad() = total_.views[i];
      }
    }
  }

  /// Each rank gets its part of all ranks' nodes, joins them by the tree, and gives the sum to all.
  FlatViews exchange() {
    FlatViews result = take_flat();
    for (size_t kind = 0; kind < result.memory.size(); ++kind) {
      std::vector<at::Tensor> nodes;
      for (const auto& node : tree_.nodes())
        nodes.push_back(node.value.memory[kind].view({group_.size(), -1}));
      const at::Tensor sum = sum_of_part(at::stack(nodes, 1).flatten());
      group_.all_gather_into_tensor(result.memory[kind], sum);
    }
    for (auto& node : tree_.nodes()) spare_.push_back(std::move(node.value));
    tree_.nodes().clear();
    return result;
  }

  /// `nodes` has for each rank its part of each of this rank's nodes.
  at::Tensor sum_of_part(const at::Tensor& nodes) const {
    const auto count = static_cast<int64_t>(node_sizes(own_).size());
    const int64_t part = nodes.numel() / count / group_.size();
    std::vector<std::vector<int64_t>> sizes;
    std::vector<int64_t> received;
    int64_t all = 0;
    for (int rank = 0; rank < group_.size(); ++rank) {
      sizes.push_back(node_sizes(shards_of_rank(count_, rank, group_.size())));
      received.push_back(static_cast<int64_t>(sizes.back().size()) * part);
      all += received.back();
    }
    at::Tensor output = at::empty({all}, nodes.options());
    group_.all_to_all_single(output, nodes, received,
                             std::vector<int64_t>(group_.size(), count * part));
    detail::ShardTree<at::Tensor> tree(
        [](at::Tensor& left, at::Tensor& right) { left.add_(right); });
    for (int64_t first = 0, begin = 0; const auto& of_rank : sizes) {
      for (const int64_t size : of_rank) {
        tree.push({first, size, output.narrow(0, begin, part)});
        first += size;
        begin += part;
      }
    }
    return tree.take_total();
  }

  const ProcessGroup group_;
  const int64_t count_;
  const uint64_t seed_;
  const bool checks_drift_;
  int64_t compared_ = 0;  ///< After which step ranks compared their state last.
  const ShardRange own_;
  const detail::ModuleState state_;
  std::vector<at::Tensor> before_;         ///< The buffers, as the step began with them.
  std::unique_ptr<detail::DdpCore> core_;  ///< Where it sums the gradients in the tree's order.
  std::vector<Piece> pieces_;              ///< What the tree sums here.
  PieceTree tree_;
  FlatViews total_;               ///< Whose views are gradients until the next step.
  std::vector<FlatViews> spare_;  ///< Memory for further shards.
  int64_t shard_ = -1;            ///< The one that runs, or ran last.
  bool within_shard_ = false;     ///< More batches of it are to come.
};

LogicalShards::LogicalShards(torch::nn::Module& module, const ProcessGroup& group, int64_t count,
                             uint64_t seed, bool check_drift) {
  if (!group) throw UsageError(std::string(kWhat) + ": the process group is null");
  impl_ = std::make_unique<Impl>(module, group, count, seed, check_drift);
}
LogicalShards::~LogicalShards() = default;

int64_t LogicalShards::count() const {
  return impl_->count();
}
ShardRange LogicalShards::own() const {
  return impl_->own();
}
void LogicalShards::run(int64_t step, int64_t shard, const std::function<at::Tensor()>& loss,
                        bool last_of_shard) {
  impl_->run(step, shard, loss, last_of_shard);
}
double LogicalShards::sum(const std::vector<double>& of_own) const {
  return impl_->sum(of_own);
}

namespace {

class ShardedBatchStrategy : public detail::WholeOptimizerStrategy {
 public:
  explicit ShardedBatchStrategy(const StrategySetup& setup)
      : WholeOptimizerStrategy("ddp", setup),
        shards_(*setup.module, setup.group, setup.options.logical_shards->count,
                setup.options.logical_shards->seed, setup.options.check_drift) {
    if (!optimizer().needs_closure()) return;
    throw UsageError("optimizer " + optimizer().name() +
                         " evaluates the loss several times in a step, which logical shards do "
                         "not do",
                     "take another optimizer, or leave the logical shards out");
  }

  DataShare data_share() const override { return share_of(shards_.own(), shards_.count()); }

  void run_batch(const BatchWork& work) override {
    if (!work.shard)
      throw UsageError("strategy ddp with logical shards: BatchWork::shard is not set");
    shards_.run(
        work.shard->step, work.shard->index, [&] { return compute_loss(work); }, work.last_of_step);
  }

 private:
  LogicalShards shards_;
};

}  // namespace

std::unique_ptr<Strategy> make_sharded_batch_strategy(const StrategySetup& setup) {
  return std::make_unique<ShardedBatchStrategy>(setup);
}

}  // namespace lockstep
