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
#include "lockstep/comm/process_group.h"

namespace lockstep {
namespace {

using nlohmann::json;
using Tensors = std::vector<at::Tensor>;

at::Tensor encode(const json& object) {
  const std::vector<uint8_t> bytes = json::to_cbor(object);
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

json decode(const at::Tensor& tensor, int64_t size) {
  const at::Tensor bytes = tensor.cpu();
  const auto* data = static_cast<const uint8_t*>(bytes.data_ptr());
  try {
    return json::from_cbor(data, data + size);
  } catch (const json::exception& error) {
    throw CommError(std::string("an object of another rank does not decode: ") + error.what(),
                    "are all ranks of the same program?");
  }
}

at::Tensor padded(const at::Tensor& bytes, int64_t size, c10::Device device) {
  at::Tensor tensor = at::zeros({size}, at::kByte);
  tensor.narrow(0, 0, bytes.numel()).copy_(bytes);
  return tensor.to(device);
}

// Every rank's size in bytes, so that all can agree on the longest: backends move tensors of one
// size only.
std::vector<int64_t> gather_sizes(const ProcessGroup& group, int64_t mine, c10::Device device) {
  const at::Tensor input = at::full({1}, mine, at::dtype(at::kLong).device(device));
  at::Tensor output = at::empty({group.size()}, at::dtype(at::kLong).device(device));
  group.all_gather_into_tensor(output, input);
  const at::Tensor host = output.cpu();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + group.size()};
}

at::Tensor byte_tensor(int64_t size, c10::Device device) {
  return at::empty({size}, at::dtype(at::kByte).device(device));
}

// What all ranks' objects need: their sizes, the longest, and this rank's own of that length.
struct Padded {
  Padded(const ProcessGroup& group, const json& object, c10::Device device) {
    const at::Tensor bytes = encode(object);
    sizes = gather_sizes(group, bytes.numel(), device);
    longest = *std::max_element(sizes.begin(), sizes.end());
    mine = padded(bytes, longest, device);
  }
  std::vector<int64_t> sizes;
  int64_t longest = 0;
  at::Tensor mine;
};

// A null or closed group throws here, before its state is looked at.
void check_open(const ProcessGroup& group) {
  group.native();
}

std::vector<std::string> barrier_keys(const ProcessGroup::Impl& impl, int64_t number) {
  return numbered_keys("barrier/" + impl.name + "/" + std::to_string(number) + "/", impl.size);
}

}  // namespace

std::vector<json> ProcessGroup::all_gather_object(const json& object) const {
  check_open(*this);
  const c10::Device where = impl_->device();
  const auto [sizes, longest, mine] = Padded(*this, object, where);
  at::Tensor output = byte_tensor(size() * longest, where);
  all_gather_into_tensor(output, mine);
  std::vector<json> objects;
  for (const int64_t one : sizes)
    objects.push_back(
        decode(output.narrow(0, static_cast<int64_t>(objects.size()) * longest, longest), one));
  return objects;
}

std::vector<json> ProcessGroup::gather_object(const json& object, int dst) const {
  check_open(*this);
  backends::check_rank("gather_object", "dst", dst, size());
  const c10::Device where = impl_->device();
  const auto [sizes, longest, mine] = Padded(*this, object, where);
  Tensors outputs;
  for (int i = 0; i < size() && rank() == dst; ++i) outputs.push_back(byte_tensor(longest, where));
  gather(outputs, mine, dst);
  std::vector<json> objects;
  for (size_t i = 0; i < outputs.size(); ++i) objects.push_back(decode(outputs[i], sizes[i]));
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
  return rank() == src ? object : decode(bytes, bytes.numel());
}

json ProcessGroup::scatter_object(const std::vector<json>& objects, int src) const {
  check_open(*this);
  backends::check_rank("scatter_object", "src", src, size());
  const c10::Device where = impl_->device();
  // Two numbers go first: the longest size, for all, and each one's own.
  Tensors encoded, headers;
  if (rank() == src) {
    if (objects.size() != static_cast<size_t>(size())) {
      throw UsageError("scatter_object: " + std::to_string(objects.size()) + " objects on rank " +
                       std::to_string(src) + ", expected " + std::to_string(size()) +
                       ", one a rank");
    }
    int64_t longest = 0;
    for (const auto& object : objects) {
      encoded.push_back(encode(object));
      longest = std::max(longest, encoded.back().numel());
    }
    for (auto& bytes : encoded) {
      headers.push_back(at::tensor({longest, bytes.numel()}, at::kLong).to(where));
      bytes = padded(bytes, longest, where);
    }
  }
  at::Tensor header = at::empty({2}, at::dtype(at::kLong).device(where));
  scatter(header, headers, src);
  const at::Tensor numbers = header.cpu();
  at::Tensor bytes = byte_tensor(numbers[0].item<int64_t>(), where);
  scatter(bytes, encoded, src);
  return decode(bytes, numbers[1].item<int64_t>());
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
  const at::Tensor mine = at::tensor({color, key}, at::kInt).to(impl.device());
  at::Tensor all = at::empty({size() * 2}, at::dtype(at::kInt).device(impl.device()));
  all_gather_into_tensor(all, mine);
  const at::Tensor table = all.cpu();
  const int* rows = table.const_data_ptr<int>();
  const int64_t number = impl.splits++;
  if (color < 0) return {};
  std::vector<std::tuple<int, int>> members;  // (key, rank of this group)
  for (int i = 0; i < impl.size; ++i) {
    if (rows[2 * i] == color) members.emplace_back(rows[2 * i + 1], i);
  }
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
