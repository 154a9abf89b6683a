#pragma once

#include <memory>
#include <string>

#include "lockstep/data/dataset.h"
#include "lockstep/data/sample_source.h"

namespace lockstep {

/// A data set's two parts as sources, which need not be in memory.
struct DatasetSources {
  std::unique_ptr<SampleSource> train;
  std::unique_ptr<SampleSource> test;
};

/// load_dataset without the memory: images of folder:PATH are decoded when a batch needs them, in
/// the loader's threads. All other sets are in memory. Takes names and throws as load_dataset.
DatasetSources open_dataset(const std::string& name, const DatasetOptions& options = {});

}  // namespace lockstep
