#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// Sums the values of shards 0, 1, 2, ... in a binary tree that depends on nothing but their
/// number: two neighbours of 2^n shards each are joined where the left one begins at a multiple of
/// 2^(n+1), and what is left over at the end is joined from the right. So the sum has the same
/// bits whoever summed the parts. Sums over ranks in shared memory follow the same tree.
template <class T>
class ShardTree {
 public:
  /// The sum of `size` shards from `first` on. `size` is a power of two that divides `first`.
  struct Node {
    int64_t first;
    int64_t size;
    T value;
  };
  /// left += right.
  using Add = std::function<void(T& left, T& right)>;

  explicit ShardTree(Add add) : add_(std::move(add)) {}

  /// The node that follows the last one.
  void push(Node node) {
    nodes_.push_back(std::move(node));
    while (nodes_.size() > 1) {
      const Node& left = nodes_[nodes_.size() - 2];
      if (left.size != nodes_.back().size || left.first % (2 * left.size) != 0) return;
      join_last_two();
    }
  }

  /// The nodes that only shards before or after these can be joined with, in the shards' order.
  std::vector<Node>& nodes() { return nodes_; }

  /// The sum of all shards, when they are all there; the tree is empty afterwards.
  T take_total() {
    while (nodes_.size() > 1) join_last_two();
    T total = std::move(nodes_.front().value);
    nodes_.clear();
    return total;
  }

 private:
  void join_last_two() {
    Node& left = nodes_[nodes_.size() - 2];
    add_(left.value, nodes_.back().value);
    left.size += nodes_.back().size;
    nodes_.pop_back();
  }

  Add add_;
  std::vector<Node> nodes_;
};

/// The tree's sum of one value for each shard, on all ranks. `own` has this rank's, in their order;
/// `value` reads one. A collective.
template <class T, class Value>
T sum_over_shards(const ProcessGroup& group, const nlohmann::json& own, const Value& value,
                  typename ShardTree<T>::Add add) {
  ShardTree<T> tree(std::move(add));
  int64_t shard = 0;
  for (const nlohmann::json& of_rank : group.all_gather_object(own)) {
    for (const nlohmann::json& of_shard : of_rank) tree.push({shard++, 1, value(of_shard)});
  }
  return tree.take_total();
}

}  // namespace lockstep::detail
