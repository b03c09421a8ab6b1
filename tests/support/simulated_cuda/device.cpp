// The device as PyTorch sees it: a guard for devices, streams and events, hooks, and generators.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <utility>

namespace simulated {

namespace {

thread_local int device_now = 0;
thread_local int stream_now[DEVICES] = {0, 1}; // by device
std::map<uintptr_t, size_t> pinned;
int64_t unpinned_early = 0;

c10::Device ours(int device) {
  return c10::Device(TYPE, static_cast<c10::DeviceIndex>(device));
}
int index_of(c10::Device device) {
  int index = device.has_index() ? device.index() : device_now;
  TORCH_CHECK(0 <= index && index < DEVICES, "CUDA error: invalid device ordinal (simulated): ", index);
  return index;
}
c10::Stream as_stream(int number) {
  return c10::Stream(c10::Stream::UNSAFE, ours(device_of(number)), number / DEVICES);
}
int number(const c10::Stream& stream) {
  return number_of(index_of(stream.device()), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    int before = device_now;
    device_now = index_of(device);
    return ours(before);
  }
  c10::Device getDevice() const override {
    return ours(device_now);
  }
  void setDevice(c10::Device device) const override {
    device_now = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_now = device.has_index() ? device.index() : device_now;
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_stream(stream_now[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<unsigned> made[DEVICES];
    int index = index_of(device);
    return as_stream(number_of(index, 1 + made[index]++ % POOLED));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int& now = stream_now[index_of(stream.device())];
    int before = now;
    now = number(stream);
    return as_stream(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto* made = static_cast<Event*>(*event);
    *event = made = made ? made : new Event;
    *made = simulated::record(number(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      wait(number(stream), *static_cast<Event*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    return !event || is_done(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      host_waits(*static_cast<Event*>(event));
    }
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    return 1e3 * (static_cast<Event*>(end)->seconds - static_cast<Event*>(begin)->seconds);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(number(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(number(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? device_now : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), number(stream));
  }
};

// Counter-based, as CUDA's: its state is a seed and how many numbers were drawn.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit Generator(int device) : GeneratorImpl(ours(device), c10::DispatchKeySet(KEY)) {}

  static constexpr c10::DeviceType device_type() {
    return TYPE;
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_cpu(),
                "RNG state is wrong size");
    const auto* bytes = static_cast<const char*>(state.data());
    memcpy(&seed_, bytes, 8);
    memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    auto* bytes = state.mutable_data_ptr<uint8_t>();
    memcpy(bytes, &seed_, 8);
    memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    set_state(*other->get_state());
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return clone();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

const at::Generator& default_generator(int device) {
  static const at::Generator all[DEVICES] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all[device];
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? malloc(bytes) : nullptr;
    if (at) {
      std::lock_guard guard(device_lock());
      pinned[reinterpret_cast<uintptr_t>(at)] = bytes;
    }
    return {at, at, &give_back, c10::Device(c10::kCPU)};
  }
  static void give_back(void* at) { // as CachingHostAllocator: once all copies have ended
    std::lock_guard guard(device_lock());
    auto found = pinned.find(reinterpret_cast<uintptr_t>(at));
    if (found != pinned.end()) {
      for (int device = 0; device < DEVICES; device++) {
        synchronize_device(device);
      }
      forget(at, found->second);
      pinned.erase(found);
      free(at);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
} pinned_memory;

#ifdef SIMULATED_PRIVATEUSE1
using HooksInterface = at::PrivateUse1HooksInterface;
#else
using HooksInterface = at::CUDAHooksInterface;
#endif

struct Hooks final : HooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device_now);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    device_now = index_of(ours(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    int before = device_now;
    device_now = index_of(ours(device));
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned(memory);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return ours(device_now);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? device_now : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_now : device);
  }
#ifndef SIMULATED_PRIVATEUSE1
  bool hasCUDA() const override {
    return true;
  }
  bool hasCuDNN() const override {
    return true;
  }
  bool compiledWithCuDNN() const override {
    return true;
  }
  long versionCuDNN() const override {
    return 91900;
  }
  long versionRuntimeCuDNN() const override {
    return 91900;
  }
  double batchnormMinEpsilonCuDNN() const override {
    return 0; // CUDNN_BN_MIN_EPSILON
  }
  bool supportsDilatedConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsDepthwiseConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override {
    return true;
  }
  int getNumGPUs() const override {
    return DEVICES;
  }
  c10::DeviceIndex current_device() const override {
    return static_cast<c10::DeviceIndex>(device_now);
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return current_allocator();
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? device_now : device);
  }
  std::string showConfig() const override {
    return "simulated CUDA";
  }
#endif
};

int take_its_place() {
  static const Guard guard;
  static Hooks hooks;
  c10::impl::DeviceGuardImplRegistrar(TYPE, &guard);
#ifdef SIMULATED_PRIVATEUSE1
  at::RegisterPrivateUse1HooksInterface(&hooks);
#else
  // A PyTorch built for CUDA has a guard, hooks and an allocator of its own, one for the CPU has hooks that refuse all.
  // The last guard and allocator hold. Hooks are made once, when somebody first asks, which `import torch` does: the
  // object that it has made becomes one of ours, which is as large, since neither has a field.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  auto* asked = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  memcpy(static_cast<void*>(asked), static_cast<const void*>(&hooks), sizeof(void*)); // its table of functions
#endif
  c10::SetAllocator(TYPE, current_allocator(), 255);
  return 0;
}
const int done = take_its_place();

void push_generator(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  int64_t device = stack->back().toInt();
  stack->back() = default_generator(static_cast<int>(device));
}
TORCH_LIBRARY(simulated_cuda, library) { // the one thing that Python cannot have by ctypes
  library.def("generator(int device) -> Generator");
  library.impl("generator", c10::DispatchKey::CompositeExplicitAutograd,
               torch::CppFunction::makeFromBoxedFunction<&push_generator>());
}

} // namespace

int current_device() {
  return device_now;
}
int current_stream(int device) {
  return stream_now[device];
}

Draws take_draws(const std::optional<at::Generator>& given, int device, int64_t elements) {
  const at::Generator& generator = given && given->defined() ? *given : default_generator(device);
  auto* counter = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(counter, "Expected a 'cuda' device type for generator but found 'cpu'");
  std::lock_guard guard(counter->mutex_);
  Draws draws{counter->seed_, counter->offset_};
  int64_t at_once = 132 * 2048; // threads of an H100, each of which draws four
  counter->offset_ += 4 * (1 + (std::max<int64_t>(elements, 1) - 1) / (4 * at_once));
  return draws;
}

bool is_pinned(const void* memory) {
  std::lock_guard guard(device_lock());
  auto at = reinterpret_cast<uintptr_t>(memory);
  auto next = pinned.upper_bound(at);
  return next != pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

OnDevice::OnDevice(int device) : before(device_now) {
  device_now = device;
}
OnDevice::~OnDevice() {
  device_now = before;
}

} // namespace simulated

using namespace simulated;

extern "C" {

int simulated_device() {
  return device_now;
}
int simulated_exchange_device(int device) {
  int before = device_now;
  if (device >= 0) {
    device_now = device;
  }
  return before;
}
double simulated_elapsed(const void* begin, const void* end) { // ms
  return 1e3 * (static_cast<const Event*>(end)->seconds - static_cast<const Event*>(begin)->seconds);
}
int64_t simulated_stream(int device) {
  return stream_now[device] / DEVICES;
}
void simulated_set_stream(int device, int64_t id) {
  device_now = device;
  stream_now[device] = number_of(device, id);
}
void simulated_synchronize(int device) {
  synchronize_device(device);
}
void simulated_pin(void* at, size_t bytes) {
  std::lock_guard guard(device_lock());
  pinned[reinterpret_cast<uintptr_t>(at)] = bytes;
}
// 0, or 1 where it was not pinned
int simulated_unpin(void* at) {
  std::lock_guard guard(device_lock());
  auto found = pinned.find(reinterpret_cast<uintptr_t>(at));
  if (found == pinned.end()) {
    return 1;
  }
  try {
    host_writes(at, found->second, "cudaHostUnregister");
  } catch (const c10::Error&) {
    unpinned_early++;
  }
  for (int device = 0; device < DEVICES; device++) {
    synchronize_device(device);
  }
  forget(at, found->second);
  pinned.erase(found);
  return 0;
}
// How often memory was let go of that a copy might still use, since this was asked last.
int64_t simulated_unpinned_early() {
  return std::exchange(unpinned_early, 0);
}
// Whether the host has waited for all that uses memory.
int simulated_host_has_waited(void* at, size_t bytes) {
  try {
    host_writes(at, bytes, "the host");
  } catch (const c10::Error&) {
    return 0;
  }
  return 1;
}
int64_t simulated_late_tasks() {
  return tasks_given();
}
int64_t simulated_orders_checked() {
  return orders_checked();
}
}
