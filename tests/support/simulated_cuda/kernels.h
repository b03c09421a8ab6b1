// How a kernel of the device runs on the CPU: over aliases of its tensors, in order of its stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <list>
#include <set>
#include <string>
#include <vector>

#include "device.h"

namespace simulated {

using at::Tensor;

inline bool is_ours(c10::Device device) {
  return device.type() == TYPE;
}

// An op that begins on the current stream of a device: what it reads and writes is held against what ran before.
struct Launch {
  std::string name;
  int device, stream;

  Launch(std::string name, int device, double bytes);
  void reads(const Tensor& t) const;
  void writes(const Tensor& t) const;
};

// Tensors of the CPU over the memory of a device's, and the way back for what a kernel of the CPU has made.
class Aliases {
 public:
  explicit Aliases(const Launch& launch) : name(launch.name), device(launch.device), stream(launch.stream) {}
  Tensor on_cpu(const Tensor& t);
  Tensor on_device(const Tensor& t);
  void take_over_sizes(); // of what the kernel has resized

 private:
  std::string name;
  int device, stream;
  std::vector<std::pair<Tensor, Tensor>> pairs; // of the CPU, of the device
  std::list<std::pair<c10::Storage, c10::Storage>> storages;
};

// Any op, by the CPU's kernel.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// What the library that does an op takes at its first, and keeps.
void take_workspaces(const Launch& launch, const std::vector<c10::IValue>& arguments);

// Where a convolution runs by another kernel than the CPU's, the workspace of that.
std::optional<c10::DataPtr> by_another_kernel(const Launch& launch, const std::vector<c10::IValue>& arguments);

// The three kernels of attention and their choice; which ops these are.
std::set<std::string> register_attention(torch::Library& aten);

// What cuDNN keeps beside the statistics, by our guess.
inline int64_t reserve_bytes(int64_t elements) {
  return elements / 8;
}

} // namespace simulated
