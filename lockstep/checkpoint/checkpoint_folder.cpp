#include "lockstep/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
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

/// The step in "step-00001234"; none for any other name.
std::optional<int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const auto step = parse_int(name.substr(kStepPrefix.size()));
  return step && *step >= 0 && checkpoint_name(*step) == name ? step : std::nullopt;
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

/// Gives a folder its name. A folder of the same step (written before a resume) is replaced in one
/// system call, so that there is no moment without either.
void publish(const fs::path& aside, const fs::path& target) {
  if (fs::exists(target)) {
    if (::renameat2(AT_FDCWD, aside.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0)
      return;
    if (errno != EINVAL && errno != ENOSYS)
      throw SystemError("cannot replace " + target.string(), errno);
    // This file system cannot exchange; the older checkpoints stand in for a moment.
    fs::remove_all(target);
  }
  fs::rename(aside, target);
}

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
    publish(aside.path(), target);
    fsync_path(path_);
  } catch (const FolderInUseError&) {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError("cannot write checkpoint " + target.string() + ": " + error.what());
  }
  point_latest_at(target);
  remove_old();
  return target;
}

/// A reader does not need the link, and some file systems have none. One that cannot be renewed
/// must not name an older checkpoint.
void CheckpointFolder::point_latest_at(const fs::path& target) {
  const fs::path latest = path_ / "latest";
  const fs::path link = path_ / (std::string(kAsidePrefix) + "latest");
  std::error_code error, ignored;
  fs::remove(link, ignored);
  fs::create_directory_symlink(target.filename(), link, error);
  if (!error) fs::rename(link, latest, error);
  if (!error) return;
  fs::remove(link, ignored);
  fs::remove(latest, ignored);
  if (!std::exchange(told_of_links_, true))
    log_warning("cannot link " + latest.string() + " to the newest checkpoint: " + error.message() +
                "; it is the step-* with the highest number");
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
  if (list().empty()) return std::nullopt;
  const StoredCheckpoint found = load_newest(path_);
  return std::pair{found.folder, detail::whole(found)};
}

}  // namespace lockstep
