// What kernels need of the device: its generators, and memory of the host that it may read by itself.
#pragma once

#include <ATen/core/Generator.h>

#include "allocator.h"

namespace simulated {

// A piece of a generator's sequence, as a kernel is handed it: it draws number i of it by `uniform`.
struct Draws {
  uint64_t seed, offset;
};
// Take as many numbers as a kernel on CUDA takes for so many elements.
Draws take_draws(const std::optional<at::Generator>& generator, int device, int64_t elements);

inline uint64_t mixed(uint64_t x) { // splitmix64: Steele, Lea and Flood, OOPSLA 2014
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
inline double uniform(const Draws& draws, uint64_t i) { // [0, 1)
  return static_cast<double>(mixed(mixed(mixed(draws.seed) ^ draws.offset) ^ i) >> 11) * 0x1.0p-53;
}

bool is_pinned(const void* memory);

// Which device is current on this thread, for a block.
struct OnDevice {
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;

 private:
  int before;
};

} // namespace simulated
