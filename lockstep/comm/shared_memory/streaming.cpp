#include "lockstep/comm/shared_memory/streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace lockstep::shm {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;

void stream_line(std::byte* to, const std::byte* from) {
  auto* lines = reinterpret_cast<__m128i*>(to);
  const auto* source = reinterpret_cast<const __m128i*>(from);
  const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(lines, a);
  _mm_stream_si128(lines + 1, b);
  _mm_stream_si128(lines + 2, c);
  _mm_stream_si128(lines + 3, d);
}

}  // namespace

void stream_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) stream_line(to + at, from + at);
  std::memcpy(to + at, from + at, bytes - at);
}

void end_stream() {
  _mm_sfence();
}

void end_loads() {
  _mm_lfence();
}

#else

void stream_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

void end_stream() {}
void end_loads() {}

#endif

}  // namespace lockstep::shm
