#include "env_report.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "commands.h"
#include "env_python.h"
#include "lockstep/amp/half_support.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/heap.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/backends/mpi/mpi.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/tool/cli.h"
#include "tools/lockstep/mnist_folder.h"
#include "tools/lockstep/train/placement.h"

extern char** environ;

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// The text after the colon of the first line of a /proc file that starts with `key`.
std::string proc_field(const fs::path& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const size_t colon = line.find(':');
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

/// Bytes of a /proc/meminfo line ("MemTotal:  16316412 kB").
int64_t memory_bytes(const std::string& key) {
  const auto words = split(proc_field("/proc/meminfo", key), ' ');
  return parse_int(words.front()).value_or(0) * 1024;
}

/// The instructions that oneDNN is held to; empty: it takes the best.
std::string onednn_isa() {
  return env_string("ONEDNN_MAX_CPU_ISA").value_or(env_string("DNNL_MAX_CPU_ISA").value_or(""));
}

/// What a `lockstep train` would do in this place.
Json placement_report() {
  const auto chosen = heap_chosen();
  Json report = {
      {"waiting", launch::omp_waiting_text()},
      {"freed_memory", chosen ? "by " + *chosen : "kept for the next step (Lockstep's choice)"}};
  try {
    const auto placement = choose_placement({}, "auto", read_job_environment());
    report.update({{"threads", placement.threads.threads},
                   {"threads_reason", placement.threads.reason},
                   {"processors", placement.binding.processors},
                   {"binding", placement.binding.reason}});
  } catch (const UsageError& error) {  // The launcher's variables contradict each other.
    report.update({{"threads", at::get_num_threads()},
                   {"threads_reason", std::string("LibTorch's own; ") + error.what()},
                   {"processors", Json::array()},
                   {"binding", "none"}});
  }
  return report;
}

/// How fast the CPU is in 16 bits, by dtype.
Json half_report() {
  Json report;
  for (const auto& [name, dtype] : {std::pair{"bfloat16", at::kBFloat16}, {"float16", at::kHalf}}) {
    const HalfSupport support = half_support(c10::kCPU, dtype);
    report[name] = {{"fast", support.fast}, {"reason", support.reason}};
  }
  return report;
}

Json cpu_report() {
  utsname system{};
  ::uname(&system);
  std::string model = proc_field("/proc/cpuinfo", "model name");
  if (model.empty()) model = system.machine;
  const auto quota = processor_quota();
  return {{"model", model},
          {"architecture", system.machine},
          {"cores", static_cast<int>(std::thread::hardware_concurrency())},
          {"usable_cores", static_cast<int>(allowed_processors().size())},
          {"quota", quota ? Json(*quota) : Json()},
          {"onednn_isa", onednn_isa()},
          {"capability", at::get_cpu_capability()},
          {"half", half_report()},
          {"memory_bytes", memory_bytes("MemTotal")},
          {"available_bytes", memory_bytes("MemAvailable")},
          {"system", std::string(system.sysname) + " " + system.release}};
}

/// NVIDIA GPUs that the driver shows, whatever LibTorch was built for.
std::vector<std::string> driver_gpus() {
  std::vector<std::string> models;
  std::error_code ignored;
  for (const auto& gpu : fs::directory_iterator("/proc/driver/nvidia/gpus", ignored)) {
    models.push_back(proc_field(gpu.path() / "information", "Model"));
  }
  return models;
}

int cuda_devices() {
  return at::hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
}

bool libtorch_has_cuda() {
  return fs::exists(libtorch_folder() / "lib" / "libtorch_cuda.so");
}

Json devices_report() {
  Json devices = Json::array();
  devices.push_back({{"device", "cpu"}, {"name", cpu_report()["model"]}, {"usable", true}});
  const auto models = driver_gpus();
  const int usable = cuda_devices();
  for (int i = 0; i < std::max<int>(usable, static_cast<int>(models.size())); ++i) {
    const std::string name = i < static_cast<int>(models.size()) ? models[i] : "NVIDIA GPU";
    devices.push_back(
        {{"device", "cuda:" + std::to_string(i)}, {"name", name}, {"usable", i < usable}});
  }
  return devices;
}

std::string address_text(const sockaddr* address) {
  const bool is_v4 = address->sa_family == AF_INET;
  if (!is_v4 && address->sa_family != AF_INET6) return {};
  sockaddr_storage storage{};
  std::memcpy(&storage, address, is_v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  return numeric_text(storage);
}

Json interfaces_report() {
  Json interfaces = Json::array();
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return interfaces;
  std::map<std::string, size_t> index;
  for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
    const auto [known, is_new] = index.try_emplace(entry->ifa_name, interfaces.size());
    if (is_new) {
      interfaces.push_back({{"name", entry->ifa_name},
                            {"up", (entry->ifa_flags & IFF_RUNNING) != 0},
                            {"loopback", (entry->ifa_flags & IFF_LOOPBACK) != 0},
                            {"addresses", Json::array()}});
    }
    const std::string text = entry->ifa_addr ? address_text(entry->ifa_addr) : std::string();
    if (!text.empty()) interfaces[known->second]["addresses"].push_back(text);
  }
  ::freeifaddrs(list);
  return interfaces;
}

/// The launchers' variables that are set, by name.
Json launcher_report() {
  static const std::vector<std::string> kExact = {
      "RANK",       "LOCAL_RANK",       "WORLD_SIZE",     "LOCAL_WORLD_SIZE",
      "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",      "ROLE_WORLD_SIZE",
      "ROLE_NAME",  "OMP_NUM_THREADS",  "OMP_WAIT_POLICY"};
  static const std::vector<std::string> kPrefixes = {
      "MASTER_",   "TORCHELASTIC_", "SLURM_",  "OMPI_", "PMIX_", "GLOO_", "NCCL_",
      "LOCKSTEP_", "CUDA_VISIBLE_", "ONEDNN_", "DNNL_", "GOMP_", "KMP_",  "MKL_"};
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals);
    bool wanted = std::find(kExact.begin(), kExact.end(), name) != kExact.end();
    for (const auto& prefix : kPrefixes) wanted = wanted || name.rfind(prefix, 0) == 0;
    if (wanted && equals != std::string::npos) variables[name] = text.substr(equals + 1);
  }
  std::string launcher = "none";
  if (variables.count("OMPI_COMM_WORLD_RANK")) launcher = "openmpi";
  if (variables.count("SLURM_PROCID")) {
    launcher = is_slurm_step(env_string) ? "slurm" : "none (the shell of a Slurm allocation)";
  }
  if (variables.count("RANK") && variables.count("WORLD_SIZE")) {
    launcher = variables.count("TORCHELASTIC_RUN_ID") ? "torchrun or lockstep run" : "environment";
  }
  return {{"name", launcher}, {"variables", variables}};
}

Json python_report(const std::optional<PythonFound>& python) {
  if (!python) return nullptr;
  return {{"path", python->path.string()},
          {"version", python->version},
          {"torch", python->torch_version},
          {"torch_is_linked_one", python->linked_torch}};
}

Json item(const std::string& what, const std::string& means, const std::string& how) {
  return {{"what", what}, {"means", means}, {"how", how}};
}

Json missing_report(const std::optional<PythonFound>& python) {
  Json missing = Json::array();
  const std::string setup = "run scripts/setup.sh, or set LOCKSTEP_PYTHON";
  if (!driver_gpus().empty() && !libtorch_has_cuda()) {
    missing.push_back(item("a LibTorch with CUDA", "the GPUs of this machine are not used",
                           "set LOCKSTEP_TORCH to a CUDA build (PyPI's default Linux wheel is one) "
                           "and build again"));
  }
  if (libtorch_has_cuda() && cuda_devices() == 0) {
    missing.push_back(item("a CUDA device", "LibTorch is a CUDA build, but all runs on the CPU",
                           "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"));
  }
  for (const auto& backend : available_backends()) {
    if (!backend.available) {
      missing.push_back(item("backend " + backend.name, backend.reason, backend.remedy));
    }
  }
  if (!python || python->torch_version.empty()) {
    missing.push_back(item("Python with torch", "no `bench --compare-python`", setup));
  } else if (!python->linked_torch) {
    missing.push_back(item("a Python whose torch is the linked LibTorch",
                           "comparisons with Python are between two versions", setup));
  }
  if (!find_mnist_folder()) {
    missing.push_back(
        item("MNIST", "`--dataset digits`, built in, needs no file",
             "`lockstep train --dataset mnist --download` fetches it, or set LOCKSTEP_DATA_DIR "
             "to the folder that holds mnist/"));
  }
  return missing;
}

std::string utc_now() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

/// What the command says, in the order in which it says it.
Json environment_report() {
  const auto python = find_python();
  Json backends = Json::array();
  for (const auto& backend : available_backends()) {
    if (backend.available) backends.push_back(backend.name);
  }
  Json report;
  report["lockstep"] = {{"version", LOCKSTEP_VERSION},
                        {"compiler", std::string("g++ ") + __VERSION__},
                        {"built_with_libtorch", TORCH_VERSION}};
  report["libtorch"] = {{"version", TORCH_VERSION},
                        {"path", libtorch_folder().string()},
                        {"cuda_build", libtorch_has_cuda()},
                        {"threads", at::get_num_threads()}};
  report["python"] = python_report(python);
  report["backends"] = backends;
  report["mpi"] = mpi::version();
  report["devices"] = devices_report();
  report["cpu"] = cpu_report();
  report["placement"] = placement_report();
  report["interfaces"] = interfaces_report();
  report["launcher"] = launcher_report();
  report["data"] = {{"mnist", find_mnist_folder().value_or(fs::path()).string()}};
  report["missing"] = missing_report(python);
  return report;
}

/// A value that has no names within it.
std::string text_of(const std::string& name, const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_integer() && name.ends_with("bytes")) return human_bytes(value);
  if (value.is_array()) {
    std::string all;
    for (const Json& one : value) all += (all.empty() ? "" : ", ") + text_of("", one);
    return all.empty() ? "none" : all;
  }
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  return text.empty() || value.is_null() ? "none" : text;
}

/// A line for each value, and below a line what is in it.
std::string lines_of(const Json& report, const std::string& indent) {
  std::string text;
  for (const auto& [name, value] : report.items()) {
    const std::string begin = indent + (report.is_array() ? "-" : name);
    const bool is_list = value.is_array() && !value.empty() && value[0].is_object();
    if (value.is_object() || is_list) {
      text += begin + "\n" + lines_of(value, indent + "  ");
    } else {
      text += begin + std::string(begin.size() < 24 ? 24 - begin.size() : 1, ' ') +
              text_of(name, value) + "\n";
    }
  }
  return text;
}

}  // namespace

int env_command(const std::vector<std::string>& args) {
  bool json = false;
  Cli cli("lockstep env",
          "Shows what this machine and this build offer: versions, backends, devices, network "
          "interfaces, the launcher's variables, and what is missing and how to get it.");
  cli.flag("--json", json, "One JSON object on standard output");
  cli.example("lockstep env", "Read it, or put it into a bug report");
  cli.example("lockstep env --json | jq .backends", "For a script");
  if (!cli.parse(args)) return 0;

  const Json report = environment_report();
  print(json ? report.dump(2) + "\n" : lines_of(report, ""));
  return 0;
}

Json machine_context() {
  const Json cpu = cpu_report();
  double load[3] = {0, 0, 0};
  ::getloadavg(load, 3);
  return {{"cpu", cpu["model"]},
          {"cores", cpu["cores"]},
          {"usable_cores", cpu["usable_cores"]},
          {"capability", cpu["capability"]},
          {"memory_bytes", cpu["memory_bytes"]},
          {"system", cpu["system"]},
          {"lockstep", LOCKSTEP_VERSION},
          {"libtorch", TORCH_VERSION},
          {"load_average", load[0]},
          {"date", utc_now()}};
}

}  // namespace lockstep::tool
