#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/tool/cli.h"
#include "lockstep/tool/output_file.h"
#include "tools/lockstep/commands.h"
#include "tools/lockstep/report/run_data.h"

namespace lockstep::tool {

int report_command(const std::vector<std::string>& args) {
  std::string output = "report.html";
  std::vector<std::string> paths;
  Cli cli("lockstep report",
          "Writes runs as one HTML page: curves, where the time of steps goes by rank, failures, "
          "configuration, and how the runs differ. Results of `lockstep bench` too: both sides, "
          "ratios, targets, machine and versions. It needs no network.");
  cli.example("lockstep report runs/a runs/b",
              "Of `lockstep train --logger jsonl --log-dir runs/a`");
  cli.example("lockstep report bench.json -o bench.html",
              "Of `lockstep bench step --compare-python --output bench.json`");
  cli.option("-o,--output", output, "The page's file; - is standard output", "FILE");
  cli.positional("RUN...", paths,
                 "Folders of --log-dir, JSON lines of --metrics-file, or an --output of lockstep "
                 "bench");
  if (!cli.parse(args)) return kExitSuccess;
  if (output.empty()) throw UsageError("--output: a file's name is needed", "--output report.html");
  const bool to_stdout = output == "-";
  if (!to_stdout) check_output_file("--output", output, "report.html");
  std::vector<nlohmann::ordered_json> shown;
  for (const auto& path : paths) {
    std::error_code ignored;
    const bool is_folder = std::filesystem::is_directory(path, ignored);
    if (std::filesystem::equivalent(is_folder ? path + "/metrics.jsonl" : path, output, ignored))
      throw UsageError("--output " + output + ": this is the run itself",
                       "name another file for the page");
    shown.push_back(read_shown(path));
  }
  if (!to_stdout) write_file_atomically(output, report_page(shown));
  print(to_stdout ? report_page(shown) : output + "\n");
  return kExitSuccess;
}

}  // namespace lockstep::tool
