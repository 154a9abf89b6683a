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

/// Shape and dtype of one sample, without the batch's dimension.
struct SampleSpec {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;

  /// Of each row of [rows, shape...].
  static SampleSpec of_rows(const at::Tensor& rows);
  int64_t numel() const;
  /// [rows, shape...].
  std::vector<int64_t> batch_shape(int64_t rows) const;
  /// "float32 [1, 28, 28]".
  std::string describe() const;
  bool operator==(const SampleSpec&) const = default;
};

/// Rows of a CPU tensor, each of them contiguous, in the order of a list: what a batch is gathered
/// from. It points at both. They must outlive it.
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
  /// As TensorDataset's: 0 for regression, or where it is not known.
  virtual int64_t num_classes() const { return 0; }
  virtual std::vector<std::string> classes() const { return {}; }
  virtual std::unique_ptr<SampleSource> clone() const = 0;

  /// All samples' data [size(), ...], its rows contiguous, when they are in memory: then a loader
  /// gathers straight from it. Otherwise null, and `read` is used.
  virtual const at::Tensor* rows() const { return nullptr; }
  /// Writes the samples of `indices` into `data` [n, ...] (not when it is undefined) and `target`
  /// [n, ...], contiguous CPU tensors of the specs above.
  virtual void read(std::span<const int64_t> indices, const at::Tensor& data,
                    const at::Tensor& target) = 0;
};

/// All samples of a source in memory. Where the source does not know `num_classes`, it is the
/// largest target and one for int64 targets [N], else 0.
TensorDataset read_all(SampleSource& source);

/// A TensorDataset as a source. Shares its tensors. Throws DataError when they are not CPU tensors
/// of contiguous rows with one target per sample.
std::unique_ptr<SampleSource> tensor_source(TensorDataset dataset);

/// A data set's two parts as sources, which need not be in memory.
struct DatasetSources {
  std::unique_ptr<SampleSource> train;
  std::unique_ptr<SampleSource> test;
};

/// load_dataset without the memory: images of folder:PATH are decoded when a batch needs them, in
/// the loader's threads. All other sets are in memory. Takes names and throws as load_dataset.
DatasetSources open_dataset(const std::string& name, const DatasetOptions& options = {});

}  // namespace lockstep
