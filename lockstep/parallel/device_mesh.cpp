#include "lockstep/parallel/device_mesh.h"

#include <algorithm>
#include <cstdint>
#include <regex>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

constexpr int kRest = -1;

MeshDimension parse_dimension(const std::string& text, const std::string& whole) {
  static const std::regex form(R"((\w+)=(-?\d{1,9}))");
  std::smatch parts;
  if (!std::regex_match(text, parts, form)) {
    throw UsageError("mesh '" + whole + "': '" + text + "' is not of the form NAME=SIZE",
                     "give each dimension a name and a size: dp=2,pp=2");
  }
  const int size = std::stoi(parts[2]);
  if (size != kRest && (size < 1 || size > 1'000'000)) {
    throw UsageError(
        "mesh '" + whole + "': dimension " + parts[1].str() + " has size " + std::to_string(size),
        "a size is 1 or more, or -1 for what the other dimensions leave");
  }
  return {parts[1], size};
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
  std::set<std::string> seen;
  for (const MeshDimension& dimension : dimensions)
    if (!seen.insert(dimension.name).second)
      throw UsageError("mesh '" + text + "': dimension " + dimension.name + " comes twice");
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
    : all_(group), dimensions_(std::move(dimensions)), coordinate_(dimensions_.size()) {
  if (dimensions_.empty()) throw UsageError("DeviceMesh: a mesh needs at least one dimension");
  check_names(dimensions_, text());
  for (const MeshDimension& dimension : dimensions_) {
    if (dimension.size < 1)
      throw UsageError(
          "DeviceMesh: dimension " + dimension.name + " has size " + std::to_string(dimension.size),
          "a size is 1 or more; init_device_mesh takes -1 for what others leave");
  }
  check_product(dimensions_, group.size(), text());
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
  std::vector<std::string> names;
  for (const MeshDimension& one : dimensions_) {
    if (one.name == dimension) return names.size();
    names.push_back(one.name);
  }
  throw UsageError("mesh '" + text() + "': " + unknown_word("dimension", dimension, names));
}

int DeviceMesh::size() const {
  return dimensions_.empty() ? 0 : static_cast<int>(product_of(dimensions_));
}

int DeviceMesh::size(const std::string& dimension) const {
  return dimensions_[index_of(dimension)].size;
}

bool DeviceMesh::has(const std::string& dimension) const {
  return std::ranges::any_of(dimensions_, [&](const auto& one) { return one.name == dimension; });
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
      "name one: get_group(\"dp\")");
}

ProcessGroup DeviceMesh::flatten(const std::vector<std::string>& dimensions) const {
  std::set<size_t> wanted;
  for (const std::string& dimension : dimensions) wanted.insert(index_of(dimension));
  int color = 0, key = 0, size = 1;
  for (size_t i = 0; i < dimensions_.size(); ++i) {
    int& number = wanted.contains(i) ? key : color;
    number = number * dimensions_[i].size + coordinate_[i];
    if (wanted.contains(i)) size *= dimensions_[i].size;
  }
  if (size == all_.size()) return all_;
  return wanted.size() == 1 ? groups_[*wanted.begin()] : all_.split(color, key);
}

DeviceMesh init_device_mesh(const ProcessGroup& group, const std::string& text) {
  return DeviceMesh(group, parse_mesh(text, group.size()));
}

}  // namespace lockstep
