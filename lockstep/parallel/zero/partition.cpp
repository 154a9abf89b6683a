#include "lockstep/parallel/zero/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace lockstep::detail {
namespace {

int64_t up_to_cut(int64_t elements) {
  return (elements + kCut - 1) / kCut * kCut;
}

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

/// Puts `members` one after the other.
ShardBucket lay_out(const std::vector<at::Tensor>& parameters, std::vector<size_t> members) {
  ShardBucket bucket{std::move(members), {}, {0}};
  for (int64_t at = 0; const size_t index : bucket.parameters) {
    bucket.offsets.push_back(at);
    at += up_to_cut(parameters[index].numel());
  }
  return bucket;
}

int64_t length_of(const std::vector<at::Tensor>& parameters, const ShardBucket& bucket) {
  return bucket.offsets.back() + up_to_cut(parameters[bucket.parameters.back()].numel());
}

}  // namespace

std::vector<std::vector<size_t>> buckets_of(const std::vector<at::Tensor>& parameters,
                                            const std::vector<size_t>& trained, int64_t cap) {
  struct Open {
    size_t bucket = 0;
    int64_t bytes = 0;
  };
  std::vector<std::vector<size_t>> buckets;
  std::vector<Open> open;
  for (const size_t index : trained) {
    const at::Tensor& parameter = parameters[index];
    const auto bytes = static_cast<int64_t>(parameter.nbytes());
    auto found = std::find_if(open.begin(), open.end(), [&](const Open& entry) {
      return alike(parameters[buckets[entry.bucket].front()], parameter);
    });
    const bool first = found == open.end();
    if (first) found = open.insert(open.end(), Open{});
    if (first || bytes > cap - found->bytes) {
      *found = {buckets.size(), 0};
      buckets.emplace_back();
    }
    buckets[found->bucket].push_back(index);
    found->bytes += bytes;
  }
  return buckets;
}

bool ShardBucket::is_even() const {
  for (size_t rank = 1; rank < bounds.size(); ++rank) {
    if (bounds[rank] != bounds[1] * static_cast<int64_t>(rank)) return false;
  }
  return true;
}

ShardLayout even_layout(const std::vector<at::Tensor>& parameters,
                        const std::vector<std::vector<size_t>>& buckets, int ranks) {
  ShardLayout layout;
  for (const auto& members : buckets) {
    ShardBucket bucket = lay_out(parameters, members);
    const int64_t share = up_to_cut((length_of(parameters, bucket) + ranks - 1) / ranks);
    for (int64_t rank = 1; rank <= ranks; ++rank) bucket.bounds.push_back(rank * share);
    layout.push_back(std::move(bucket));
  }
  return layout;
}

ShardLayout whole_layout(const std::vector<at::Tensor>& parameters,
                         const std::vector<size_t>& trained, std::vector<int64_t>& sizes) {
  std::vector<size_t> largest_first = trained;
  std::stable_sort(largest_first.begin(), largest_first.end(), [&](size_t a, size_t b) {
    return parameters[a].numel() > parameters[b].numel();
  });
  std::vector<size_t> owner(parameters.size());
  for (const size_t index : largest_first) {
    const auto least = std::min_element(sizes.begin(), sizes.end());
    owner[index] = static_cast<size_t>(least - sizes.begin());
    *least += parameters[index].numel();
  }
  std::vector<size_t> by_owner = trained;
  std::stable_sort(by_owner.begin(), by_owner.end(),
                   [&](size_t a, size_t b) { return owner[a] < owner[b]; });
  ShardLayout layout;
  for (auto& members : buckets_of(parameters, by_owner, std::numeric_limits<int64_t>::max())) {
    ShardBucket bucket = lay_out(parameters, std::move(members));
    for (size_t rank = 1, at = 0; rank <= sizes.size(); ++rank) {
      while (at < bucket.parameters.size() && owner[bucket.parameters[at]] < rank) ++at;
      bucket.bounds.push_back(at < bucket.parameters.size() ? bucket.offsets[at]
                                                            : length_of(parameters, bucket));
    }
    layout.push_back(std::move(bucket));
  }
  return layout;
}

}  // namespace lockstep::detail
