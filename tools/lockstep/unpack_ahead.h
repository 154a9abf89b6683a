#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::tool {

/// Unpacks the gzip files of a data set on a thread of its own while LibTorch is loaded, which
/// takes longer. Ranks that are forks of this process then share them. Ranks that are executed
/// (with CUDA or OMP_PROC_BIND, or under `lockstep run`) each do it for themselves.
class UnpackAhead {
 public:
  /// `words`: the command line, subcommand first. Nothing happens unless it seems to read such
  /// files: `train` and `eval` that name mnist or fashion-mnist and no --config.
  explicit UnpackAhead(const std::vector<std::string>& words);
  ~UnpackAhead();
  UnpackAhead(const UnpackAhead&) = delete;
  UnpackAhead& operator=(const UnpackAhead&) = delete;

  struct File {
    std::string path;
    std::unique_ptr<std::byte[]> content;
    size_t size = 0;
  };
  /// Waits for the thread. A file that could not be unpacked, that is not what its header says, or
  /// that is larger than 200 MB, is left out: whoever reads it says why.
  const std::vector<File>& files();

 private:
  std::vector<File> files_;
  std::thread thread_;
};

}  // namespace lockstep::tool
