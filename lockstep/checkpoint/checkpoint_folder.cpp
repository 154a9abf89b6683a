#include "lockstep/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/checkpoint_lock.h"
#include "lockstep/checkpoint/sharded_save.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kAsidePrefix = ".tmp-";
constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kLatest = "latest";

/// The step in "step-00001234"; none for any other name.
std::optional<int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const auto step = parse_int(name.substr(kStepPrefix.size()));
  return step && *step >= 0 && checkpoint_name(*step) == name ? step : std::nullopt;
}

/// How file systems without symbolic links refuse one: FAT, SMB, FUSE, VirtualBox's folders.
bool has_no_links(const std::error_code& error) {
  constexpr std::array kRefusals = {EPERM, ENOTSUP, ENOSYS, EINVAL, EROFS};
  return std::find(kRefusals.begin(), kRefusals.end(), error.value()) != kRefusals.end();
}

/// A folder under construction, removed with its content unless it has been moved away.
class AsideFolder {
 public:
  AsideFolder(const fs::path& parent, const std::string& name)
      : path_(make_unique_folder(parent / (std::string(kAsidePrefix) + name))) {}
  ~AsideFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  AsideFolder(const AsideFolder&) = delete;
  AsideFolder& operator=(const AsideFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// Gives a folder its name, and takes it away again unless `keep()` was called: then the name is as
/// it was before.
class Publication {
 public:
  /// A folder of the same step (written before a resume) is replaced in one system call, so that
  /// there is no moment without either.
  Publication(const fs::path& aside, const fs::path& target) : aside_(aside), target_(target) {
    if (!fs::exists(target)) {
      fs::rename(aside, target);
    } else if (exchange()) {
      exchanged_ = true;
    } else {
      // This file system cannot exchange; the older checkpoints stand in for a moment.
      fs::remove_all(target);
      fs::rename(aside, target);
    }
  }
  ~Publication() {
    if (kept_) return;
    std::error_code ignored;
    if (exchanged_) {
      ::renameat2(AT_FDCWD, aside_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE);
    } else {
      fs::rename(target_, aside_, ignored);
    }
  }
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;
  void keep() { kept_ = true; }

 private:
  bool exchange() const {
    if (::renameat2(AT_FDCWD, aside_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) {
      return true;
    }
    if (errno == EINVAL || errno == ENOSYS) return false;
    throw SystemError("cannot replace " + target_.string(), errno);
  }

  fs::path aside_;
  fs::path target_;
  bool exchanged_ = false;
  bool kept_ = false;
};

}  // namespace

std::string checkpoint_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return std::string(kStepPrefix) + digits;
}

CheckpointFolder::CheckpointFolder(fs::path path, int64_t keep, CheckpointHash hash)
    : path_(std::move(path)), keep_(keep), hash_(hash) {}

/// Made and taken anew where it was removed meanwhile.
void CheckpointFolder::take() {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error) throw SystemError("cannot make this folder", error.value());
  if (lock_ && !lock_->is_in_place()) lock_.reset();
  if (!lock_) lock_ = CheckpointLock::acquire(path_);
}

void CheckpointFolder::prepare() {
  try {
    take();
    for (const auto& entry : fs::directory_iterator(path_)) {
      if (entry.path().filename().string().starts_with(kAsidePrefix)) fs::remove_all(entry.path());
    }
    const fs::path latest = path_ / kLatest;
    if (fs::exists(latest) && !fs::is_symlink(latest)) {
      throw Error(latest.string() + " is no symbolic link, so no checkpoint can renew it");
    }
    AsideFolder probe(path_, "probe");
    write_file_atomically(probe.path() / "probe", "can this be written?\n");
    make_link(probe.path() / "probe", probe.path() / kLatest);
  } catch (const FolderInUseError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError("cannot write checkpoints to " + path_.string() + ": " + error.what(),
                          "choose a folder that you may write to with --checkpoint-dir");
  }
}

void CheckpointFolder::supersede_after(int64_t step) {
  take();
  for (const fs::path& folder : list()) {
    if (*step_of(folder) <= step) continue;
    const fs::path aside = path_ / ("superseded-" + folder.filename().string());
    std::error_code error;
    fs::remove_all(aside, error);
    fs::rename(folder, aside, error);
    if (error) {
      throw CheckpointError("cannot rename " + folder.string() + " to " + aside.string() + ": " +
                            error.message());
    }
    log_warning("checkpoint " + folder.string() + " is later than step " + std::to_string(step) +
                ", from which this run goes on; it is now " + aside.filename().string());
  }
}

fs::path CheckpointFolder::write(const Checkpoint& checkpoint) {
  const ProcessGroup alone;
  detail::ShardedSave(
      alone, {checkpoint.info, whole_shards(checkpoint.model), whole_shards(checkpoint.state)})
      .write(alone, *this);
  return path_ / checkpoint_name(checkpoint.info.step);
}

fs::path CheckpointFolder::write(int64_t step, const std::function<void(const fs::path&)>& fill) {
  const fs::path target = path_ / checkpoint_name(step);
  try {
    take();
    AsideFolder aside(path_, target.filename().string());
    fill(aside.path());
    Publication publication(aside.path(), target);
    fsync_path(path_);
    point_latest_at(target);
    publication.keep();
  } catch (const FolderInUseError&) {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError("cannot write checkpoint " + target.string() + ": " + error.what());
  }
  remove_old();
  return target;
}

/// False, with a warning at first, where the file system has no symbolic links.
bool CheckpointFolder::make_link(const fs::path& target, const fs::path& link) {
  std::error_code error;
  fs::create_directory_symlink(target.filename(), link, error);
  if (!error) return true;
  if (!has_no_links(error)) throw SystemError("cannot make " + link.string(), error.value());
  if (!std::exchange(told_of_links_, true)) {
    log_warning("the file system of " + path_.string() + " has no symbolic links (" +
                error.message() + "): there is no `latest`; the newest checkpoint is the " +
                std::string(kStepPrefix) + "* with the highest number");
  }
  return false;
}

/// The checkpoint is on the disk before this, and a reader does not need the link. So from its
/// rename on nothing is thrown.
void CheckpointFolder::point_latest_at(const fs::path& target) {
  const fs::path link = path_ / (std::string(kAsidePrefix) + std::string(kLatest));
  fs::remove(link);
  if (!make_link(target, link)) return;
  std::error_code error;
  fs::rename(link, path_ / kLatest, error);
  if (error) {
    std::error_code ignored;
    fs::remove(link, ignored);
    throw SystemError("cannot rename " + link.string() + " to " + (path_ / kLatest).string(),
                      error.value());
  }
  try {
    fsync_path(path_);
  } catch (const SystemError& failure) {
    log_warning(failure.what());
  }
}

void CheckpointFolder::remove_old() {
  if (keep_ <= 0) return;
  const auto all = list();
  for (size_t i = static_cast<size_t>(keep_); i < all.size(); ++i) {
    // Renamed first: a reader must not find a checkpoint that is half removed.
    const fs::path aside = path_ / (std::string(kAsidePrefix) + all[i].filename().string());
    std::error_code error;
    fs::remove_all(aside, error);
    fs::rename(all[i], aside, error);
    if (!error) fs::remove_all(aside, error);
    if (error)
      log_warning("cannot remove old checkpoint " + all[i].string() + ": " + error.message());
  }
}

std::vector<fs::path> CheckpointFolder::list() const {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(path_, missing)) {
    const auto step = step_of(entry.path());
    if (step && entry.is_directory()) found.emplace_back(*step, entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<fs::path> folders;
  for (auto& [step, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

std::optional<std::pair<fs::path, Checkpoint>> CheckpointFolder::read_newest() const {
  const auto all = list();
  if (all.empty()) return std::nullopt;
  for (const fs::path& folder : all) {
    try {
      return std::pair{folder, read_checkpoint(folder)};
    } catch (const DamagedCheckpointError& error) {
      const std::string text = error.what();
      log_warning(text.substr(0, text.find('\n')) + "; trying the one before it");
    }
  }
  throw detail::all_damaged(path_, all.size());
}

DamagedCheckpointError detail::all_damaged(const fs::path& folder, size_t checkpoints) {
  return DamagedCheckpointError("every checkpoint in " + folder.string() + " is damaged (" +
                                    std::to_string(checkpoints) + ")",
                                "start anew with --resume none and another --checkpoint-dir");
}

}  // namespace lockstep
