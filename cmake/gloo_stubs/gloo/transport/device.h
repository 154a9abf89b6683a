#pragma once
// See ../../README.md.
namespace gloo::transport {
class Device {
 public:
  virtual ~Device() = 0;
};
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = default;
};
}  // namespace gloo::transport
