#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

/// Shape and dtype of one sample, without the batch dimension.
struct SampleSpec {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;

  /// The spec of one row of a tensor [rows, shape...].
  static SampleSpec of_rows(const at::Tensor& rows);
  int64_t numel() const;
  /// [rows, shape...].
  std::vector<int64_t> batch_shape(int64_t rows) const;
  /// "float32 [1, 28, 28]".
  std::string describe() const;
  bool operator==(const SampleSpec&) const = default;
};

/// The rows of a CPU tensor from which a batch is gathered, in the order of a list of indices. Each
/// row is contiguous. The view refers to the tensor and the list, which must outlive it.
class RowView {
 public:
  RowView(const at::Tensor& source, std::span<const int64_t> rows);
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  const std::byte* operator[](int64_t i) const { return base_ + rows_[i] * step_; }
  int64_t row_bytes() const { return row_bytes_; }
  /// Copies the rows one after the other into a contiguous tensor of size() rows of row_bytes().
  void gather_into(const at::Tensor& out) const;

 private:
  std::span<const int64_t> rows_;
  const std::byte* base_;
  int64_t row_bytes_;
  int64_t step_;  ///< Bytes from the start of a row to that of the next.
};

/// Where a loader takes samples from. A loader gives each of its threads a clone, so `read` needs
/// no lock.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  virtual std::string name() const = 0;
  virtual int64_t size() const = 0;
  virtual SampleSpec data_spec() const = 0;
  virtual SampleSpec target_spec() const = 0;
  /// As in TensorDataset: 0 for regression, or when it is not known.
  virtual int64_t num_classes() const { return 0; }
  virtual std::vector<std::string> classes() const { return {}; }
  virtual std::unique_ptr<SampleSource> clone() const = 0;

  /// The data of all samples [size(), ...] with contiguous rows, if it is in memory. A loader then
  /// gathers directly from it. Otherwise null, and the loader calls `read`.
  virtual const at::Tensor* rows() const { return nullptr; }
  /// Writes the samples of `indices` into `data` [n, ...] and `target` [n, ...], contiguous CPU
  /// tensors of the specs above. An undefined `data` is not written.
  virtual void read(std::span<const int64_t> indices, const at::Tensor& data,
                    const at::Tensor& target) = 0;
};

/// Reads all samples of a source into memory. If the source does not know `num_classes`, it becomes
/// the largest target plus 1 for int64 targets [N], else 0.
TensorDataset read_all(SampleSource& source);

/// A TensorDataset as a source. It shares the tensors. Throws DataError unless they are CPU tensors
/// with contiguous rows and one target per sample.
std::unique_ptr<SampleSource> tensor_source(TensorDataset dataset);

/// A dataset's two parts as sources, which need not be in memory.
struct DatasetSources {
  std::unique_ptr<SampleSource> train;
  std::unique_ptr<SampleSource> test;
};

/// Like load_dataset, but the images of folder:PATH are not kept in memory: the loader's threads
/// decode them when a batch needs them. All other datasets are in memory. Takes the same names and
/// throws the same errors as load_dataset.
DatasetSources open_dataset(const std::string& name, const DatasetOptions& options = {});

}  // namespace lockstep
