// The rules of PyTorch's caching allocator on CUDA, over memory of the host.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DispatchKey.h>

#include <string>

#include "streams.h"

namespace simulated {

using PoolId = c10::MempoolId_t;

// What the device is to PyTorch: CUDA, or one that it knows nothing of but what `torch.accelerator` asks for.
#ifdef SIMULATED_PRIVATEUSE1
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
#else
constexpr auto TYPE = c10::DeviceType::CUDA;
constexpr auto KEY = c10::DispatchKey::CUDA;
#endif

extern bool poison_on; // new and freed memory is filled with ones: NaN, -1, true
extern bool expandable_on; // expandable_segments:True

// Of the device that is current, and of each.
c10::Allocator* allocator_of(int device);
c10::Allocator* current_allocator();

int current_device();
int current_stream(int device);

// Memory may be used on another stream than its own until that has come so far.
void record_stream(void* memory, int stream);

} // namespace simulated
