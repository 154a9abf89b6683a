#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/gradient_reducer.h"
#include "lockstep/parallel/whole_model.h"
#include "lockstep/parallel/zero/sharded_optimizer.h"

namespace lockstep::detail {

/// Averages gradients while backward runs, each part on the rank that updates it alone (stage 2 of
/// ZeRO). A bucket's whole gradients are given up as soon as they have been sent. One thread at a
/// time, and one backward at a time.
class ShardReducer : public GradientReducer {
 public:
  /// `parameters`: those of the optimizer's that need a gradient. `dtype`: to reduce in, in place
  /// of the gradients' own. A rank's optimizer must outlive this.
  ShardReducer(ShardedOptimizer& optimizer, const std::vector<ReducedParameter>& parameters,
               std::string what, std::optional<at::ScalarType> dtype);

  ArrivalRules rules() const override { return {}; }
  void before_forward(bool synchronizing) override;
  void begin() override;
  void take(size_t index) override;
  void fill(DdpStatistics& statistics) const override;
  void set_divisor(int divisor) override { divisor_ = divisor; }
  void reduce_zeros() override;

  /// This rank's means, as vectors: what `step` uses. They may have zeros between parameters.
  std::vector<at::Tensor> gradients() const {
    return has_means_ ? means_ : std::vector<at::Tensor>();
  }
  /// Forgets them. Their memory is kept for the next step.
  void drop_gradients();
  int64_t gradient_bytes() const { return bytes_of(means_); }

 private:
  /// A part of a bucket on its way.
  struct Sent {
    Work work;
    at::Tensor source;  ///< All ranks' parts.
    at::Tensor result;
    at::Tensor target;  ///< Of `result`, where that is another tensor.
    bool adds = false;
  };

  void agree_on_order();
  void reduce_what_is_ready();
  void reduce(size_t bucket);
  at::Tensor ordered_gradient(size_t parameter) const;
  void pack(const ShardBucket& bucket, const std::vector<at::Tensor>& gradients, int64_t begin,
            int64_t end, const at::Tensor& target) const;
  void receive(size_t most_in_flight);
  uint64_t parts_version() const;
  void finish();

  ShardedOptimizer& optimizer_;
  std::vector<std::string> names_;  ///< By parameter of the optimizer, as all that follows.
  std::vector<size_t> indices_;     ///< Of the parameters that need a gradient.
  const std::string what_;
  const std::optional<at::ScalarType> dtype_;
  int divisor_;
  std::vector<size_t> bucket_of_;
  std::vector<size_t> pending_;    ///< Gradients that are still to come, by bucket.
  std::vector<size_t> order_;      ///< In which buckets are reduced.
  std::vector<size_t> arrived_;    ///< The order in which the first backward filled them.
  bool ordered_ = false;           ///< `order_` is that of the first backward.
  std::vector<at::Tensor> means_;  ///< This rank's share of each bucket.
  std::vector<at::Tensor> cuts_;   ///< Of `means_`, as the optimizer's parts; by parameter.
  bool has_means_ = false;
  uint64_t version_ = 0;  ///< Of the parts, when they got their gradients: a step changes it.
  bool told_kept_ = false;
  std::deque<Sent> sent_;
  size_t next_ = 0;  ///< The first of `order_` that has not been sent.
};

}  // namespace lockstep::detail
