#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_tracker.h"

namespace lockstep::detail {

/// A parameter, with what a reducer wants to know of it where it gets a gradient.
struct ReducedParameter {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient = false;
};

/// Averages gradients over a group's ranks while backward runs, as a GradientTracker says that they
/// come. Parameters lie in units. A unit is reduced when it is complete and those before it in the
/// order are, so that every rank makes the same calls. One thread at a time.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  virtual ArrivalRules rules() const { return {}; }
  /// Before a forward that records a graph. May make the units anew, which is a collective.
  virtual void before_forward() {}
  /// A round begins: one gradient of each parameter. What a failed one has begun is waited for.
  /// Several backwards may follow one forward, or none have gone before: then it does what
  /// `before_forward` does.
  void begin();
  /// The gradient of the parameter is complete. True with the last one of its unit.
  bool arrived(size_t index);
  /// Reduces the units that are complete and next in order, all but the last of the order, which
  /// waits for `finish`: then nothing is left to compute meanwhile.
  void reduce_in_turn();
  /// Reduces the rest, whatever has come, and gives out the results.
  void finish();
  /// A round of gradients that have added up in the parameters already.
  void reduce_all();
  size_t unit_of(size_t index) const { return unit_of_[index]; }
  virtual void fill(DdpStatistics& statistics) const {}
  /// In a Join only: from the next backward on gradients are divided by this.
  void set_divisor(int divisor) { divisor_ = divisor; }
  /// In a Join only, in place of a backward that the other ranks run: adds zeros to the sums, and
  /// takes the results as gradients. With `before_forward` before it.
  virtual void reduce_zeros() {}

 protected:
  /// `caller`: of the collectives, in errors about them. A CallOrigin's literal.
  GradientReducer(ProcessGroup group, const char* caller, int divisor)
      : group_(std::move(group)), divisor_(divisor), caller_(caller) {}

  /// `unit_of`: by parameter. `order`: of the units that have parameters.
  void set_units(std::vector<size_t> unit_of, std::vector<size_t> order);
  /// The order in which rank 0 saw the gradients of the last round come, those that did not at
  /// first. A collective, of the group `before` as well where it is not null.
  std::vector<size_t> agreed_arrivals(const ProcessGroup& before = {}) const;

  virtual void begin_round() {}
  virtual void stage(size_t index) {}
  /// `wait`: nothing is left to compute meanwhile. Else what it begins is put into `under_way_`.
  virtual void reduce(size_t unit, bool wait) = 0;
  /// Waits for what is under way.
  virtual void deliver() = 0;
  void wait_for_oldest();

  const ProcessGroup group_;
  int divisor_;                  ///< Of gradients, before they are summed.
  std::vector<size_t> unit_of_;  ///< By parameter.
  std::vector<size_t> order_;    ///< In which units are reduced.
  std::vector<size_t> awaited_;  ///< By unit: gradients that are still to come.
  std::deque<Work> under_way_;   ///< In the order of calls. May be null.
  bool learns_order_ = true;

 private:
  const char* const caller_;
  std::vector<size_t> counts_;    ///< By unit: its parameters.
  std::vector<size_t> arrivals_;  ///< Of parameters in this round, while the order is learnt.
  size_t next_ = 0;               ///< In `order_`.
};

/// That of DistributedDataParallel: an all-reduce for each bucket, with the buckets and bits of
/// c10d::Reducer. A collective.
std::unique_ptr<GradientReducer> make_bucket_reducer(std::vector<ReducedParameter> parameters,
                                                     const ProcessGroup& group,
                                                     const DdpOptions& options, const char* caller);

}  // namespace lockstep::detail
