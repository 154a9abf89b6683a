// The parts of ProcessGroup that are built on its collectives and its store.

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/tensor_checks.h"
#include "lockstep/comm/group_impl.h"
#include "lockstep/comm/group_objects.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {
namespace {

using nlohmann::json;

at::Tensor encode(const json& object) {
  const std::vector<uint8_t> bytes = json::to_cbor(object);
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

json decode(const at::Tensor& bytes) {
  const auto* data = bytes.const_data_ptr<uint8_t>();
  try {
    return json::from_cbor(data, data + bytes.numel());
  } catch (const json::exception& error) {
    throw CommError(std::string("an object of another rank does not decode: ") + error.what(),
                    "are all ranks of the same program?");
  }
}

at::Tensor byte_tensor(int64_t size, c10::Device device) {
  return at::empty({size}, at::dtype(at::kByte).device(device));
}

// A null or closed group throws here, before its state is looked at.
void check_open(const ProcessGroup& group) {
  group.native();
}

std::vector<std::string> barrier_keys(const ProcessGroup::Impl& impl, int64_t number) {
  return numbered_keys("barrier/" + impl.name + "/" + std::to_string(number) + "/", impl.size);
}

}  // namespace

// Backends move tensors of one size only: that of the longest object.
std::vector<json> ProcessGroup::all_gather_object(const json& object) const {
  check_open(*this);
  const c10::Device where = impl_->device();
  const auto numbers = at::dtype(at::kLong).device(where);
  const at::Tensor bytes = encode(object);
  at::Tensor sizes = at::empty({size()}, numbers);
  all_gather_into_tensor(sizes, at::full({1}, bytes.numel(), numbers));
  sizes = sizes.cpu();
  const auto longest = sizes.max().item<int64_t>();
  at::Tensor all = byte_tensor(size() * longest, where);
  all_gather_into_tensor(all, at::constant_pad_nd(bytes, {0, longest - bytes.numel()}).to(where));
  all = all.cpu();
  std::vector<json> objects;
  for (int rank = 0; rank < size(); ++rank)
    objects.push_back(decode(all.narrow(0, rank * longest, sizes[rank].item<int64_t>())));
  return objects;
}

std::vector<json> ProcessGroup::gather_object(const json& object, int dst) const {
  check_open(*this);
  backends::check_rank("gather_object", "dst", dst, size());
  auto objects = all_gather_object(object);
  if (rank() != dst) objects.clear();
  return objects;
}

json ProcessGroup::broadcast_object(const json& object, int src) const {
  check_open(*this);
  backends::check_rank("broadcast_object", "src", src, size());
  const c10::Device where = impl_->device();
  at::Tensor bytes = rank() == src ? encode(object).to(where) : at::Tensor();
  at::Tensor length =
      at::full({1}, rank() == src ? bytes.numel() : 0, at::dtype(at::kLong).device(where));
  broadcast(length, src);
  if (rank() != src) bytes = byte_tensor(length.item<int64_t>(), where);
  broadcast(bytes, src);
  return rank() == src ? object : decode(bytes.cpu());
}

StateDict detail::broadcast_state(const ProcessGroup& group, const StateDict& own, int source,
                                  std::optional<c10::Device> device) {
  const bool sends = group.rank() == source;
  json layout = json::array();
  if (sends) {
    for (const auto& [name, tensor] : own)
      layout.push_back({name, tensor.sizes().vec(), static_cast<int>(tensor.scalar_type())});
  }
  const c10::Device wire = device.value_or(impl_of(group).device());
  StateDict state;
  for (size_t i = 0; const json& entry : group.broadcast_object(layout, source)) {
    const auto options =
        at::TensorOptions(wire).dtype(static_cast<at::ScalarType>(entry.at(2).get<int>()));
    at::Tensor values = sends ? own[i++].second.detach().to(wire).contiguous()
                              : at::empty(entry.at(1).get<std::vector<int64_t>>(), options);
    if (values.numel() > 0) group.broadcast(values, source);
    state.emplace_back(entry.at(0), values.to(c10::kCPU));
  }
  return state;
}

json ProcessGroup::scatter_object(const std::vector<json>& objects, int src) const {
  check_open(*this);
  backends::check_rank("scatter_object", "src", src, size());
  if (rank() == src && objects.size() != static_cast<size_t>(size()))
    throw UsageError("scatter_object: " + std::to_string(objects.size()) + " objects on rank " +
                     std::to_string(src) + ", expected " + std::to_string(size()) + ", one a rank");
  return broadcast_object(rank() == src ? json(objects) : json(), src).at(rank());
}

void ProcessGroup::monitored_barrier(std::chrono::milliseconds timeout) const {
  check_open(*this);
  auto& impl = *impl_;
  Store store = impl.context->own_store;
  const int64_t number = impl.barriers++;
  const auto me = static_cast<size_t>(impl.rank);
  const auto keys = barrier_keys(impl, number);
  store.set(keys[me], "1");
  try {
    store.wait(keys, timeout);
  } catch (const TimeoutError&) {
    std::vector<int> missing;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!store.check({keys[i]})) missing.push_back(impl.global_ranks[i]);
    }
    if (missing.empty()) return;  // The last came while this rank was giving up.
    throw_late("rank " + std::to_string(impl.context->rank) + ": monitored_barrier " +
                   std::to_string(number + 1) + " of group '" + impl.name + "': ",
               missing, timeout);
  }
  // All have come here, so all have left the barrier before: nobody waits for its key any more.
  if (number > 0) store.delete_key(barrier_keys(impl, number - 1)[me]);
}

ProcessGroup ProcessGroup::split(int color, int key) const {
  check_open(*this);
  auto& impl = *impl_;
  const std::vector<json> all = all_gather_object({color, key});
  const int64_t number = impl.splits++;
  if (color < 0) return {};
  std::vector<std::tuple<int, int>> members;  // (key, rank of this group)
  for (const json& one : all)
    if (one[0] == color) members.emplace_back(one[1], static_cast<int>(&one - all.data()));
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [order, member] : members) {
    ranks.push_back(impl.global_ranks[static_cast<size_t>(member)]);
  }
  const std::string name =
      impl.name + ".split" + std::to_string(number) + "." + std::to_string(color);
  return ProcessGroup(form_group(impl.context, name, ranks, impl.backend_name));
}

}  // namespace lockstep
