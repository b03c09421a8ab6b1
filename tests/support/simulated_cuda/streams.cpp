#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <map>

namespace simulated {

bool clocks_on = true;
bool late_on = true;

namespace {

struct Task {
  int64_t number;
  std::function<void()> run;
};

struct Timeline {
  Clock clock;
  std::deque<Task> waiting;
  int64_t tail = 0;
  double seconds = 0;
};

std::vector<Timeline> timelines(DEVICES * (POOLED + 1));
Clock host_clock;
int64_t given = 0;
int64_t checked = 0;

int64_t at(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) {
    into.resize(other.size());
  }
  for (size_t i = 0; i < other.size(); i++) {
    into[i] = std::max(into[i], other[i]);
  }
}

void catch_up_to(int stream, int64_t tail) {
  auto& waiting = timelines[stream].waiting;
  while (!waiting.empty() && waiting.front().number <= tail) {
    Task task = std::move(waiting.front());
    waiting.pop_front();
    task.run();
  }
}

void push(int stream, std::function<void()> run) {
  auto& line = timelines[stream];
  line.waiting.push_back({++line.tail, std::move(run)});
}

// Who used a piece of memory: the last write, and the reads since.
struct Use {
  int stream;
  int64_t time;
};
struct Piece {
  uintptr_t end;
  bool written = false;
  Use write{};
  std::vector<Use> reads;
};
std::map<uintptr_t, Piece> pieces; // by their begin; they do not overlap

// Cut the piece that goes across an address in two.
void cut(uintptr_t address) {
  auto next = pieces.upper_bound(address);
  if (next == pieces.begin()) {
    return;
  }
  auto piece = std::prev(next);
  if (piece->first < address && address < piece->second.end) {
    Piece right = piece->second;
    piece->second.end = address;
    pieces.emplace_hint(next, address, std::move(right));
  }
}

void must_follow(int stream, const Clock& clock, const Use& use, const char* what, const std::string& name) {
  if (use.stream == stream) {
    return;
  }
  checked++;
  TORCH_CHECK(
      !clocks_on || at(clock, use.stream) >= use.time,
      "Simulated device: ", name, stream < 0 ? " (the host)" : " on stream " + std::to_string(stream / DEVICES),
      " does not wait for what stream ", use.stream / DEVICES, " ", what, " the same memory before.");
}

template <typename F>
void each_piece(uintptr_t from, uintptr_t to, F&& look) {
  cut(from);
  cut(to);
  for (auto it = pieces.lower_bound(from); it != pieces.end() && it->first < to; ++it) {
    look(it->second);
  }
}

void check_write(int stream, const Clock& clock, uintptr_t from, uintptr_t to, const std::string& name) {
  each_piece(from, to, [&](const Piece& piece) {
    if (piece.written) {
      must_follow(stream, clock, piece.write, "writes to", name);
    }
    for (const Use& use : piece.reads) {
      must_follow(stream, clock, use, "reads from", name);
    }
  });
}

void erase(uintptr_t from, uintptr_t to) {
  cut(from);
  cut(to);
  pieces.erase(pieces.lower_bound(from), pieces.lower_bound(to));
}

} // namespace

std::recursive_mutex& device_lock() {
  static std::recursive_mutex lock;
  return lock;
}

void begin(int stream, double seconds) {
  std::lock_guard guard(device_lock());
  auto& line = timelines.at(stream);
  join(line.clock, host_clock);
  if (static_cast<int>(line.clock.size()) <= stream) {
    line.clock.resize(stream + 1);
  }
  line.clock[stream]++;
  line.seconds += seconds;
}

void access(int stream, const void* begin, size_t bytes, bool writes, const std::string& name) {
  if (!bytes) {
    return;
  }
  std::lock_guard guard(device_lock());
  const Clock& clock = timelines[stream].clock;
  auto from = reinterpret_cast<uintptr_t>(begin), to = from + bytes;
  Use now{stream, at(clock, stream)};
  if (writes) {
    check_write(stream, clock, from, to, name);
    erase(from, to);
    pieces.emplace(from, Piece{to, true, now, {}});
    return;
  }
  uintptr_t known = from;
  std::vector<std::pair<uintptr_t, uintptr_t>> unknown;
  cut(from);
  cut(to);
  for (auto it = pieces.lower_bound(from); it != pieces.end() && it->first < to; ++it) {
    Piece& piece = it->second;
    if (it->first > known) {
      unknown.emplace_back(known, it->first);
    }
    known = piece.end;
    if (piece.written) {
      must_follow(stream, clock, piece.write, "writes to", name);
    }
    auto mine = std::find_if(piece.reads.begin(), piece.reads.end(), [&](const Use& u) { return u.stream == stream; });
    if (mine == piece.reads.end()) {
      piece.reads.push_back(now);
    } else {
      mine->time = now.time;
    }
  }
  if (known < to) {
    unknown.emplace_back(known, to);
  }
  for (auto [a, b] : unknown) {
    pieces.emplace(a, Piece{b, false, {}, {now}});
  }
}

void forget(const void* begin, size_t bytes) {
  std::lock_guard guard(device_lock());
  auto from = reinterpret_cast<uintptr_t>(begin);
  erase(from, from + bytes);
}

void host_writes(const void* begin, size_t bytes, const std::string& name) {
  std::lock_guard guard(device_lock());
  auto from = reinterpret_cast<uintptr_t>(begin);
  check_write(-1, host_clock, from, from + bytes, name);
}

void give(int stream, std::function<void()> copy) {
  std::lock_guard guard(device_lock());
  if (is_default(stream) || !late_on) {
    catch_up(stream);
    copy();
    return;
  }
  given++;
  push(stream, std::move(copy));
}

void catch_up(int stream) {
  std::lock_guard guard(device_lock());
  catch_up_to(stream, INT64_MAX);
}

Event record(int stream) {
  std::lock_guard guard(device_lock());
  begin(stream, 0);
  const auto& line = timelines.at(stream);
  return {stream, line.tail, line.clock, line.seconds};
}

void wait(int stream, const Event& event) {
  std::lock_guard guard(device_lock());
  auto& line = timelines.at(stream);
  join(line.clock, event.clock);
  line.seconds = std::max(line.seconds, event.seconds);
  if (is_default(stream) || !late_on) {
    catch_up_to(event.stream, event.tail);
  } else {
    push(stream, [from = event.stream, tail = event.tail] { catch_up_to(from, tail); });
  }
}

bool is_done(const Event& event) {
  std::lock_guard guard(device_lock());
  const auto& waiting = timelines.at(event.stream).waiting;
  if (!waiting.empty() && waiting.front().number <= event.tail) {
    return false;
  }
  join(host_clock, event.clock); // the host knows it now, and what it asks for next comes after
  return true;
}

void host_waits(const Event& event) {
  std::lock_guard guard(device_lock());
  catch_up_to(event.stream, event.tail);
  join(host_clock, event.clock);
}

void synchronize(int stream) {
  std::lock_guard guard(device_lock());
  catch_up(stream);
  join(host_clock, timelines.at(stream).clock);
}

void synchronize_device(int device) {
  for (int id = 0; id <= POOLED; id++) {
    synchronize(number_of(device, id));
  }
}

bool is_idle(int stream) {
  std::lock_guard guard(device_lock());
  if (!timelines.at(stream).waiting.empty()) {
    return false;
  }
  join(host_clock, timelines[stream].clock);
  return true;
}

int64_t tasks_given() {
  return given;
}
int64_t orders_checked() {
  return checked;
}

} // namespace simulated
