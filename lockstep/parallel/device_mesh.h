#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// One dimension of a mesh: "dp" of size 2.
struct MeshDimension {
  std::string name;
  int size = 1;
  bool operator==(const MeshDimension&) const = default;
};

/// Reads "dp=2,pp=2", the slowest dimension first. A size of -1 (at most one) is what the others
/// leave of `ranks`. Throws UsageError for text of another form, a name that comes twice, a size
/// below 1, and sizes whose product is not `ranks`. The error says what would fit.
std::vector<MeshDimension> parse_mesh(const std::string& text, int ranks);

/// "dp=2,pp=2".
std::string mesh_text(const std::vector<MeshDimension>& dimensions);

/// Ranks in a grid with named dimensions, as torch.distributed.device_mesh: ranks are laid out row
/// by row, so the last dimension varies fastest. A value: copies share the groups. One thread at a
/// time, as for ProcessGroup. The World closes the groups.
class DeviceMesh {
 public:
  DeviceMesh() = default;
  /// Splits `group` along each dimension. A collective of `group`. A dimension of all ranks keeps
  /// `group` itself. Throws UsageError for a size below 1, and unless the sizes
  /// multiply to the group's size.
  DeviceMesh(const ProcessGroup& group, std::vector<MeshDimension> dimensions);

  const std::vector<MeshDimension>& dimensions() const { return dimensions_; }
  int ndim() const { return static_cast<int>(dimensions_.size()); }
  /// How many ranks the mesh has.
  int size() const;
  int size(const std::string& dimension) const;
  bool has(const std::string& dimension) const;
  /// "dp=2,pp=2".
  std::string text() const { return mesh_text(dimensions_); }

  /// Where this rank stands, a number for each dimension.
  const std::vector<int>& get_coordinate() const { return coordinate_; }
  /// This rank's place along a dimension: its rank in get_group(dimension). Throws UsageError with
  /// the nearest name for an unknown dimension, as all that take one.
  int get_local_rank(const std::string& dimension) const;
  /// The ranks that differ from this one in that dimension only, in its order.
  const ProcessGroup& get_group(const std::string& dimension) const;
  /// The same for a mesh of one dimension. Throws UsageError for others.
  const ProcessGroup& get_group() const;
  /// The ranks that differ from this one in these dimensions only, row by row, as of PyTorch's
  /// flattened mesh. Of no dimension: this rank alone. A collective of the mesh.
  ProcessGroup flatten(const std::vector<std::string>& dimensions) const;

 private:
  size_t index_of(const std::string& dimension) const;

  ProcessGroup all_;
  std::vector<MeshDimension> dimensions_;
  std::vector<int> coordinate_;
  std::vector<ProcessGroup> groups_;  ///< One for each dimension.
};

/// PyTorch's name for parse_mesh and DeviceMesh together. A collective of `group`.
DeviceMesh init_device_mesh(const ProcessGroup& group, const std::string& text);

}  // namespace lockstep
