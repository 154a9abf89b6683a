#include "lockstep/comm/device_mesh.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <optional>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

constexpr int kRest = -1;

std::vector<std::string> names_of(const std::vector<MeshDimension>& dimensions) {
  std::vector<std::string> names;
  for (const MeshDimension& dimension : dimensions) names.push_back(dimension.name);
  return names;
}

bool is_name(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

MeshDimension parse_dimension(const std::string& text, const std::string& whole) {
  const size_t equals = text.find('=');
  const std::string number = equals == std::string::npos ? std::string() : text.substr(equals + 1);
  const auto size = parse_int(number);
  MeshDimension dimension{text.substr(0, equals), 0};
  if (!is_name(dimension.name) || !size) {
    throw UsageError("mesh '" + whole + "': '" + text + "' is not of the form NAME=SIZE",
                     "give each dimension a name and a size: dp=2,pp=2");
  }
  if (*size != kRest && (*size < 1 || *size > 1'000'000)) {
    throw UsageError("mesh '" + whole + "': dimension " + dimension.name + " has size " + number,
                     "a size is 1 or more, or -1 for what the other dimensions leave");
  }
  dimension.size = static_cast<int>(*size);
  return dimension;
}

/// The product of the sizes that are given.
int64_t product_of(const std::vector<MeshDimension>& dimensions) {
  int64_t product = 1;
  for (const MeshDimension& dimension : dimensions) {
    if (dimension.size != kRest) product = std::min<int64_t>(product * dimension.size, 1LL << 40);
  }
  return product;
}

void check_names(const std::vector<MeshDimension>& dimensions, const std::string& text) {
  std::vector<std::string> seen;
  for (const MeshDimension& dimension : dimensions) {
    if (std::find(seen.begin(), seen.end(), dimension.name) != seen.end()) {
      throw UsageError("mesh '" + text + "': dimension " + dimension.name + " comes twice");
    }
    seen.push_back(dimension.name);
  }
}

void check_product(const std::vector<MeshDimension>& dimensions, int ranks,
                   const std::string& text) {
  if (product_of(dimensions) == ranks) return;
  throw UsageError("mesh '" + text + "' has room for " + counted(product_of(dimensions), "rank") +
                       ", but there are " + std::to_string(ranks),
                   "the sizes must multiply to the number of ranks; -1 for one of them takes what "
                   "the others leave");
}

}  // namespace

std::vector<MeshDimension> parse_mesh(const std::string& text, int ranks) {
  std::vector<MeshDimension> dimensions;
  for (const std::string& part : split(text, ',')) {
    dimensions.push_back(parse_dimension(part, text));
  }
  check_names(dimensions, text);
  const auto is_rest = [](const MeshDimension& dimension) { return dimension.size == kRest; };
  const auto rest = std::find_if(dimensions.begin(), dimensions.end(), is_rest);
  if (rest != dimensions.end()) {
    if (std::find_if(rest + 1, dimensions.end(), is_rest) != dimensions.end()) {
      throw UsageError("mesh '" + text + "': only one dimension can be -1");
    }
    const int64_t given = product_of(dimensions);
    if (ranks % given != 0) {
      throw UsageError("mesh '" + text + "': " + counted(ranks, "rank") + " cannot be divided by " +
                           std::to_string(given) + ", the product of the sizes that are given",
                       "take a number of ranks that is a multiple of " + std::to_string(given));
    }
    rest->size = static_cast<int>(ranks / given);
  }
  check_product(dimensions, ranks, text);
  return dimensions;
}

std::string mesh_text(const std::vector<MeshDimension>& dimensions) {
  std::vector<std::string> parts;
  for (const MeshDimension& dimension : dimensions) {
    parts.push_back(dimension.name + "=" + std::to_string(dimension.size));
  }
  return join(parts, ",");
}

DeviceMesh::DeviceMesh(const ProcessGroup& group, std::vector<MeshDimension> dimensions)
    : dimensions_(std::move(dimensions)), coordinate_(dimensions_.size()) {
  if (!group) throw UsageError("DeviceMesh: the process group is null");
  if (dimensions_.empty()) throw UsageError("DeviceMesh: a mesh needs at least one dimension");
  check_names(dimensions_, text());
  for (const MeshDimension& dimension : dimensions_) {
    if (dimension.size < 1)
      throw UsageError(
          "DeviceMesh: dimension " + dimension.name + " has size " + std::to_string(dimension.size),
          "a size is 1 or more; init_device_mesh takes -1 for what others leave");
  }
  check_product(dimensions_, group.size(), text());
  for (int rank = 0; rank < group.size(); ++rank) ranks_.push_back(rank);
  int rest = group.rank();
  for (size_t i = dimensions_.size(); i-- > 0;) {
    coordinate_[i] = rest % dimensions_[i].size;
    rest /= dimensions_[i].size;
  }
  int stride = group.size();
  for (size_t i = 0; i < dimensions_.size(); ++i) {
    stride /= dimensions_[i].size;
    const int first = group.rank() - coordinate_[i] * stride;
    const bool all = dimensions_[i].size == group.size();
    groups_.push_back(all ? group : group.split(/*color=*/first, /*key=*/coordinate_[i]));
  }
}

size_t DeviceMesh::index_of(const std::string& dimension) const {
  for (size_t i = 0; i < dimensions_.size(); ++i) {
    if (dimensions_[i].name == dimension) return i;
  }
  throw UsageError("mesh '" + text() +
                   "': " + unknown_word("dimension", dimension, names_of(dimensions_)));
}

int DeviceMesh::size() const {
  return static_cast<int>(ranks_.size());
}

int DeviceMesh::size(const std::string& dimension) const {
  return dimensions_[index_of(dimension)].size;
}

bool DeviceMesh::has(const std::string& dimension) const {
  const auto is_it = [&](const MeshDimension& one) { return one.name == dimension; };
  return std::any_of(dimensions_.begin(), dimensions_.end(), is_it);
}

int DeviceMesh::get_local_rank(const std::string& dimension) const {
  return coordinate_[index_of(dimension)];
}

const ProcessGroup& DeviceMesh::get_group(const std::string& dimension) const {
  return groups_[index_of(dimension)];
}

const ProcessGroup& DeviceMesh::get_group() const {
  if (dimensions_.size() == 1) return groups_.front();
  throw UsageError(
      "mesh '" + text() + "' has " + counted(ndim(), "dimension") + ", and so several groups",
      "name one: get_group(\"" +
          (dimensions_.empty() ? std::string("dp") : dimensions_.back().name) + "\")");
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  std::vector<size_t> kept;
  for (const std::string& name : names) {
    kept.push_back(index_of(name));
    if (kept.size() > 1 && kept[kept.size() - 2] >= kept.back()) {
      throw UsageError("mesh '" + text() + "': a slice of " + join(names, ", ") +
                           " changes the order of the dimensions",
                       "name each dimension once, in the order of the mesh");
    }
  }
  if (kept.empty()) throw UsageError("mesh '" + text() + "': a slice names at least one dimension");
  DeviceMesh part;
  for (const size_t i : kept) {
    part.dimensions_.push_back(dimensions_[i]);
    part.coordinate_.push_back(coordinate_[i]);
    part.groups_.push_back(groups_[i]);
  }
  // Row by row: a rank stays when it stands where this one does in all other dimensions.
  for (size_t at = 0; at < ranks_.size(); ++at) {
    size_t rest = at;
    bool stays = true;
    for (size_t i = dimensions_.size(); i-- > 0;) {
      const auto place = static_cast<int>(rest % static_cast<size_t>(dimensions_[i].size));
      rest /= static_cast<size_t>(dimensions_[i].size);
      const bool is_kept = std::find(kept.begin(), kept.end(), i) != kept.end();
      stays = stays && (is_kept || place == coordinate_[i]);
    }
    if (stays) part.ranks_.push_back(ranks_[at]);
  }
  return part;
}

DeviceMesh init_device_mesh(const ProcessGroup& group, const std::string& text) {
  if (!group) throw UsageError("init_device_mesh: the process group is null");
  return DeviceMesh(group, parse_mesh(text, group.size()));
}

}  // namespace lockstep
