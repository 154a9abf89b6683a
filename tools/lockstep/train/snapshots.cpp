#include "tools/lockstep/train/snapshots.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/log.h"
#include "lockstep/launch/generation_folder.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

/// Of this folder and of no other one that had its name before.
std::string folder_key(const fs::path& folder) {
  struct statx found {};
  const bool is_there = ::statx(AT_FDCWD, folder.c_str(), 0, STATX_INO | STATX_BTIME, &found) == 0;
  std::error_code ignored;
  std::string text = fs::weakly_canonical(folder, ignored).string();
  if (is_there) {
    for (const int64_t part :
         {static_cast<int64_t>(found.stx_ino), static_cast<int64_t>(found.stx_btime.tv_sec),
          static_cast<int64_t>(found.stx_btime.tv_nsec)})
      text += ' ' + std::to_string(part);
  }
  return sha256_hex(text).substr(0, 16);
}

std::string shared_prefix() {
  return "lockstep-snapshots-" + std::to_string(::geteuid()) + "-";
}

/// Names the folder of checkpoints.
constexpr const char* kOwnerFile = "checkpoint-dir";

/// Snapshots whose folder of checkpoints was deleted, moved or made anew: nobody finds them again.
void remove_orphans() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/dev/shm", ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(shared_prefix()) || !fs::exists(entry.path() / kOwnerFile, ignored))
      continue;
    if (name != shared_prefix() + folder_key(read_file(entry.path() / kOwnerFile)))
      fs::remove_all(entry.path(), ignored);
  }
}

/// Its name can be guessed, so that another user may have made it.
void make_own(const fs::path& folder) {
  if (::mkdir(folder.c_str(), 0700) == 0) return;
  struct stat found {};
  const bool is_own = errno == EEXIST && ::lstat(folder.c_str(), &found) == 0 &&
                      S_ISDIR(found.st_mode) && found.st_uid == ::geteuid();
  if (is_own) return;
  throw UsageError("--snapshot-every: cannot make " + folder.string(),
                   "leave it out; --checkpoint-every writes to the disk");
}

}  // namespace

std::optional<CheckpointFolder> snapshot_folder(const RunConfig& config) {
  if (config.snapshot_every == 0) return std::nullopt;
  fs::path path = "/dev/shm/" + shared_prefix() + folder_key(config.checkpoint_dir);
  if (config.checkpoint_dir.empty()) {
    const auto of_launcher = env_string(launch::kGenerationFolderVariable);
    if (!of_launcher || launch::GenerationFolder(*of_launcher).first().of_hosts)
      return std::nullopt;  // One that all hosts share is needed.
    path = fs::path(*of_launcher) / "snapshots";
  }
  return CheckpointFolder(path, /*keep=*/1, checkpoint_hash(config.checkpoint_hash));
}

void prepare_snapshots(const RunConfig& config) {
  const auto snapshots = snapshot_folder(config);
  if (!snapshots) return;
  remove_orphans();
  make_own(snapshots->path());
  if (!config.checkpoint_dir.empty())
    write_file_atomically(snapshots->path() / kOwnerFile,
                          fs::absolute(config.checkpoint_dir).string());
  if (config.resume == "auto" && is_newer(*snapshots, CheckpointFolder(config.checkpoint_dir)))
    return;
  for (const auto& entry : fs::directory_iterator(snapshots->path()))
    if (entry.path().filename() != kOwnerFile) fs::remove_all(entry.path());
}

bool is_newer(const CheckpointFolder& a, const CheckpointFolder& b) {
  const auto in_a = a.list(), in_b = b.list();
  if (in_a.empty() || in_b.empty()) return !in_a.empty();
  const std::string name_a = in_a.front().filename(), name_b = in_b.front().filename();
  return std::pair(name_a.size(), name_a) > std::pair(name_b.size(), name_b);
}

void remove_old_snapshots(const RunConfig& config) {
  const auto snapshots = snapshot_folder(config);
  if (!snapshots || is_newer(*snapshots, CheckpointFolder(config.checkpoint_dir))) return;
  std::error_code ignored;
  fs::remove_all(snapshots->path(), ignored);
}

void write_snapshot_to_disk(const RunConfig& config) {
  try {
    const auto snapshots = snapshot_folder(config);
    if (!snapshots) return;
    CheckpointFolder folder(config.checkpoint_dir, config.keep_checkpoints);
    if (is_newer(*snapshots, folder)) {
      const StoredCheckpoint newest = open_checkpoint(snapshots->list().front());
      check_files(newest);
      const fs::path written = folder.write(newest.info.step, [&](const fs::path& target) {
        for (const auto& entry : fs::directory_iterator(newest.folder)) {
          const fs::path copy = target / entry.path().filename();
          fs::copy_file(entry.path(), copy);
          fsync_path(copy);
        }
        fsync_path(target);
      });
      log_info("the last snapshot is saved as " + written.string());
    }
    remove_old_snapshots(config);
  } catch (const std::exception& error) {
    log_warning(std::string("a snapshot stays in memory, where the same command finds it: ") +
                error.what());
  }
}

}  // namespace lockstep
