// Written after c10/cuda/CUDACachingAllocator.cpp of PyTorch, whose names its comments give: what is rounded, split,
// chosen, merged and given back is as there, so that bytes allocated and reserved are those of a device.
#include "allocator.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace simulated {

bool poison_on = true;
bool expandable_on = false;

namespace {

constexpr size_t MIB = size_t(1) << 20;
constexpr size_t BLOCK = 512; // kMinBlockSize
constexpr size_t SMALL = MIB; // kSmallSize: up to it blocks are in the small pool
constexpr size_t SMALL_SEGMENT = 2 * MIB; // kSmallBuffer
constexpr size_t LARGE_SEGMENT = 20 * MIB; // kLargeBuffer: of large blocks below
constexpr size_t MIN_LARGE = 10 * MIB; // kMinLargeAlloc
constexpr size_t LARGE_UNIT = 2 * MIB; // kRoundLarge

struct Block;
struct Before {
  bool operator()(const Block* a, const Block* b) const;
};
struct PrivatePool;
struct BlockPool {
  bool small;
  PrivatePool* owner;
  std::set<Block*, Before> blocks; // free
  std::set<Block*, Before> unmapped; // of expandable segments
};
struct PrivatePool {
  PoolId id;
  int uses = 1;
  int segments = 0; // cudaMalloc_count
  BlockPool small{true, this, {}, {}}, large{false, this, {}, {}};
};
struct Expandable { // addresses of which a part has memory
  char* at;
  size_t size, unit;
};
struct Block {
  int stream;
  size_t size;
  BlockPool* pool;
  char* at;
  size_t requested = 0;
  bool allocated = false, mapped = true;
  Block *prev = nullptr, *next = nullptr;
  int events = 0; // of other streams, that have not come yet
  std::set<int> uses; // streams
  Expandable* expandable = nullptr;
  bool is_split() const {
    return prev || next;
  }
};

bool Before::operator()(const Block* a, const Block* b) const {
  if (a->stream != b->stream) {
    return a->stream < b->stream;
  }
  return a->size != b->size ? a->size < b->size : a->at < b->at;
}

struct Count {
  int64_t now = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t amount) {
    now += amount;
    peak = std::max(peak, now);
    (amount > 0 ? allocated : freed) += std::abs(amount);
  }
};
using Counts = std::array<Count, 3>; // all, small pools, large pools
enum Kind { ALLOCATION, SEGMENT, ACTIVE, SPLIT, ALLOCATED, RESERVED, ACTIVE_BYTES, SPLIT_BYTES, REQUESTED, KINDS };
const char* const NAMES[KINDS] = {
    "allocation", "segment", "active", "inactive_split", "allocated_bytes",
    "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"};

size_t up(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}
size_t round_size(size_t size) {
  return size < BLOCK ? BLOCK : up(size, BLOCK);
}
size_t segment_size(size_t size) { // get_allocation_size
  return size <= SMALL ? SMALL_SEGMENT : size < MIN_LARGE ? LARGE_SEGMENT : up(size, LARGE_UNIT);
}

// Each piece lies above all that were mapped before: so it is known which of two segments is lower.
char* map_memory(size_t size, int protection) {
  static char* above = reinterpret_cast<char*>(uintptr_t(1) << 44);
  void* at = mmap(above, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  above += up(size, LARGE_UNIT);
  TORCH_CHECK(at != MAP_FAILED, "Simulated device: the host has no ", size, " bytes.");
  return static_cast<char*>(at);
}

class DeviceCache { // DeviceCachingAllocator
 public:
  int device = 0;
  int64_t capacity = int64_t(80) << 30;
  double fraction = 1;
  Counts counts[KINDS];
  int64_t retries = 0, ooms = 0, mallocs = 0, frees = 0, syncs = 0;

  Block* allocate(size_t requested, int stream) { // malloc
    process_events();
    size_t size = round_size(requested);
    BlockPool& pool = pool_for(size, stream);
    size_t segment = segment_size(size);
    Block* block = free_block(pool, size, stream);
    if (!block) {
      block = new_block(pool, size, segment, stream);
      if (!block && underway.empty() && release_cached()) { // nothing is given back while a pool is in use anywhere
        retries++;
        block = new_block(pool, size, segment, stream);
      }
    }
    if (!block) {
      ooms++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory (simulated). Tried to allocate ", segment, " bytes. GPU ",
          device, " has a total capacity of ", capacity, " bytes of which ", limit() - counts[RESERVED][0].now,
          " are free; ",
          counts[ALLOCATED][0].now, " are allocated by PyTorch and ",
          counts[RESERVED][0].now - counts[ALLOCATED][0].now, " reserved but unallocated.");
    }
    split(block, size);
    block->allocated = true;
    block->requested = requested;
    count(ALLOCATION, *block->pool, 1);
    count(ALLOCATED, *block->pool, block->size);
    count(ACTIVE, *block->pool, 1);
    count(ACTIVE_BYTES, *block->pool, block->size);
    count(REQUESTED, *block->pool, requested);
    alive.insert(block);
    return block;
  }

  void free(Block* block) {
    block->allocated = false;
    count(ALLOCATION, *block->pool, -1);
    count(ALLOCATED, *block->pool, -int64_t(block->size));
    if (block->uses.empty()) {
      release(block);
      return;
    }
    for (int stream : std::set<int>(std::move(block->uses))) { // insert_events
      block->events++;
      pending.emplace_back(record(stream), block);
    }
    block->uses.clear();
  }

  void process_events() {
    if (!underway.empty()) {
      return; // frees of what other streams used wait until no pool is in use
    }
    finish_events(false);
  }

  void empty_cache(PoolId id) {
    if (id == PoolId{0, 0}) {
      release_cached();
    } else if (auto found = pools.find(id); found != pools.end()) {
      finish_events(true);
      give_back(found->second->small);
      give_back(found->second->large);
      drop_dead_pools();
    }
  }

  PrivatePool& enter_or_make(PoolId id) { // createOrIncrefPool
    auto& pool = pools[id];
    if (!pool) {
      pool = std::make_unique<PrivatePool>();
      pool->id = id;
    } else {
      pool->uses++;
    }
    return *pool;
  }
  void begin_pool(PoolId id, std::thread::id thread) {
    for (auto& [other, _] : underway) {
      TORCH_CHECK(other != id, "beginAllocateToPool: already recording to mempool_id");
    }
    enter_or_make(id);
    underway.emplace_back(id, thread);
  }
  void end_pool(PoolId id) {
    auto found = std::find_if(underway.begin(), underway.end(), [&](auto& entry) { return entry.first == id; });
    TORCH_CHECK(found != underway.end(), "endAllocatePool: not currently recording to mempool_id");
    underway.erase(found);
  }
  void release_pool(PoolId id) {
    auto found = pools.find(id);
    TORCH_CHECK(found != pools.end() && found->second->uses > 0, "releasePool: no such pool");
    if (--found->second->uses == 0) {
      freeable.insert(id);
      drop_dead_pools();
    }
  }
  int uses_of(PoolId id) {
    auto found = pools.find(id);
    return found == pools.end() ? 0 : found->second->uses;
  }

  int64_t limit() const {
    return static_cast<int64_t>(capacity * fraction);
  }
  void reset_peaks() {
    for (auto& kind : counts) {
      for (auto& one : kind) {
        one.peak = one.now;
      }
    }
  }
  void reset_accumulated() {
    for (auto& kind : counts) {
      for (auto& one : kind) {
        one.allocated = one.freed = 0;
      }
    }
    retries = ooms = mallocs = frees = syncs = 0;
  }

  // Blocks by the segments in which they lie side by side, as JSON.
  void snapshot(std::ostream& out, bool all, PoolId id, bool& first) {
    std::vector<Block*> heads;
    auto look = [&](Block* block) {
      PoolId owner = block->pool->owner ? block->pool->owner->id : PoolId{0, 0};
      if ((all || owner == id) && block->mapped && (!block->prev || !block->prev->mapped)) {
        heads.push_back(block);
      }
    };
    std::for_each(alive.begin(), alive.end(), look);
    each_pool([&](BlockPool& pool) { std::for_each(pool.blocks.begin(), pool.blocks.end(), look); });
    std::sort(heads.begin(), heads.end(), [](Block* a, Block* b) { return a->at < b->at; });
    for (Block* head : heads) {
      size_t total = 0, allocated = 0, active = 0, requested = 0;
      std::ostringstream blocks;
      for (Block* b = head; b && b->mapped; b = b->next) {
        bool is_active = b->allocated || b->events;
        total += b->size;
        allocated += b->allocated ? b->size : 0;
        active += is_active ? b->size : 0;
        requested += is_active ? b->requested : 0;
        const char* state = b->allocated ? "active_allocated" : b->events ? "active_pending_free" : "inactive";
        blocks << (b == head ? "" : ",") << "{\"address\":" << reinterpret_cast<uintptr_t>(b->at)
               << ",\"size\":" << b->size << ",\"requested_size\":" << (is_active ? b->requested : 0) << ",\"state\":\""
               << state << "\",\"frames\":[]}";
      }
      PoolId owner = head->pool->owner ? head->pool->owner->id : PoolId{0, 0};
      out << (first ? "" : ",") << "{\"device\":" << device << ",\"address\":" << reinterpret_cast<uintptr_t>(head->at)
          << ",\"total_size\":" << total << ",\"allocated_size\":" << allocated << ",\"active_size\":" << active
          << ",\"requested_size\":" << requested << ",\"stream\":" << head->stream / DEVICES << ",\"segment_type\":\""
          << (head->pool->small ? "small" : "large") << "\",\"segment_pool_id\":[" << owner.first << "," << owner.second
          << "],\"is_expandable\":" << (head->expandable ? "true" : "false") << ",\"frames\":[],\"blocks\":["
          << blocks.str() << "]}";
      first = false;
    }
  }

 private:
  BlockPool small{true, nullptr, {}, {}}, large{false, nullptr, {}, {}};
  std::map<PoolId, std::unique_ptr<PrivatePool>> pools;
  std::set<PoolId> freeable;
  std::vector<std::pair<PoolId, std::thread::id>> underway; // captures_underway
  std::set<Block*> alive;
  std::deque<std::pair<Event, Block*>> pending;

  void count(Kind kind, const BlockPool& pool, int64_t amount) {
    counts[kind][0].add(amount);
    counts[kind][pool.small ? 1 : 2].add(amount);
  }

  template <typename F>
  void each_pool(F&& look) {
    look(small);
    look(large);
    for (auto& [_, pool] : pools) {
      look(pool->small);
      look(pool->large);
    }
  }

  BlockPool& pool_for(size_t size, int) { // get_pool
    for (auto& [id, thread] : underway) {
      if (thread == std::this_thread::get_id()) {
        auto& pool = *pools.at(id);
        return size <= SMALL ? pool.small : pool.large;
      }
    }
    return size <= SMALL ? small : large;
  }

  bool is_usable(const Block* b) const {
    return b && !b->allocated && !b->events && b->uses.empty();
  }

  Block* free_block(BlockPool& pool, size_t size, int stream) { // get_free_block
    Block key{stream, size, &pool, nullptr};
    auto it = pool.blocks.lower_bound(&key);
    if (it == pool.blocks.end() || (*it)->stream != stream) {
      return nullptr;
    }
    if ((*it)->expandable) { // the best fit is by the size to which a block can grow
      auto can_grow_to = [](const Block* b) { return b->size + (b->next && !b->next->mapped ? b->next->size : 0); };
      auto next = std::next(it);
      while ((*it)->expandable && next != pool.blocks.end() && (*next)->stream == stream &&
             can_grow_to(*next) < can_grow_to(*it)) {
        it = next++;
      }
    }
    Block* block = *it;
    leave(block);
    return block;
  }

  // In and out of what is free of a pool, and of what counts as a rest beside others.
  void enter(Block* block) {
    block->pool->blocks.insert(block);
    count_split(block, 1);
  }
  void leave(Block* block) {
    block->pool->blocks.erase(block);
    count_split(block, -1);
  }
  void count_split(const Block* block, int sign) {
    if (block->is_split() && !block->expandable) {
      count(SPLIT, *block->pool, sign);
      count(SPLIT_BYTES, *block->pool, sign * int64_t(block->size));
    }
  }

  Block* new_block(BlockPool& pool, size_t size, size_t segment, int stream) { // alloc_block
    if (expandable_on) {
      return grow(pool, size, stream);
    }
    if (counts[RESERVED][0].now + int64_t(segment) > limit()) {
      return nullptr;
    }
    if (pool.owner) {
      pool.owner->segments++;
    }
    mallocs++;
    count(SEGMENT, pool, 1);
    count(RESERVED, pool, segment);
    return new Block{stream, segment, &pool, map_memory(segment, PROT_READ | PROT_WRITE)};
  }

  void split(Block* block, size_t size) { // should_split, alloc_found_block
    size_t rest = block->size - size;
    if (block->pool->small || expandable_on ? rest < BLOCK : rest <= SMALL) {
      return;
    }
    Block* right = new Block{block->stream, rest, block->pool, block->at + size};
    right->expandable = block->expandable;
    right->prev = block;
    right->next = block->next;
    if (right->next) {
      right->next->prev = right;
    }
    block->next = right;
    block->size = size;
    enter(right);
  }

  void release(Block* block) { // free_block
    alive.erase(block);
    count(ACTIVE, *block->pool, -1);
    count(ACTIVE_BYTES, *block->pool, -int64_t(block->size));
    count(REQUESTED, *block->pool, -int64_t(block->requested));
    block->requested = 0;
    merge(block, block->prev);
    merge(block, block->next);
    enter(block);
  }

  void merge(Block* into, Block* other) { // try_merge_blocks
    if (!is_usable(other) || other->mapped != into->mapped) {
      return;
    }
    if (other->mapped) {
      leave(other);
    } else {
      other->pool->unmapped.erase(other);
    }
    if (other == into->prev) {
      into->at = other->at;
      into->prev = other->prev;
      if (into->prev) {
        into->prev->next = into;
      }
    } else {
      into->next = other->next;
      if (into->next) {
        into->next->prev = into;
      }
    }
    into->size += other->size;
    delete other;
  }

  // ------------------------------------------------------------- expandable segments
  Block* grow(BlockPool& pool, size_t size, int stream) { // try_allocate_expandable_block
    Block* block = growing_block(pool, size, stream);
    if (!block->mapped) {
      if (!map(block, std::min(block->size, size))) {
        return nullptr;
      }
    }
    while (block->size < size) {
      Block* next = block->next;
      if (!map(next, std::min(size - block->size, next->size))) {
        return nullptr;
      }
      block = next;
    }
    leave(block);
    return block;
  }

  Block* growing_block(BlockPool& pool, size_t size, int stream) { // find_expandable_block
    for (Block* block : pool.unmapped) {
      if (block->stream != stream) {
        continue;
      }
      Block* first = is_usable(block->prev) ? block->prev : block;
      size_t room = 0;
      for (Block* b = first; room < size && is_usable(b); b = b->next) {
        room += b->size;
      }
      if (room >= size) {
        return first;
      }
    }
    size_t unit = pool.small ? SMALL_SEGMENT : LARGE_SEGMENT, all = up(capacity + capacity / 8, unit);
    auto* segment = new Expandable{map_memory(all, PROT_NONE), all, unit}; // kept, as there
    Block* block = new Block{stream, all, &pool, segment->at};
    block->mapped = false;
    block->expandable = segment;
    pool.unmapped.insert(block);
    return block;
  }

  bool map(Block* block, size_t size) { // map_block
    const auto* segment = block->expandable;
    size_t bytes = std::min(up(size, segment->unit), block->size);
    if (counts[RESERVED][0].now + int64_t(bytes) > limit()) {
      return false;
    }
    TORCH_CHECK(mprotect(block->at, bytes, PROT_READ | PROT_WRITE) == 0, "Simulated device: mprotect failed.");
    auto& pool = *block->pool;
    pool.unmapped.erase(block);
    block->mapped = true;
    if (bytes < block->size) {
      Block* rest = new Block{block->stream, block->size - bytes, &pool, block->at + bytes};
      rest->mapped = false;
      rest->expandable = block->expandable;
      rest->prev = block;
      rest->next = block->next;
      if (rest->next) {
        rest->next->prev = rest;
      }
      block->next = rest;
      block->size = bytes;
      pool.unmapped.insert(rest);
    }
    merge(block, block->prev);
    merge(block, block->next);
    enter(block);
    count(RESERVED, pool, bytes);
    if (pool.owner) {
      pool.owner->segments++;
    }
    mallocs++;
    return true;
  }

  void unmap(Block* block) { // unmap_block: whole units only
    const auto* segment = block->expandable;
    size_t begin = up(block->at - segment->at, segment->unit);
    size_t end = (block->at - segment->at + block->size) / segment->unit * segment->unit;
    if (end <= begin) {
      return;
    }
    auto& pool = *block->pool;
    leave(block);
    size_t before = segment->at + begin - block->at, bytes = end - begin, after = block->size - before - bytes;
    if (before) {
      Block* left = new Block{block->stream, before, &pool, block->at};
      left->expandable = block->expandable;
      left->prev = block->prev;
      left->next = block;
      if (left->prev) {
        left->prev->next = left;
      }
      block->prev = left;
      enter(left);
    }
    if (after) {
      Block* right = new Block{block->stream, after, &pool, segment->at + end};
      right->expandable = block->expandable;
      right->prev = block;
      right->next = block->next;
      if (right->next) {
        right->next->prev = right;
      }
      block->next = right;
      enter(right);
    }
    block->at = segment->at + begin;
    block->size = bytes;
    block->mapped = false;
    forget(block->at, bytes);
    madvise(block->at, bytes, MADV_DONTNEED);
    mprotect(block->at, bytes, PROT_NONE);
    merge(block, block->prev);
    merge(block, block->next);
    pool.unmapped.insert(block);
    count(RESERVED, pool, -int64_t(bytes));
    if (pool.owner) {
      pool.owner->segments--;
    }
    frees++;
  }

  // ------------------------------------------------------------- what goes back
  void finish_events(bool wait) {
    std::deque<std::pair<Event, Block*>> later;
    for (auto& [event, block] : pending) {
      if (wait) {
        host_waits(event);
      } else if (!is_done(event)) {
        later.emplace_back(event, block);
        continue;
      }
      if (--block->events == 0) {
        release(block);
      }
    }
    pending.swap(later);
  }

  bool release_cached() { // release_cached_blocks: with all streams waited for, as cudaFree does
    syncs++;
    for (int id = 0; id <= POOLED; id++) {
      synchronize(number_of(device, id));
    }
    finish_events(true);
    give_back(large);
    give_back(small);
    for (PoolId id : freeable) {
      give_back(pools.at(id)->small);
      give_back(pools.at(id)->large);
    }
    drop_dead_pools();
    return true;
  }

  void give_back(BlockPool& pool) { // release_blocks
    std::vector<Block*> whole;
    for (Block* block : pool.blocks) {
      if (block->expandable || !block->is_split()) {
        whole.push_back(block);
      }
    }
    for (Block* block : whole) {
      if (block->expandable) {
        unmap(block);
        continue;
      }
      for (int id = 0; id <= POOLED; id++) {
        synchronize(number_of(device, id));
      }
      leave(block);
      forget(block->at, block->size);
      munmap(block->at, block->size);
      count(SEGMENT, pool, -1);
      count(RESERVED, pool, -int64_t(block->size));
      if (pool.owner) {
        pool.owner->segments--;
      }
      frees++;
      delete block;
    }
  }

  void drop_dead_pools() {
    for (auto it = freeable.begin(); it != freeable.end();) {
      auto found = pools.find(*it);
      bool is_alive = found->second->uses > 0 || found->second->segments > 0;
      if (!is_alive && found->second->large.unmapped.empty() && found->second->small.unmapped.empty()) {
        pools.erase(found);
        it = freeable.erase(it);
      } else {
        it = found->second->uses > 0 ? freeable.erase(it) : std::next(it);
      }
    }
  }
};

DeviceCache caches[DEVICES];
std::unordered_map<void*, std::pair<int, Block*>> owners;

void* take(size_t bytes, int device) {
  std::lock_guard guard(device_lock());
  if (!bytes) {
    return nullptr;
  }
  caches[device].device = device;
  Block* block = caches[device].allocate(bytes, current_stream(device));
  owners[block->at] = {device, block};
  if (poison_on) {
    memset(block->at, 0xFF, bytes);
  }
  return block->at;
}

void let_go(void* memory) {
  if (!memory) {
    return;
  }
  std::lock_guard guard(device_lock());
  auto found = owners.find(memory);
  TORCH_CHECK(found != owners.end(), "Simulated device: freed what was not allocated.");
  auto [device, block] = found->second;
  owners.erase(found);
  if (poison_on && block->uses.empty()) {
    catch_up(block->stream); // who uses the memory next comes after what its stream was given
    memset(block->at, 0xFF, block->size);
  }
  caches[device].free(block);
}

struct OfDevice : c10::DeviceAllocator {
  int device; // -1: the current one
  explicit OfDevice(int device) : device(device) {}
  c10::DataPtr allocate(size_t bytes) override {
    int where = device < 0 ? current_device() : device;
    void* at = take(bytes, where);
    return {at, at, &let_go, c10::Device(TYPE, static_cast<c10::DeviceIndex>(where))};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &let_go;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(PoolId id) override {
    std::lock_guard guard(device_lock());
    for (auto& cache : caches) {
      cache.empty_cache(id);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get(), number_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard guard(device_lock());
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& cache = caches[index];
    auto fill = [&](c10::CachingDeviceAllocator::StatArray& to, Kind kind) {
      for (size_t i = 0; i < 3; i++) {
        to[i].current = cache.counts[kind][i].now;
        to[i].peak = cache.counts[kind][i].peak;
        to[i].allocated = cache.counts[kind][i].allocated;
        to[i].freed = cache.counts[kind][i].freed;
      }
    };
    fill(stats.allocation, ALLOCATION);
    fill(stats.allocated_bytes, ALLOCATED);
    fill(stats.reserved_bytes, RESERVED);
    fill(stats.active_bytes, ACTIVE_BYTES);
    fill(stats.requested_bytes, REQUESTED);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard guard(device_lock());
    caches[index].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard guard(device_lock());
    caches[index].reset_peaks();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    auto& cache = caches[index];
    return {cache.capacity - cache.counts[RESERVED][0].now, cache.capacity};
  }
};
OfDevice of_current(-1);
OfDevice of_each[DEVICES] = {OfDevice(0), OfDevice(1)};
static_assert(DEVICES == 2);

std::string& answer() {
  static thread_local std::string text;
  return text;
}

} // namespace

c10::Allocator* allocator_of(int device) {
  return &of_each[device];
}
c10::Allocator* current_allocator() {
  return &of_current;
}
void record_stream(void* memory, int stream) {
  std::lock_guard guard(device_lock());
  auto found = owners.find(memory);
  if (found != owners.end() && found->second.second->stream != stream) {
    found->second.second->uses.insert(stream);
  }
}

} // namespace simulated

// ---------------------------------------------------------------- what Python asks, by ctypes
using namespace simulated;

// 0, or 1 where PyTorch would raise
template <typename Act>
static int refused(Act act) {
  std::lock_guard guard(device_lock());
  try {
    act();
    return 0;
  } catch (const c10::Error&) {
    return 1;
  }
}

extern "C" {

const char* simulated_stats(int device) {
  std::lock_guard guard(device_lock());
  auto& cache = caches[device];
  std::ostringstream out;
  out << "{";
  for (int kind = 0; kind < KINDS; kind++) {
    out << "\"" << NAMES[kind] << "\":{";
    const char* pools[] = {"all", "small_pool", "large_pool"};
    for (int i = 0; i < 3; i++) {
      const Count& c = cache.counts[kind][i];
      out << (i ? "," : "") << "\"" << pools[i] << "\":{\"current\":" << c.now << ",\"peak\":" << c.peak
          << ",\"allocated\":" << c.allocated << ",\"freed\":" << c.freed << "}";
    }
    out << "},";
  }
  out << "\"num_alloc_retries\":" << cache.retries << ",\"num_ooms\":" << cache.ooms << ",\"num_device_alloc\":"
      << cache.mallocs << ",\"num_device_free\":" << cache.frees << ",\"num_sync_all_streams\":" << cache.syncs << "}";
  return (answer() = out.str()).c_str();
}

const char* simulated_snapshot(int all, uint64_t first_half, uint64_t second_half) {
  std::lock_guard guard(device_lock());
  std::ostringstream out;
  bool first = true;
  out << "[";
  for (auto& cache : caches) {
    cache.snapshot(out, all, {first_half, second_half}, first);
  }
  out << "]";
  return (answer() = out.str()).c_str();
}

void simulated_reset_peaks(int device) {
  of_current.resetPeakStats(static_cast<c10::DeviceIndex>(device));
}
void simulated_reset_accumulated(int device) {
  of_current.resetAccumulatedStats(static_cast<c10::DeviceIndex>(device));
}
void simulated_empty_cache(uint64_t first, uint64_t second) {
  of_current.emptyCache({first, second});
}
void simulated_set_capacity(int device, int64_t bytes) {
  caches[device].capacity = bytes;
}
int64_t simulated_capacity(int device) {
  return caches[device].capacity;
}
void simulated_set_fraction(int device, double fraction) {
  caches[device].fraction = fraction;
}
double simulated_fraction(int device) {
  return caches[device].fraction;
}
void simulated_make_pool(int device, uint64_t id) {
  std::lock_guard guard(device_lock());
  caches[device].device = device;
  caches[device].enter_or_make({0, id});
}
int simulated_begin_pool(int device, uint64_t first, uint64_t second) {
  return refused([&] { caches[device].begin_pool({first, second}, std::this_thread::get_id()); });
}
int simulated_end_pool(int device, uint64_t first, uint64_t second) {
  return refused([&] { caches[device].end_pool({first, second}); });
}
int simulated_release_pool(int device, uint64_t first, uint64_t second) {
  return refused([&] { caches[device].release_pool({first, second}); });
}
int simulated_pool_uses(int device, uint64_t first, uint64_t second) {
  std::lock_guard guard(device_lock());
  return caches[device].uses_of({first, second});
}
void simulated_set_option(const char* name, int on) {
  std::string option = name;
  (option == "clocks"         ? clocks_on
       : option == "late"     ? late_on
       : option == "poison"   ? poison_on
       : option == "expandable" ? expandable_on
                              : throw std::invalid_argument(option)) = on != 0;
}
}
