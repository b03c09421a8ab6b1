"""The rules of PyTorch's caching allocator on CUDA, in Python: the blocks it gives, request by request.

`replay` runs a plan by them from the present state of a device: the bytes that its allocator gives and holds.

After `c10/cuda/CUDACachingAllocator.cpp`, whose names are in parentheses. Sizes are rounded up to blocks of 512 bytes.
Up to 1 MiB a block is in the small pool, above it in the large one. A pool serves from the smallest free block that is
large enough, the lowest of equal ones, and splits off what is left: always in the small pool, above 1 MiB in the large
one, so that a large block can be up to 1 MiB more than what was asked for. Where no free block is large enough, a
segment is had of the device: 2 MiB, 20 MiB, or for 10 MiB and more as much as is needed, in units of 2 MiB. Free
neighbours are one block. With ``expandable_segments:True`` each pool has one range of addresses that grows by whole
units, and everything is split. Each stream, and each `torch.cuda.MemPool`, has pools of its own.

The bytes given and held are those of the allocator, to the byte of a simulated device, on which alone it was tried.
Not known: where a segment is beside those before (the next one is taken to be above them); how many addresses without
memory an expandable segment has below its first block (a snapshot does not list them: taken to be none, which can make
``reserved`` wrong by a unit of 20 MiB); other settings than ``expandable_segments``
(`DeviceState.now` knows them).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from checkmate.memory.lives import Lives
from checkmate.torch_internals.running import _snapshot

BLOCK = 512  # bytes: sizes are multiples of it (kMinBlockSize)
SMALL = 1 << 20  # up to this size blocks are in the small pool (kSmallSize)
SEGMENT = 2 << 20  # bytes of a segment of the small pool, and the unit of large ones (kSmallBuffer, kRoundLarge)
LARGE_SEGMENT = 20 << 20  # bytes of a segment for blocks below `LARGE`, and what an expandable one grows by
LARGE = 10 << 20  # from this size on a block has a segment of its own (kMinLargeAlloc)
ENDLESS = 1 << 60  # bytes that an expandable segment may grow by: addresses of the whole device and an eighth
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"  # in older versions PYTORCH_CUDA_ALLOC_CONF
IN_USE = "active_allocated"  # a block's state in a snapshot
STEPS = 4  # replayed at most, until one leaves the allocator as the one before did

PoolKey = tuple[tuple[int, ...], int]  # the id of a `torch.cuda.MemPool`, (0, 0) without; the stream


class Used(NamedTuple):
    """Peak bytes."""

    allocated: int  # of the blocks in use
    reserved: int  # held of the device


@dataclass(eq=False)
class Block:
    """A piece of a segment, with its neighbours."""

    begin: int  # address
    size: int  # bytes
    pool: _Pool
    previous: Block | None = None
    next: Block | None = None
    in_use: bool = False
    mapped: bool = True  # has memory: of an expandable segment some addresses have none
    expandable: bool = False
    base: int = 0  # an address from which an expandable segment has memory in whole units

    def __lt__(self, other: Block) -> bool:
        return (self.size, self.begin) < (other.size, other.begin)

    @property
    def can_grow_to(self) -> int:
        """Bytes, including the addresses above it without memory."""
        beyond = self.next
        return self.size + (beyond.size if beyond is not None and not beyond.mapped else 0)


@dataclass(eq=False)
class _Pool:
    """Small or large blocks of one stream, in a `torch.cuda.MemPool` or in none."""

    is_small: bool
    free: list[Block] = field(default_factory=list)  # by size and address
    unmapped: list[Block] = field(default_factory=list)  # of expandable segments, in the same order

    @property
    def unit(self) -> int:
        """Bytes by which an expandable segment grows."""
        return SEGMENT if self.is_small else LARGE_SEGMENT

    def fitting(self, size: int) -> Block | None:
        """Take the free block for this many bytes (get_free_block)."""
        i = bisect_left(self.free, size, key=lambda block: block.size)
        if i == len(self.free):
            return None
        # Take the first expandable block that can grow less than the next one.
        while self.free[i].expandable and i + 1 < len(self.free):
            if self.free[i + 1].can_grow_to >= self.free[i].can_grow_to:
                break
            i += 1
        return self.free.pop(i)

    def give_back(self, block: Block) -> None:
        """Free a block, merged with free neighbours (free_block)."""
        block.in_use = False
        self.merge(block)
        insort(self.free, block)

    def merge(self, block: Block) -> None:
        """Merge a block that is in no list with free neighbours of its kind (try_merge_blocks)."""
        for other in (block.previous, block.next):
            if other is None or other.in_use or other.mapped != block.mapped:
                continue
            _remove(self.free if other.mapped else self.unmapped, other)
            block.size += other.size
            if other is block.previous:
                block.begin, block.previous = other.begin, other.previous
                if block.previous is not None:
                    block.previous.next = block
            else:
                block.next = other.next
                if block.next is not None:
                    block.next.previous = block


class CudaAllocator:
    """The state and rules of PyTorch's allocator on a device.

    Args:
        expandable: it runs with ``expandable_segments:True``.
        capacity: bytes that it can have of the device in all.

    >>> mib, allocator = 1 << 20, CudaAllocator()
    >>> whole = allocator.take(11 * mib)  # of a segment of 12 MiB, of whose last it splits nothing off
    >>> allocator.allocated // mib, allocator.reserved // mib
    (12, 12)
    >>> allocator.free(whole)
    >>> allocator.allocated, allocator.reserved // mib
    (0, 12)
    """

    def __init__(self, *, expandable: bool = False, capacity: float = math.inf) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.allocated = self.reserved = 0  # bytes
        self._pools: dict[tuple[PoolKey, bool], _Pool] = {}
        self._above = 0  # addresses from here on are nobody's
        self.peaks = Used(0, 0)  # the most bytes since `reset_peaks`

    def reset_peaks(self) -> None:
        """Reset the peaks."""
        self.peaks = Used(self.allocated, self.reserved)

    def take(self, size: int, key: PoolKey = ((0, 0), 0)) -> Block:
        """Allocate a block of this many bytes, more than 0, from the pools of a stream.

        Raises:
            torch.OutOfMemoryError: if the device has no room, when all that is free has been given back to it.
        """
        size = rounded(size, BLOCK)
        is_small = size <= SMALL
        pool = self._pools.setdefault((key, is_small), _Pool(is_small))
        block = pool.fitting(size) or self._new(pool, size)
        if block is None and key[0] == (0, 0):  # while a pool is in use nothing is given back
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            raise torch.OutOfMemoryError(
                f"{size} bytes are not to be had: {self.reserved} of {self.capacity} are held."
            )
        # Split off what is left, if the allocator does (should_split).
        remainder = block.size - size
        if remainder >= BLOCK if is_small or self.expandable else remainder > SMALL:
            insort(pool.free, _parted(block, size))
        block.in_use = True
        self._count(block.size, 0)
        return block

    def free(self, block: Block) -> None:
        """Free a block."""
        self._count(-block.size, 0)
        block.pool.give_back(block)

    def empty_cache(self) -> None:
        """Return to the device all unused segments, and all unused whole units of expandable ones."""
        for ((pool_id, _), _), pool in self._pools.items():
            for block in list(pool.free) if pool_id == (0, 0) else ():
                if not block.expandable:
                    if block.previous is block.next is None:
                        pool.free.remove(block)
                        self._count(0, -block.size)
                    continue
                # Take the memory of whole units from it (unmap_block).
                begin = block.base + rounded(block.begin - block.base, pool.unit)
                end = block.base + (block.begin + block.size - block.base) // pool.unit * pool.unit
                if end <= begin:
                    continue
                _remove(pool.free, block)
                within = block
                if begin > block.begin:
                    within = _parted(block, begin - block.begin)
                    insort(pool.free, block)
                if end < within.begin + within.size:
                    insort(pool.free, _parted(within, end - within.begin))
                within.mapped = False
                self._count(0, -within.size)
                pool.merge(within)
                insort(pool.unmapped, within)

    @property
    def state(self) -> Any:
        """A key of its state: equal keys behave alike."""
        return [
            (key, [(block.size, block.begin) for block in pool.free], [block.begin for block in pool.unmapped])
            for key, pool in self._pools.items()
        ]

    def add_segment(self, segment: dict[str, Any]) -> None:
        """Add a segment from `torch.cuda.memory_snapshot`, above all segments added before."""
        key = tuple(segment["segment_pool_id"]), segment["stream"]
        is_small = segment["segment_type"] == "small"
        pool = self._pools.setdefault((key, is_small), _Pool(is_small))
        # An expandable one goes on where the one before it ended, behind addresses without memory.
        below, expandable = None, segment["is_expandable"]
        if expandable and pool.unmapped and pool.unmapped[-1].size == ENDLESS:
            below = pool.unmapped.pop()
            if gap := segment["address"] - below.begin:
                below.size = gap
                insort(pool.unmapped, below)
            else:
                below = below.previous
        base = segment["address"] if below is None else below.base
        for piece in segment["blocks"]:
            in_use = piece["state"] == IN_USE
            block = Block(piece["address"], piece["size"], pool, below, None, in_use, expandable=expandable, base=base)
            if below is not None:
                below.next = block
            below = block
            if in_use:
                self._count(block.size, 0)
            else:
                insort(pool.free, block)
        self._count(0, segment["total_size"])
        self._above = max(self._above, segment["address"] + segment["total_size"])
        if expandable and below is not None:
            self._endless(pool, below.begin + below.size, base, below)

    def _count(self, allocated: int, reserved: int) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.peaks = Used(max(self.peaks.allocated, self.allocated), max(self.peaks.reserved, self.reserved))

    def _new(self, pool: _Pool, size: int) -> Block | None:
        """A block from the device (alloc_block); None if the device is full."""
        if not self.expandable:  # a segment of its own (get_allocation_size)
            segment = SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else rounded(size, SEGMENT)
            if self.reserved + segment > self.capacity:
                return None
            block = Block(self._above, segment, pool)
            self._above += segment
            self._count(0, segment)
            return block
        # Addresses of an expandable segment, which grows until they have memory (try_allocate_expandable_block).
        block = self._growing(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            beyond = block.next
            assert beyond is not None
            if not self._map(beyond, min(size - block.size, beyond.size)):
                return None
            block = beyond  # with what was before it
        _remove(pool.free, block)
        return block

    def _growing(self, pool: _Pool, size: int) -> Block:
        """Find addresses for this many bytes (find_expandable_block)."""
        for unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before is not None and not before.in_use else unmapped
            room, block = 0, first
            while block is not None and not block.in_use and room < size:
                room += block.size
                block = block.next  # type: ignore[assignment]
            if room >= size:
                return first
        return self._endless(pool, self._above, self._above, None)

    def _endless(self, pool: _Pool, begin: int, base: int, below: Block | None) -> Block:
        """Addresses without memory at the end of an expandable segment."""
        block = Block(begin, ENDLESS, pool, below, mapped=False, expandable=True, base=base)
        if below is not None:
            below.next = block
        insort(pool.unmapped, block)
        self._above = max(self._above, begin + ENDLESS)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map memory for this many bytes in whole units (map_block); tell whether the device had it."""
        pool = block.pool
        nbytes = min(rounded(size, pool.unit), block.size)
        if self.reserved + nbytes > self.capacity:
            return False
        _remove(pool.unmapped, block)
        if nbytes < block.size:
            insort(pool.unmapped, _parted(block, nbytes))
        block.mapped = True
        self._count(0, nbytes)
        pool.give_back(block)
        return True


def _parted(block: Block, size: int) -> Block:
    """Cut a block that is in no list after its first bytes; give the rest, which is in none either."""
    remainder = Block(block.begin + size, block.size - size, block.pool, block, block.next)
    remainder.mapped, remainder.expandable, remainder.base = block.mapped, block.expandable, block.base
    if remainder.next is not None:
        remainder.next.previous = remainder
    block.next, block.size = remainder, size
    return remainder


def _remove(blocks: list[Block], block: Block) -> None:
    del blocks[bisect_left(blocks, block)]


def rounded(size: int, to: int) -> int:
    """The least multiple of ``to`` that is not below ``size``."""
    return -(-size // to) * to


@dataclass(frozen=True)
class DeviceState:
    """A snapshot of PyTorch's allocator on a device, and its settings."""

    segments: tuple[dict[str, Any], ...] = ()  # as `torch.cuda.memory_snapshot` lists them, by address
    expandable: bool = False  # it runs with ``expandable_segments:True``
    capacity: float = math.inf  # bytes that it can have of the device in all
    stream: int = 0  # on which the step runs

    @classmethod
    def now(cls, device: torch.device) -> DeviceState | None:
        """The state of a CUDA device; None if settings change the allocator's rules.

        Nothing may be under way that uses memory on another stream than its own.
        """
        if torch.cuda.get_allocator_backend() != "native":
            return None
        snapshot = _snapshot()
        settings = snapshot["allocator_settings"]
        switches = settings.get("max_split_size", -1) != -1, settings.get("garbage_collection_threshold", 0) != 0
        if any((*switches, *settings.get("roundup_power2_divisions", {}).values())):
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        segments = [segment for segment in snapshot["segments"] if segment["device"] == index]
        free, _ = torch.cuda.mem_get_info(device)
        return cls(
            tuple(sorted(segments, key=lambda segment: segment["address"])),
            bool(settings.get("expandable_segments")),
            free + sum(segment["total_size"] for segment in segments),
            torch.cuda.current_stream(device).cuda_stream,
        )

    @property
    def asked(self) -> list[int]:
        """Requested bytes of each block in use."""
        blocks = (block for segment in self.segments for block in segment["blocks"])
        return [block["requested_size"] for block in blocks if block["state"] == IN_USE]

    @property
    def allocator(self) -> CudaAllocator:
        """An allocator in this state."""
        allocator = CudaAllocator(expandable=self.expandable, capacity=self.capacity)
        for segment in self.segments:
            allocator.add_segment(segment)
        return allocator

    @property
    def expanding(self) -> CudaAllocator:
        """An allocator with expandable segments and the blocks in use here."""
        allocator = CudaAllocator(expandable=True, capacity=self.capacity)
        for size in self.asked:
            allocator.take(size, self.key)
        return allocator

    @property
    def key(self) -> PoolKey:
        """The pools of the step's stream."""
        return (0, 0), self.stream


def replay(lives: Lives, allocator: CudaAllocator, key: PoolKey = ((0, 0), 0)) -> Used:
    """The most bytes that an allocator gives and holds from now on, while blocks are allocated and freed.

    Blocks that die at a moment are gone before others are born at it; all are let go of in the end.

    Raises:
        torch.OutOfMemoryError: if the device has no room.

    >>> mib = 1 << 20
    >>> lives = Lives(np.array([4, 3, 3]) * mib, born=np.array([0, 1, 2]), died=np.array([2, 3, 4]))
    >>> used = replay(lives, CudaAllocator())
    >>> used.allocated // mib, used.reserved // mib  # the last gets the 4 MiB of the first
    (7, 20)
    """
    allocator.reset_peaks()
    held: list[tuple[int, Block]] = []  # when it dies; sorted
    sizes, born, died = (array.tolist() for array in (lives.sizes, lives.born, lives.died))
    for i in np.argsort(lives.born, kind="stable").tolist():
        while held and held[0][0] <= born[i]:
            allocator.free(held.pop(0)[1])
        if sizes[i]:
            insort(held, (died[i], allocator.take(sizes[i], key)), key=itemgetter(0))
    for _, block in held:
        allocator.free(block)
    return allocator.peaks


def replay_steps(lives: Lives, allocator: CudaAllocator, key: PoolKey = ((0, 0), 0)) -> Used:
    """Replay several steps; each frees its leftovers before the next begins."""
    allocated = reserved = 0
    for _ in range(STEPS):
        before = allocator.state
        used = replay(lives, allocator, key)
        allocated, reserved = max(allocated, used.allocated), max(reserved, used.reserved)
        if allocator.state == before:
            break
    return Used(allocated, reserved)
