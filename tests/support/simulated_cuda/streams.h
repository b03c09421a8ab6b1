// Streams and events of the simulated device: what ran before what, by vector clocks, and copies as late as they may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr int DEVICES = 2;
constexpr int POOLED = 32; // streams of a device beside the default one; the next ones are these again, as on CUDA

// A stream's number: its device, and which of it. Number d is the default stream of device d.
inline int number_of(int device, int64_t id) {
  return static_cast<int>(id) * DEVICES + device;
}
inline int device_of(int stream) {
  return stream % DEVICES;
}
inline bool is_default(int stream) {
  return stream < DEVICES;
}

// For each stream, up to which of its operations one has been waited for.
using Clock = std::vector<int64_t>;

struct Event {
  int stream = 0;
  int64_t tail = 0; // how many tasks the stream had been given
  Clock clock;
  double seconds = 0; // of the device's time
};

// One lock for the whole device: it simulates order, not speed.
std::recursive_mutex& device_lock();

// What a test may switch off: finding accesses that nothing orders, and running copies late.
extern bool clocks_on;
extern bool late_on;

// The next operation of a stream begins: it follows what the host has waited for. `seconds` of the device's time.
void begin(int stream, double seconds);

// The operation that has begun reads or writes memory.
// Throws where another stream's access may not be over, or where it has not happened yet.
void access(int stream, const void* begin, size_t bytes, bool writes, const std::string& name);

// Nothing is known of this memory any more: it went back to where it came from.
void forget(const void* begin, size_t bytes);

// The host itself is about to change memory, or to let go of it: all that uses it must have been waited for.
void host_writes(const void* begin, size_t bytes, const std::string& name);

// Run a copy when it must have run, and on the default stream at once.
void give(int stream, std::function<void()> copy);
// Have run what a stream was given.
void catch_up(int stream);

Event record(int stream);
void wait(int stream, const Event& event);
bool is_done(const Event& event);
void host_waits(const Event& event);
void synchronize(int stream);
void synchronize_device(int device);
bool is_idle(int stream);

int64_t tasks_given(); // copies that ran later than they were given
int64_t orders_checked(); // pairs of accesses by two streams

} // namespace simulated
