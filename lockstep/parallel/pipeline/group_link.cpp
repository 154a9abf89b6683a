#include "lockstep/parallel/pipeline/stage_link.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

/// Apart from the tags of a program's own messages in the same group.
constexpr int kFirstTag = 1 << 20;
enum Tag { kHeader, kActivation, kGradient, kTags };

int tag_of(int stage, Tag tag) {
  return kFirstTag + stage * kTags + tag;
}

/// dtype, whether a gradient is wanted, number of dimensions, sizes.
constexpr size_t kMostDimensions = 13;
constexpr size_t kHeaderNumbers = 3 + kMostDimensions;

std::string text_of(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  return std::string(c10::toString(dtype)) + " " + c10::str(at::IntArrayRef(sizes));
}

class GroupLink final : public StageLink {
 public:
  GroupLink(ProcessGroup group, c10::Device device) : group_(std::move(group)), device_(device) {}

  void begin(std::vector<ShapeKey> keys) override {
    receives_.clear();
    late_.clear();
    sent_.clear();
    batch_.clear();
    works_of_batch_.clear();
    keys_ = std::move(keys);
  }
  void send(const ParcelId& id, const at::Tensor& tensor) override {
    if (!tensor.defined()) return;
    const bool forward = id.kind == Parcel::activation;
    if (forward) announce(id, tensor);
    add(P2POp::Kind::send, tensor.detach().contiguous(), id.stage,
        tag_of(id.stage, forward ? kActivation : kGradient), nullptr);
  }
  void expect(const ParcelId& id) override {
    if (known(id) == nullptr) late_.insert({id.kind, id.stage});
    if (!late_.contains({id.kind, id.stage})) receive(id);
  }
  void flush() override {
    if (batch_.empty()) return;
    std::vector<Work> works = group_.batch_isend_irecv(batch_);
    for (size_t i = 0; i < works_of_batch_.size(); ++i) {
      const Work& work = works[works.size() == 1 ? 0 : i];
      works_of_batch_[i] ? static_cast<void>(*works_of_batch_[i] = work) : sent_.push_back(work);
    }
    batch_.clear();
    works_of_batch_.clear();
  }
  at::Tensor take(const ParcelId& id) override {
    if (known(id) == nullptr) receive_shape(id);
    const Shape& shape = *known(id);
    if (id.kind == Parcel::gradient && !shape.needs_gradient) return {};
    if (!receives_.contains(id)) {
      receive(id);
      flush();
    }
    const Receive received = receives_.extract(id).mapped();
    received.work.wait();
    const bool is_leaf = id.kind == Parcel::activation && shape.needs_gradient;
    return at::Tensor(received.data).set_requires_grad(is_leaf);
  }
  void finish() override {
    for (const Work& work : sent_) work.wait();
    sent_.clear();
  }

 private:
  struct Shape {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool needs_gradient;
    bool operator==(const Shape&) const = default;
  };
  struct Receive {
    at::Tensor data;
    Work work;
  };
  /// A micro-batch's key, and the stage that makes the activation.
  using Boundary = std::pair<ShapeKey, int>;

  Boundary boundary(const ParcelId& id) const {
    return {keys_.at(static_cast<size_t>(id.micro_batch)), id.activation_from()};
  }
  const Shape* known(const ParcelId& id) const {
    const auto found = shapes_.find(boundary(id));
    return found == shapes_.end() ? nullptr : &found->second;
  }
  int rank_of(int stage) const { return stage % group_.size(); }
  void announce(const ParcelId& id, const at::Tensor& tensor) {
    const Shape shape{tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()};
    const auto [entry, is_new] = shapes_.try_emplace(boundary(id), shape);
    if (!is_new) {
      if (entry->second == shape) return;
      throw UsageError(
          "pipeline: stage " + std::to_string(id.activation_from()) + " gave " +
              text_of(entry->second.sizes, entry->second.dtype) + " for an input and now " +
              text_of(shape.sizes, shape.dtype) + " for one of the same shape",
          "a layer's output may only depend on the shape of its input, not on its values; nor may "
          "parameters be frozen while the pipeline trains");
    }
    if (shape.sizes.size() > kMostDimensions) {
      throw UsageError("pipeline: stage " + std::to_string(id.activation_from()) +
                       " gives a tensor of " + std::to_string(shape.sizes.size()) +
                       " dimensions; at most " + std::to_string(kMostDimensions) + " can be sent");
    }
    std::array<int64_t, kHeaderNumbers> numbers{static_cast<int64_t>(shape.dtype),
                                                shape.needs_gradient ? 1 : 0,
                                                static_cast<int64_t>(shape.sizes.size())};
    std::copy(shape.sizes.begin(), shape.sizes.end(), numbers.begin() + 3);
    add(P2POp::Kind::send, at::tensor(numbers, at::kLong).to(device_), id.stage,
        tag_of(id.stage, kHeader), nullptr);
  }
  void receive_shape(const ParcelId& id) {
    const at::Tensor header = at::empty({static_cast<int64_t>(kHeaderNumbers)},
                                        at::TensorOptions(device_).dtype(at::kLong));
    Work work;
    add(P2POp::Kind::recv, header, id.stage - 1, tag_of(id.stage, kHeader), &work);
    flush();
    work.wait();
    const at::Tensor here = header.cpu();
    const int64_t* numbers = here.const_data_ptr<int64_t>();
    shapes_.try_emplace(boundary(id), Shape{{numbers + 3, numbers + 3 + numbers[2]},
                                            static_cast<at::ScalarType>(numbers[0]),
                                            numbers[1] != 0});
  }
  void receive(const ParcelId& id) {
    const Shape& shape = *known(id);
    const bool forward = id.kind == Parcel::activation;
    if (!forward && !shape.needs_gradient) return;
    Receive& receive = receives_[id];
    receive.data = at::empty(shape.sizes, at::TensorOptions(device_).dtype(shape.dtype));
    add(P2POp::Kind::recv, receive.data, forward ? id.stage - 1 : id.stage + 1,
        tag_of(id.stage, forward ? kActivation : kGradient), &receive.work);
  }
  void add(P2POp::Kind kind, const at::Tensor& tensor, int stage, int tag, Work* work) {
    batch_.push_back({kind, tensor, rank_of(stage), tag});
    works_of_batch_.push_back(work);
  }

  ProcessGroup group_;
  c10::Device device_;
  std::vector<ShapeKey> keys_;  ///< Of each micro-batch of the batch.
  std::map<Boundary, Shape> shapes_;
  std::map<ParcelId, Receive> receives_;
  /// Of which a shape was not known in time: `take` begins all receives of the batch. Receives meet
  /// sends in their order.
  std::set<std::pair<Parcel, int>> late_;
  std::vector<P2POp> batch_;
  std::vector<Work*> works_of_batch_;  ///< Where to put them; null: with those to finish.
  std::vector<Work> sent_;
};

}  // namespace

std::unique_ptr<StageLink> make_group_link(ProcessGroup group, c10::Device device) {
  return std::make_unique<GroupLink>(std::move(group), device);
}

}  // namespace lockstep::detail
