#pragma once

#include <c10/core/Device.h>

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/pipeline/stage_link.h"

namespace lockstep::detail {

/// Stages in processes: sends and receives of a group, of which each rank has every size()-th
/// stage. The shape of an activation is sent ahead of the first one of its key. After that both
/// sides know it, and that of its gradient.
class GroupLink final : public StageLink {
 public:
  GroupLink(ProcessGroup group, c10::Device device);

  void begin(std::vector<ShapeKey> keys) override;
  void send(const ParcelId& id, const at::Tensor& tensor) override;
  void expect(const ParcelId& id) override;
  void flush() override;
  at::Tensor take(const ParcelId& id) override;
  void finish() override;

 private:
  struct Shape {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool needs_gradient;
    bool operator==(const Shape&) const = default;
  };
  struct Receive {
    at::Tensor header;
    at::Tensor data;
    Work header_work;
    Work data_work;
  };
  /// A key of this link's own, and the stage that makes the activation.
  using Boundary = std::pair<int, int>;

  Boundary boundary(const ParcelId& id) const;
  const Shape* known(const ParcelId& id) const;
  int rank_of(int stage) const { return stage % group_.size(); }
  void announce(const ParcelId& id, const at::Tensor& tensor);
  void advance(Parcel kind, int stage);
  void receive_data(const ParcelId& id, Receive& receive, const Shape& shape);
  void add(P2POp::Kind kind, const at::Tensor& tensor, int stage, int tag, Work* work);

  ProcessGroup group_;
  c10::Device device_;
  std::map<ShapeKey, int> keys_;
  std::vector<int> key_of_;  ///< Of each micro-batch of the batch.
  std::map<Boundary, Shape> shapes_;
  std::set<Boundary> headers_;  ///< That have been asked for.
  std::map<ParcelId, Receive> receives_;
  /// Expected, but not begun: of one whose shape is not known yet, and all that follow it. Receives
  /// meet sends in their order.
  std::map<std::pair<Parcel, int>, std::deque<ParcelId>> waiting_;
  std::vector<P2POp> batch_;
  std::vector<Work*> works_of_batch_;  ///< Where to put them; null: with those to finish.
  std::vector<Work> sent_;
};

}  // namespace lockstep::detail
