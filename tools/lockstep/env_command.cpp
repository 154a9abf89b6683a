#include <algorithm>
#include <cstdio>
#include <string>

#include "commands.h"
#include "env_report.h"
#include "lockstep/base/text.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

std::string join_json(const Json& words, const std::string& when_empty) {
  const std::string text = join(words.get<std::vector<std::string>>(), ", ");
  return text.empty() ? when_empty : text;
}

void line(const std::string& name, const std::string& text) {
  std::printf("  %-12s %s\n", name.c_str(), text.c_str());
}

std::string text_of(const Json& value) {
  return value.get<std::string>();
}

void print_versions(const Json& report) {
  std::puts("Versions");
  const Json& lockstep = report["lockstep"];
  line("Lockstep", text_of(lockstep["version"]) + ", built by " + text_of(lockstep["compiler"]));
  const Json& torch = report["libtorch"];
  line("LibTorch", text_of(torch["version"]) +
                       (torch["cuda_build"].get<bool>() ? ", CUDA build" : ", CPU build") + ", " +
                       text_of(torch["path"]));
  const std::string mpi = text_of(report["mpi"]);
  line("MPI", mpi.empty() ? "none in this build" : mpi);
  const Json& python = report["python"];
  if (python.is_null()) {
    line("Python", "none found");
    return;
  }
  std::string about = text_of(python["version"]) + ", " + text_of(python["path"]);
  if (text_of(python["torch"]).empty()) {
    about += ", without torch";
  } else {
    about +=
        ", torch " + text_of(python["torch"]) +
        (python["torch_is_linked_one"].get<bool>() ? " (the linked one)" : " (not the linked one)");
  }
  line("Python", about);
}

std::string quota_text(const Json& quota) {
  if (quota.is_null()) return {};
  char text[64];
  std::snprintf(text, sizeof text, ", time of %.3g by quota", quota.get<double>());
  return text;
}

/// "fast (avx512_bf16)", "no faster than float32: ...".
std::string half_text(const Json& support) {
  const std::string reason = text_of(support["reason"]);
  return support["fast"].get<bool>() ? "fast (" + reason + ")"
                                     : "no faster than float32: " + reason;
}

void print_machine(const Json& report) {
  std::puts("Machine");
  const Json& cpu = report["cpu"];
  line("CPU", text_of(cpu["model"]) + ", " + std::to_string(cpu["usable_cores"].get<int>()) +
                  " of " + std::to_string(cpu["cores"].get<int>()) + " cores usable" +
                  quota_text(cpu["quota"]) + ", kernels for " + text_of(cpu["capability"]));
  for (const char* dtype : {"bfloat16", "float16"}) {
    line(dtype, half_text(cpu["half"][dtype]) + "; see --precision");
  }
  const Json& placement = report["placement"];
  line("Threads", std::to_string(placement["threads"].get<int>()) + " per rank (" +
                      text_of(placement["threads_reason"]) + "); see --threads");
  line("Waiting", text_of(placement["waiting"]));
  line("Freed memory", text_of(placement["freed_memory"]));
  line("Binding", text_of(placement["binding"]) + "; see --bind-to");
  line("oneDNN", text_of(cpu["onednn_isa"]).empty()
                     ? "the processor's best instructions; ONEDNN_MAX_CPU_ISA limits them"
                     : "no more than " + text_of(cpu["onednn_isa"]) + ", by ONEDNN_MAX_CPU_ISA");
  line("Memory", human_bytes(cpu["memory_bytes"].get<uint64_t>()) + ", " +
                     human_bytes(cpu["available_bytes"].get<uint64_t>()) + " available");
  line("System", text_of(cpu["system"]) + " " + text_of(cpu["architecture"]));
  for (const auto& device : report["devices"]) {
    line("Device", text_of(device["device"]) + ": " + text_of(device["name"]) +
                       (device["usable"].get<bool>() ? "" : " (not usable by this LibTorch)"));
  }
  line("Backends", join_json(report["backends"], "none"));
  for (const auto& one : report["interfaces"]) {
    line("Interface", text_of(one["name"]) + (one["up"].get<bool>() ? "" : " (down)") + ": " +
                          join_json(one["addresses"], "no address"));
  }
  const std::string mnist = text_of(report["data"]["mnist"]);
  line("MNIST", mnist.empty() ? "not found" : mnist);
}

void print_launcher(const Json& launcher) {
  std::printf("Launcher: %s\n", text_of(launcher["name"]).c_str());
  for (const auto& [name, value] : launcher["variables"].items()) {
    std::printf("  %s=%s\n", name.c_str(), text_of(value).c_str());
  }
}

void print_missing(const Json& missing) {
  if (missing.empty()) {
    std::puts("Missing: nothing");
    return;
  }
  std::puts("Missing");
  for (const auto& one : missing) {
    std::printf("  %s: %s\n    %s\n", text_of(one["what"]).c_str(), text_of(one["means"]).c_str(),
                text_of(one["how"]).c_str());
  }
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
  if (json) {
    print(report.dump(2) + "\n");
    return 0;
  }
  print_versions(report);
  print_machine(report);
  print_launcher(report["launcher"]);
  print_missing(report["missing"]);
  return 0;
}

}  // namespace lockstep::tool
