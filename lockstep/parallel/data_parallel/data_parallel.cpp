#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <torch/cuda.h>

#include <algorithm>
#include <sstream>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

/// `replicas` of them at most; 0: all.
std::vector<c10::Device> all_devices(const torch::nn::Module& module, int64_t replicas) {
  const c10::Device own = device_of(module);
  const auto most = static_cast<size_t>(std::max<int64_t>(0, replicas));
  std::vector<c10::Device> devices;
  const auto cores = static_cast<size_t>(std::max(1, usable_cores()));
  if (own.is_cpu()) devices.resize(most > 0 ? most : cores, own);
  if (own.is_cuda()) {
    // The module's first: it must lie there.
    devices.push_back(own);
    for (c10::DeviceIndex i = 0; i < torch::cuda::device_count(); ++i) {
      const c10::Device device(c10::kCUDA, i);
      if (device != own) devices.push_back(device);
    }
  }
  if (devices.empty()) {
    throw UsageError("DataParallel: the module is on device " + own.str(),
                     "move it to the CPU or a GPU before, or name the devices");
  }
  if (most > 0 && most < devices.size()) devices.resize(most, own);
  return devices;
}

void check_options(const DataParallelOptions& options) {
  for (const c10::Device device : options.devices) {
    if (device.type() == options.devices.front().type()) continue;
    throw UsageError("DataParallel: devices " + options.devices.front().str() + " and " +
                         device.str() + " are of different types",
                     "replicas run on devices of one type");
  }
  if (options.replicas != 0 && options.replicas != static_cast<int64_t>(options.devices.size())) {
    throw UsageError("DataParallel: " + std::to_string(options.replicas) + " replicas, but " +
                         counted(options.devices.size(), "device"),
                     "0 is one for each device: core or GPU");
  }
  if (options.threads_per_replica < 0) {
    throw UsageError("DataParallel: threads_per_replica is " +
                     std::to_string(options.threads_per_replica) + ", expected 0 or more");
  }
}

/// What a copy is made of, but for the values of tensors. The modes of training are kept by
/// ReplicaSet.
std::string members_of(const torch::nn::Module& module, std::string_view object) {
  std::ostringstream all;
  all << module;
  // The base class has the mode, and no member of a user's.
  all << object.substr(std::min(object.size(), sizeof(torch::nn::Module)));
  for (const auto& [name, tensor] : state_dict(module)) all << ' ' << tensor.unsafeGetTensorImpl();
  return all.str();
}

}  // namespace

c10::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  if (!parameters.empty()) return parameters.front().device();
  const auto buffers = module.buffers();
  return buffers.empty() ? c10::Device(c10::kCPU) : buffers.front().device();
}

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                   DataParallelOptions options, Make make)
    : module_(std::move(module)), options_(std::move(options)), make_(std::move(make)) {
  if (!module_) throw UsageError("DataParallel: the module is null");
  if (options_.devices.empty()) options_.devices = all_devices(*module_, options_.replicas);
  check_options(options_);
  tensors_ = state_dict(*module_);
  if (!options_.output_device) options_.output_device = options_.devices.front();
  check_devices();
  if (options_.devices.size() == 1) return;
  threads_ = std::make_shared<ReplicaThreads>(options_.devices, options_.threads_per_replica);
}

void DataParallelCore::make_replicas(std::string_view members) {
  if (options_.devices.size() == 1) return;
  std::vector<std::shared_ptr<torch::nn::Module>> copies;
  for (const c10::Device device : options_.devices) {
    copies.push_back(copy_module(module_, device, make_));
  }
  replicas_.emplace(module_, std::move(copies));
  members_ = members_of(*module_, members);
  tensors_ = state_dict(*module_);
}

void DataParallelCore::check_devices() const {
  const c10::Device expected = options_.devices.front();
  for (const auto& [name, tensor] : tensors_) {
    if (tensor.device() == expected) continue;
    throw UsageError("DataParallel: the module must have its parameters and buffers on device " +
                         expected.str() + ", the first one, but '" + name + "' is on " +
                         tensor.device().str(),
                     "call module->to(\"" + expected.str() + "\")");
  }
}

void DataParallelCore::prepare(size_t count, std::string_view members) {
  check_devices();
  if (members_of(*module_, members) != members_) make_replicas(members);
  replicas_->refresh(count, /*link=*/c10::GradMode::is_enabled());
}

}  // namespace lockstep::detail
