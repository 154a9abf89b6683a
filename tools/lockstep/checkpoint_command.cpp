#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/stored_checkpoint.h"
#include "lockstep/data/dtype_names.h"
#include "lockstep/data/tensor_reader.h"
#include "lockstep/tool/cli.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/commands.h"

namespace lockstep::tool {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::ordered_json;
using Words = std::vector<std::string>;

constexpr const char* kSources =
    "A safetensors or .pt file, or a folder: of safetensors files (Hugging Face's, also sharded by "
    "torch.distributed.checkpoint), of torch.distributed.checkpoint (.metadata), or of `lockstep "
    "train`, of which the newest checkpoint is taken";

/// The newest checkpoint of a run's folder; any other path as it is.
fs::path newest_in(const fs::path& source) {
  const auto all = CheckpointFolder(source).list();
  return all.empty() ? source : all.front();
}

/// One of Lockstep, whose description is then read and compared with its checksum.
std::optional<StoredCheckpoint> own_checkpoint(const fs::path& source) {
  if (!fs::exists(source / "state.json")) return std::nullopt;
  return open_checkpoint(source);
}

/// Compares the hashes of a checkpoint of Lockstep. All other sources have none, or are compared
/// while they are read.
void expect_whole(const fs::path& source) {
  if (const auto own = own_checkpoint(source)) check_files(*own);
}

Json json_of(const PtFile::Value& value) {
  return std::visit(
      [](const auto& held) -> Json {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return nullptr;
        } else {
          return held;
        }
      },
      value);
}

uint64_t elements_of(const TensorInfo& tensor) {
  uint64_t elements = 1;
  for (const int64_t size : tensor.shape) elements *= static_cast<uint64_t>(size);
  return elements;
}

Json row_of(const TensorInfo& tensor, bool json) {
  Json row = {{"name", tensor.name}, {"dtype", name_of_dtype(&DtypeNames::torch, tensor.dtype)}};
  if (json) {
    row["shape"] = tensor.shape;
  } else {
    row["shape"] = c10::str(at::IntArrayRef(tensor.shape));
  }
  row["bytes"] = elements_of(tensor) * at::elementSize(tensor.dtype);
  return row;
}

/// Prints the rows as a table, or the document with them as JSON.
void print_rows(Json document, const char* key, const BenchRows& rows, bool json) {
  document[key] = rows;
  print(json ? document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
             : bench_table(rows));
}

int inspect(const Words& args) {
  std::string source_path;
  bool json = false;
  Cli cli("lockstep checkpoint inspect",
          "Lists the tensors of a checkpoint or file of weights: name, dtype, shape, bytes. Reads "
          "no values.");
  cli.example("lockstep checkpoint inspect runs/a");
  cli.example("lockstep checkpoint inspect model.pt --json");
  cli.positional("SOURCE", source_path, kSources);
  cli.flag("--json", json, "Print one JSON object, with the metadata and what is no tensor");
  if (!cli.parse(args)) return 0;
  const fs::path newest = newest_in(source_path);
  const auto own = own_checkpoint(newest);
  const TensorReader source(newest);
  const std::string format = own ? "lockstep" : source.format();
  BenchRows rows;
  uint64_t bytes = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    rows.push_back(row_of(tensor, json));
    bytes += rows.back()["bytes"].get<uint64_t>();
  }
  Json values = Json::object();
  for (const auto& [name, value] : source.values()) values[name] = json_of(value);
  if (own) values.update({{"step", own->info.step}, {"epoch", own->info.epoch}});
  print_rows({{"path", source_path},
              {"format", format},
              {"bytes", bytes},
              {"metadata", source.metadata()},
              {"values", values}},
             "tensors", rows, json);
  if (json) return 0;
  print(format + ": " + counted(static_cast<int64_t>(rows.size()), "tensor") + ", " +
        human_bytes(bytes) + ", " + counted(static_cast<int64_t>(values.size()), "other value") +
        "\n");
  return 0;
}

using Damage = std::vector<std::pair<std::string, std::string>>;

/// Of one checkpoint or file: what is damaged, and how.
Damage damage_of(const fs::path& path) {
  try {
    if (path.filename().string().starts_with("step-") || fs::exists(path / "state.json")) {
      read_checkpoint(path);  // It compares hashes.
      return {};
    }
    return TensorReader(path).damage();
  } catch (const Error& error) {
    return {{"", error.what()}};
  }
}

int verify(const Words& args) {
  std::string path;
  bool json = false;
  Cli cli("lockstep checkpoint verify",
          "Reads all of a checkpoint or file and says what is damaged. Hashes and checksums are "
          "compared where there are such: in Lockstep's checkpoints, .pt files and folders of "
          "torch.distributed.checkpoint. Of safetensors the structure is checked. Exit code 1: "
          "something is damaged.");
  cli.example("lockstep checkpoint verify runs/a", "All checkpoints of a run");
  cli.positional("SOURCE", path, kSources);
  cli.flag("--json", json, "Print one JSON object instead of text");
  if (!cli.parse(args)) return 0;
  std::vector<fs::path> checked = CheckpointFolder(path).list();
  if (checked.empty()) checked.push_back(path);
  BenchRows rows;
  for (const fs::path& each : checked) {
    for (const auto& [name, what] : damage_of(each))
      rows.push_back({{"path", each.string()}, {"tensor", name}, {"damage", what}});
  }
  if (json) {
    print_rows({{"path", path}, {"checked", checked.size()}}, "damaged", rows, json);
  } else if (rows.empty()) {
    print("nothing is damaged in " + path + "\n");
  } else {  // No table: each is a sentence that names its file, with a hint in a line of its own.
    for (const Json& row : rows) {
      const auto tensor = row["tensor"].get<std::string>();
      print((tensor.empty() ? "" : tensor + ": ") + row["damage"].get<std::string>() + "\n");
    }
  }
  return rows.empty() ? kExitSuccess : kExitFailure;
}

/// What differs between two tensors of a name. Null where nothing does.
Json difference_of(const TensorInfo& a, const TensorInfo& b, const TensorReader& source_a,
                   const TensorReader& source_b) {
  const auto row = [&](const char* what, Json in_a, Json in_b) {
    return Json{{"name", a.name}, {"what", what}, {"a", std::move(in_a)}, {"b", std::move(in_b)}};
  };
  if (a.shape != b.shape)
    return row("shape", c10::str(at::IntArrayRef(a.shape)), c10::str(at::IntArrayRef(b.shape)));
  if (a.dtype != b.dtype)
    return row("dtype", name_of_dtype(&DtypeNames::torch, a.dtype),
               name_of_dtype(&DtypeNames::torch, b.dtype));
  const at::Tensor in_a = source_a.read(a.name);
  const at::Tensor in_b = source_b.read(a.name);
  if (in_a.nbytes() == 0 ||
      std::memcmp(in_a.const_data_ptr(), in_b.const_data_ptr(), in_a.nbytes()) == 0)
    return nullptr;
  const auto wide = in_a.is_complex() ? at::kComplexDouble : at::kDouble;
  const double largest = in_a.to(wide).sub(in_b.to(wide)).abs().max().item<double>();
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", largest);
  return row("values", nullptr, std::string("max abs difference ") + text);
}

int diff(const Words& args) {
  std::string path_a;
  std::string path_b;
  bool json = false;
  Cli cli("lockstep checkpoint diff",
          "Compares the tensors of two checkpoints or files: which only one has, and which differ "
          "in shape, dtype or values. Exit code 1: they differ.");
  cli.example("lockstep checkpoint diff runs/a/step-00000100 runs/a/step-00000200");
  cli.positional("A", path_a, kSources);
  cli.positional("B", path_b, "The same");
  cli.flag("--json", json, "Print one JSON object instead of the table");
  if (!cli.parse(args)) return 0;
  for (std::string* path : {&path_a, &path_b}) {
    *path = newest_in(*path);
    expect_whole(*path);
  }
  const TensorReader source_a(path_a);
  const TensorReader source_b(path_b);
  std::map<std::string, std::array<const TensorInfo*, 2>> names;
  for (const TensorInfo& tensor : source_a.tensors()) names[tensor.name][0] = &tensor;
  for (const TensorInfo& tensor : source_b.tensors()) names[tensor.name][1] = &tensor;
  BenchRows rows;
  for (const auto& [name, of] : names) {
    Json row;
    if (of[0] && of[1]) {
      row = difference_of(*of[0], *of[1], source_a, source_b);
    } else {
      row = {{"name", name},
             {"what", "presence"},
             {"a", of[0] ? "there" : "missing"},
             {"b", of[1] ? "there" : "missing"}};
    }
    if (!row.is_null()) rows.push_back(row);
  }
  print_rows({{"a", path_a}, {"b", path_b}, {"compared", names.size()}}, "differences", rows, json);
  if (!json && rows.empty())
    print("the same " + counted(static_cast<int64_t>(names.size()), "tensor") + "\n");
  return rows.empty() ? kExitSuccess : kExitFailure;
}

constexpr const char* kConvertsTo =
    "Writes the tensors of a checkpoint or file in another format; of a checkpoint of Lockstep, "
    "the "
    "model's. Values that are no tensors are left out, with a note.";
constexpr const char* kMerges =
    "Writes all tensors of a folder, whose files hold them or shards of them, into one file.";
constexpr const char* kReshards =
    "Writes a new folder of so many safetensors files, each with a part of every tensor, as "
    "torch.distributed.checkpoint has them of so many ranks. It reads them at any number of ranks.";

/// "convert", "merge", which writes one file, and "reshard", which writes a folder of shards.
int convert(const std::string& action, const Words& args) {
  std::string source_path;
  std::string target;
  std::string to = action == "reshard" ? "hf" : "";
  int64_t shards = action == "reshard" ? 2 : 0;
  Cli cli("lockstep checkpoint " + action, action == "merge"     ? kMerges
                                           : action == "reshard" ? kReshards
                                                                 : kConvertsTo);
  cli.positional("SOURCE", source_path, kSources);
  cli.positional("TARGET", target, action == "merge" ? "The file" : "The file, or a new folder");
  Words formats = tensor_formats();
  if (action == "reshard") {
    cli.example("lockstep checkpoint reshard model.pt dcp-folder --shards 4");
    cli.option("--shards", shards, "How many files, at most 128", {.min = 1, .max = 128});
  } else if (action == "merge") {
    formats.pop_back();  // hf
    cli.example("lockstep checkpoint merge hf-folder model.safetensors");
  } else {
    formats.push_back("dcp");
    cli.example("lockstep checkpoint convert dcp-folder model.pt");
    cli.example("lockstep checkpoint convert runs/a hf-folder --to hf");
  }
  if (action != "reshard")
    cli.option("--to", to, join(formats, ", ") + "; without it as the name of TARGET says",
               "FORMAT");
  if (!cli.parse(args)) return 0;
  if (to.empty()) to = format_of_name(target);
  if (to.empty()) throw UsageError("TARGET " + target + " does not tell its format", "give --to");
  expect_one_of("--to", to, formats);
  std::error_code ignored;
  if (fs::equivalent(source_path, target, ignored))
    throw UsageError("SOURCE and TARGET are the same: " + target, "name another TARGET");
  const fs::path newest = newest_in(source_path);
  expect_whole(newest);
  const TensorReader source(newest, /*weights_only=*/true);
  // torch.distributed.checkpoint reads the folder of safetensors by its HuggingFaceStorageReader.
  convert_tensors(source, target, to == "dcp" ? "hf" : to, shards);
  std::string text =
      target + ": " + counted(static_cast<int64_t>(source.tensors().size()), "tensor");
  if (!source.values().empty())
    text += "; left out: " + counted(static_cast<int64_t>(source.values().size()), "value") +
            " that are no tensors";
  print(text + "\n");
  return 0;
}

}  // namespace

int checkpoint_command(const Words& args) {
  const std::string action = args.empty() ? "" : args[0];
  const Words rest(args.begin() + (args.empty() ? 0 : 1), args.end());
  if (action == "inspect") return inspect(rest);
  if (action == "verify") return verify(rest);
  if (action == "diff") return diff(rest);
  if (action == "convert" || action == "reshard" || action == "merge") return convert(action, rest);
  const Words actions = {"inspect", "verify", "diff", "convert", "reshard", "merge"};
  if (!action.empty() && action[0] != '-') expect_one_of("ACTION", action, actions);
  Cli cli("lockstep checkpoint",
          "Looks into checkpoints and files of weights, Lockstep's and Python's, and converts "
          "them. 'lockstep checkpoint ACTION --help' lists an action's flags.");
  std::string none;
  cli.positional("ACTION", none,
                 "inspect: lists tensors; verify: says what is damaged; diff: compares two; "
                 "convert: writes another format; reshard: cuts tensors into shards; merge: joins "
                 "shards into one file",
                 /*required=*/false, actions);
  cli.example("lockstep checkpoint inspect runs/a");
  cli.example("lockstep checkpoint convert runs/a model.pt");
  if (!cli.parse(args)) return 0;
  throw UsageError("no ACTION given; expected one of " + join(actions, ", "),
                   "lockstep checkpoint --help");
}

}  // namespace lockstep::tool
