// What PyTorch asks of a CUDA device while a step is traced on tensors without data, answered where there is none.
//
// Three things are put in place, none of which touches a device: the guard, which says what the current device and
// stream are; the hooks, by which ATen learns that there is CUDA, and which cuDNN; and the choice of an attention kernel,
// which PyTorch makes by the properties of the device, and Python makes here by those of the device that is planned for.

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

using Choice = int64_t (*)(const int64_t*);
Choice choose = nullptr;
long cudnn_version = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return cudnn_version; }
  long versionRuntimeCuDNN() const override { return cudnn_version; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }  // CUDNN_BN_MIN_EPSILON
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

Guard guard;
Hooks hooks;

// In the order of `Attention` in cuda.py. Sizes may be symbols, of which no more is asked than what decides:
// a sequence of 2 stands for any longer one, and one of 3 for another of these.
int64_t attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                  double dropout, bool causal, std::optional<double>, bool grouped) {
  auto size = [](const at::Tensor& x, int64_t dim) { return x.sym_size(dim).guard_int(__FILE__, __LINE__); };
  auto heads = [&](const at::Tensor& x) { return x.dim() > 2 ? size(x, -3) : 1; };
  auto in_line = [](const at::Tensor& x) { return x.sym_size(-1) == 1 || x.sym_stride(-1) == 1; };
  auto length = [&](const at::Tensor& x, int64_t many) { return x.sym_size(-2) > 1 ? many : size(x, -2); };
  const int64_t queries = length(q, 2);
  const int64_t asked[] = {
      static_cast<int64_t>(q.scalar_type()),
      q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
      q.dim(), heads(q), heads(k), heads(v),
      queries, q.sym_size(-2) == k.sym_size(-2) ? queries : length(k, 3), size(q, -1), size(k, -1), size(v, -1),
      mask.has_value(), dropout > 0.0, causal, grouped,
      in_line(q) && in_line(k) && in_line(v),
      q.requires_grad() || k.requires_grad() || v.requires_grad(),
  };
  return choose(asked);
}

const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
void* hooks_before = nullptr;

}  // namespace

// Put all three in place. The object of the hooks that there is stays where it is, since ATen keeps its address; while
// ours answer, its table of functions is that of ours, and neither has data that they read.
extern "C" void checkmate_pretend(Choice choice, long cudnn) {
  choose = choice;
  cudnn_version = cudnn;
  guard_before = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].exchange(&guard);
  void* there = const_cast<void*>(static_cast<const void*>(&at::detail::getCUDAHooks()));
  std::memcpy(&hooks_before, there, sizeof(void*));
  std::memcpy(there, static_cast<void*>(&hooks), sizeof(void*));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}

// Guard and hooks are as before; the choice stays, which without a device nobody else can make.
extern "C" void checkmate_no_longer() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(guard_before);
  void* there = const_cast<void*>(static_cast<const void*>(&at::detail::getCUDAHooks()));
  std::memcpy(there, &hooks_before, sizeof(void*));
}
