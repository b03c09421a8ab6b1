// An allocator for PyTorch's CPU tensors that serves what a step allocates from one mapping, at planned addresses.
//
// The same step allocates the same sizes in the same order each time. An arena notes them, with their lives; somebody
// else plans an address for each; and from then on the n-th allocation of a step gets the n-th address. Whatever is not
// as noted, and whatever is not of the step, is served by the allocator that was there before. An address is given out
// only where nothing alive overlaps it: a plan that is wrong costs memory, never a byte of somebody's data.
//
// There is one lock for all arenas, held for a map's look-up; a thread that is not within a step does not take it.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kAlign = 64;    // as PyTorch's own
constexpr size_t kTiny = 4096;   // what is smaller is left to malloc, and not noted
constexpr size_t kHuge = 1 << 21;
constexpr size_t kLarge = 1 << 25;  // what malloc gives back to the machine when it is freed (its largest threshold)
constexpr size_t kWindow = 64;   // so many entries ahead an allocation is looked for in the plan
constexpr size_t kLag = 32;      // entries that were passed over by so many others are not waited for
constexpr int64_t kAlive = -1;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
uintptr_t page_floor(uintptr_t a) { static const uintptr_t page = sysconf(_SC_PAGESIZE); return a / page * page; }
uintptr_t page_ceil(uintptr_t a) { static const uintptr_t page = sysconf(_SC_PAGESIZE); return round_up(a, page); }

// What one call of a step allocated, in order. A life is counted in allocations: born at its own index, `died` when
// that many had been made.
struct Entry { size_t size; int64_t died; };
struct Record {
  std::vector<Entry> entries;
  size_t boundary = 0;  // as many of them are the forward's
  bool regular = true;  // one forward and then its backward, to their ends
};
struct Note {  // in which record a block stands
  std::shared_ptr<Record> record;
  size_t index = 0;
  void died() const { record->entries[index].died = static_cast<int64_t>(record->entries.size()); }
};

struct Mapping {
  uintptr_t base = 0, end = 0;
  size_t count = 0;      // blocks alive in it
  bool planned = false;  // addresses are planned, so that every byte is used
  bool retired = false;  // nothing new is put there: pages without a block are unmapped at once
};
struct Block { uintptr_t end; Mapping* mapping; bool stays; Note note; };
struct Slot { size_t size; int64_t offset; bool stays; uint64_t used; };

enum Phase { kForward = 0, kBackward = 1 };
enum State { kIdle, kInForward, kBetween, kInBackward, kDone };

struct Counts {  // read from Python as an array of int64: keep the order of `Counts` in arena.py
  int64_t steps = 0, layouts = 0, bytes = 0, served = 0, served_bytes = 0, fallbacks = 0, fallback_bytes = 0;
  int64_t unplanned = 0, occupied = 0, full = 0, alive_bytes = 0;
};

struct Arena {
  Mapping* mapping = nullptr;
  std::vector<Slot> plan;  // empty: addresses are found as they are asked for
  size_t boundary = 0, cursor = 0, limit = 0, capacity = 0;
  uint64_t pass = 0;
  std::shared_ptr<Record> record;
  State state = kIdle;
  bool active = false, changed = false, failed = false;
  int64_t wait = 1, next_layout = 0;
  Arena* before = nullptr;  // what was current on this thread
  Counts counts;
};

struct World {
  std::mutex lock;
  std::map<uintptr_t, Block> live;                // of all mappings, by address
  std::unordered_map<uintptr_t, Note> elsewhere;  // what the other allocator served within a step
  c10::Allocator* inner = nullptr;
  Arena* last = nullptr;  // whose step ran last
  bool off = false;       // in a forked child
};
World& world() { static World& it = *new World; return it; }  // never destroyed: tensors may outlive everything
thread_local Arena* current = nullptr;

void unmap(uintptr_t from, uintptr_t to) {
  if (from < to) munmap(reinterpret_cast<void*>(from), to - from);
}

// Give back the pages that held nothing alive but a block at [from, to), which is gone: unmapped in a retired mapping.
// There every page that is left holds something alive: what is around it may be anybody's by now.
void give_back_around(const World& w, const Mapping& m, uintptr_t from, uintptr_t to) {
  auto after = w.live.lower_bound(from);
  uintptr_t begin = page_floor(from), end = page_ceil(to);
  if (after != w.live.end()) end = std::min(end, page_floor(after->first));
  if (after != w.live.begin()) begin = std::max(begin, page_ceil(std::prev(after)->second.end));
  if (m.retired) unmap(begin, end);
  else if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

template <class F>
void for_gaps(const World& w, const Mapping& m, F&& f) {
  uintptr_t at = m.base;
  for (auto it = w.live.lower_bound(m.base); it != w.live.end() && it->first < m.end; ++it) {
    if (it->first > at && f(at, it->first)) return;
    at = it->second.end;
  }
  if (at < m.end) f(at, m.end);
}

void give_back(const World& w, const Mapping& m) {
  for_gaps(w, m, [](uintptr_t from, uintptr_t to) {
    from = page_ceil(from), to = page_floor(to);
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
    return false;
  });
}

void retire(const World& w, Mapping*& m) {
  if (!m) return;
  m->retired = true;
  for_gaps(w, *m, [](uintptr_t from, uintptr_t to) {
    unmap(page_ceil(from), page_floor(to));
    return false;
  });
  if (!m->count) delete m;  // else with its last block
  m = nullptr;
}

// A mapping with planned addresses begins at a huge page, and has huge pages as far as it fills them: fewer faults, and
// addresses that are looked up faster.
Mapping* map_bytes(size_t bytes, bool planned) {
  bytes = page_ceil(bytes);
  const size_t room = planned ? bytes + kHuge : bytes;
  void* p = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  const auto given = reinterpret_cast<uintptr_t>(p);
  auto* m = new Mapping;
  m->planned = planned;
  m->base = planned ? round_up(given, kHuge) : given;
  m->end = m->base + bytes;
  unmap(given, m->base);
  unmap(m->end, given + room);
  const size_t whole = bytes / kHuge * kHuge;
  if (planned && whole) madvise(reinterpret_cast<void*>(m->base), whole, MADV_HUGEPAGE);
  return m;
}

// The deleter of all that a step allocates; the pointer is the context. What it does not know was not of a step.
void release(void* p) {
  if (!p) return;
  World& w = world();
  const auto address = reinterpret_cast<uintptr_t>(p);
  std::unique_lock<std::mutex> hold(w.lock);
  const auto it = w.live.find(address);
  if (it == w.live.end()) {
    if (auto other = w.elsewhere.find(address); other != w.elsewhere.end()) {
      other->second.died();
      w.elsewhere.erase(other);
    }
    hold.unlock();
    w.inner->raw_deleter()(p);
    return;
  }
  hold.unlock();
  c10::profiledCPUMemoryReporter().Delete(p);  // before the address may be given out again, and without our lock
  hold.lock();
  Block block = std::move(it->second);
  w.live.erase(it);
  block.note.died();
  Mapping* m = block.mapping;
  --m->count;
  if (!m->retired && (m->planned || block.end - address < kLarge)) return;
  give_back_around(w, *m, address, block.end);
  if (m->retired && !m->count) delete m;
}

// The first of the smallest gaps that hold so many bytes.
uintptr_t best_fit(const World& w, const Mapping& m, size_t bytes) {
  uintptr_t best = 0;
  size_t smallest = SIZE_MAX;
  for_gaps(w, m, [&](uintptr_t from, uintptr_t to) {
    if (to - from >= bytes && to - from < smallest) best = from, smallest = to - from;
    return smallest == bytes;
  });
  return best;
}

// The address that is planned for the next allocation of this size; 0 if none is, or something alive is there.
uintptr_t planned(World& w, Arena& a, size_t n, size_t bytes, bool& stays) {
  auto& plan = a.plan;
  const size_t to = std::min(a.limit, a.cursor + kWindow);
  size_t k = a.cursor;
  while (k < to && !(plan[k].size == n && plan[k].used != a.pass)) ++k;
  if (k == to) {
    ++a.counts.unplanned;
    a.changed = true;
    return 0;
  }
  plan[k].used = a.pass;
  if (k > a.cursor + kLag) a.cursor = k - kLag, a.changed = true;
  while (a.cursor < a.limit && plan[a.cursor].used == a.pass) ++a.cursor;
  stays = plan[k].stays;
  const uintptr_t at = a.mapping->base + plan[k].offset;
  auto after = w.live.lower_bound(at);
  const Block* in_the_way = nullptr;
  if (after != w.live.end() && after->first < at + bytes) in_the_way = &after->second;
  if (after != w.live.begin() && std::prev(after)->second.end > at) in_the_way = &std::prev(after)->second;
  if (in_the_way || at + bytes > a.mapping->end) {
    ++a.counts.occupied;
    a.changed |= !(in_the_way && in_the_way->stays);  // what stays longer than a step may be in its own way: no news
    return 0;
  }
  return at;
}

struct InArena final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Arena* a = current;
    return a && n >= kTiny ? serve(*a, n) : world().inner->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }

  c10::DataPtr serve(Arena& a, size_t n) {
    World& w = world();
    const size_t bytes = round_up(n, kAlign);
    uintptr_t at = 0;
    Note note;
    {
      std::lock_guard<std::mutex> hold(w.lock);
      note = Note{a.record, a.record->entries.size()};
      a.record->entries.push_back({n, kAlive});
      bool stays = false;
      if (a.mapping && a.plan.empty()) {
        at = best_fit(w, *a.mapping, bytes);
        a.counts.full += !at;
      } else if (a.mapping) {
        at = planned(w, a, n, bytes, stays);
      }
      if (at) {
        w.live.emplace(at, Block{at + bytes, a.mapping, stays, note});
        ++a.mapping->count;
        ++a.counts.served, a.counts.served_bytes += n;
      } else {
        ++a.counts.fallbacks, a.counts.fallback_bytes += n;
      }
    }
    void* p = reinterpret_cast<void*>(at);
    if (at) {
      c10::profiledCPUMemoryReporter().New(p, n);
    } else {
      c10::DataPtr other = w.inner->allocate(n);
      std::lock_guard<std::mutex> hold(w.lock);
      w.elsewhere.emplace(reinterpret_cast<uintptr_t>(other.get()), note);
      p = other.release_context();
    }
    return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
  }
};
InArena& ours() { static InArena& it = *new InArena; return it; }

// What the last step has alive that the plan believed gone is in the way of this one.
bool kept_unplanned(const Arena& a) {
  const auto& entries = a.record->entries;
  if (entries.size() != a.plan.size()) return true;
  for (size_t i = 0; i < entries.size(); ++i)
    if (entries[i].size != a.plan[i].size || (entries[i].died == kAlive && !a.plan[i].stays)) return true;
  return false;
}

}  // namespace

extern "C" {

// Put our allocator before the one that is there. False where that is not possible.
int checkmate_install() {
  World& w = world();
  if (w.inner) return 1;
  auto* inner = c10::GetCPUAllocator();
  if (!inner || !inner->raw_deleter()) return 0;  // whose context is not the pointer: cannot be handed on
  w.inner = inner;
  c10::SetCPUAllocator(&ours(), 255);
  if (c10::GetCPUAllocator() != &ours()) { w.inner = nullptr; return 0; }
  pthread_atfork(
      [] { world().lock.lock(); }, [] { world().lock.unlock(); },
      [] { world().off = true; current = nullptr; world().lock.unlock(); });
  return 1;
}

// An arena whose first steps find their addresses within so many bytes.
Arena* checkmate_open(size_t capacity) { return new Arena{.capacity = capacity}; }

// Another step from now on: its addresses are found within so many bytes until they are planned.
void checkmate_renew(Arena* a, size_t capacity) {
  std::lock_guard<std::mutex> hold(world().lock);
  retire(world(), a->mapping);
  a->plan.clear();
  a->capacity = capacity;
  a->state = kIdle;  // what was noted is of another step
  a->wait = 1, a->next_layout = 0;
}

void checkmate_close(Arena* a) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  if (w.last == a) w.last = nullptr;
  retire(w, a->mapping);
  delete a;
}

// 1 if addresses should be planned anew before the next forward, from `checkmate_record`.
int checkmate_wants_layout(Arena* a) {
  std::lock_guard<std::mutex> hold(world().lock);
  if (world().off || a->active || a->counts.steps < a->next_layout) return 0;
  if (!a->record || a->state != kDone || !a->record->regular || a->record->entries.empty()) return 0;
  return a->plan.empty() || a->changed || kept_unplanned(*a);
}

// Of the last step: sizes, and when each died (-1: it is alive). How many; written are `room` at most.
size_t checkmate_record(Arena* a, size_t room, int64_t* sizes, int64_t* died, int64_t* boundary) {
  std::lock_guard<std::mutex> hold(world().lock);
  auto& r = *a->record;
  *boundary = static_cast<int64_t>(r.boundary);
  for (size_t i = 0; i < std::min(room, r.entries.size()); ++i)
    sizes[i] = static_cast<int64_t>(r.entries[i].size), died[i] = r.entries[i].died;
  return r.entries.size();
}

// From now on the addresses of a step, in a mapping of their own. False if it cannot be had.
int checkmate_lay_out(
    Arena* a, size_t count, const int64_t* sizes, const int64_t* offsets, const uint8_t* stays, size_t boundary,
    size_t height) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  if (a->active) return 0;
  retire(w, a->mapping);
  a->plan.clear();
  a->mapping = map_bytes(height, true);
  a->next_layout = a->counts.steps + a->wait;
  a->wait = std::min<int64_t>(2 * a->wait, 1 << 16);
  if (!a->mapping) { a->failed = true; return 0; }
  for (size_t i = 0; i < count; ++i)
    a->plan.push_back({static_cast<size_t>(sizes[i]), offsets[i], stays[i] != 0, 0});
  a->boundary = boundary;
  ++a->counts.layouts;
  return 1;
}

// Serve this thread from the arena until `checkmate_leave`. False where it does not: then do not leave.
int checkmate_enter(Arena* a, int phase) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  if (w.off || a->active) return 0;
  if (w.last && w.last != a && w.last->mapping) give_back(w, *w.last->mapping);
  w.last = a;
  if (!a->mapping && !a->failed && a->plan.empty() && !(a->mapping = map_bytes(a->capacity, false))) a->failed = true;
  if (phase == kForward) {
    const size_t expected = a->record ? a->record->entries.size() : 0;
    a->record = std::make_shared<Record>();
    a->record->entries.reserve(expected);
    a->state = kInForward;
    a->changed = false;
    const auto [steps, layouts] = std::pair(a->counts.steps, a->counts.layouts);
    a->counts = Counts{};
    a->counts.steps = steps + 1, a->counts.layouts = layouts;
  } else {
    if (a->state != kBetween) {  // once more, or of an earlier forward: nothing to plan by
      a->record = std::make_shared<Record>();
      a->record->regular = false;
    }
    a->record->boundary = a->record->entries.size();
    a->state = kInBackward;
  }
  ++a->pass;
  a->cursor = phase == kForward ? 0 : std::min(a->boundary, a->plan.size());
  a->limit = phase == kForward ? std::min(a->boundary, a->plan.size()) : a->plan.size();
  a->active = true;
  a->before = current;
  current = a;
  return 1;
}

// `whole`: without an exception.
void checkmate_leave(Arena* a, int whole) {
  std::lock_guard<std::mutex> hold(world().lock);
  if (!a->active) return;  // in a child that was forked within a step
  if (current == a) current = a->before;
  a->active = false;
  if (!whole) a->record->regular = false;
  a->state = a->state == kInForward ? kBetween : kDone;
}

void checkmate_counts(Arena* a, int64_t* out) {
  World& w = world();
  std::lock_guard<std::mutex> hold(w.lock);
  Counts counts = a->counts;
  if (a->mapping) {
    counts.bytes = static_cast<int64_t>(a->mapping->end - a->mapping->base);
    for (auto it = w.live.lower_bound(a->mapping->base); it != w.live.end() && it->first < a->mapping->end; ++it)
      counts.alive_bytes += static_cast<int64_t>(it->second.end - it->first);
  }
  std::copy_n(reinterpret_cast<int64_t*>(&counts), sizeof(Counts) / sizeof(int64_t), out);
}

// Bytes of the mapping that the machine holds.
int64_t checkmate_resident(Arena* a) {
  std::lock_guard<std::mutex> hold(world().lock);
  if (!a->mapping) return 0;
  const uintptr_t page = sysconf(_SC_PAGESIZE), end = page_ceil(a->mapping->end);
  std::vector<unsigned char> held((end - a->mapping->base) / page);
  if (mincore(reinterpret_cast<void*>(a->mapping->base), end - a->mapping->base, held.data())) return 0;
  return static_cast<int64_t>(page * std::count_if(held.begin(), held.end(), [](unsigned char one) { return one & 1; }));
}

// For tests: allocate and free as a tensor would, on this thread.
void* checkmate_allocate(size_t n) { return c10::GetCPUAllocator()->raw_allocate(n); }
void checkmate_free(void* p) { c10::GetCPUAllocator()->raw_deallocate(p); }
}
