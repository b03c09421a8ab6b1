"""The allocator of an arena, asked for blocks by themselves: whatever is asked for when, no two that live overlap."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from benchmarks.common.resident import status
from checkmate.backends.static_memory import place_soon
from checkmate.memory import measure_peak, native
from checkmate.memory.arena import Arena, Counts, Offsets
from checkmate.memory.lives import Lives
from tests.support.sampling import in_turn, long

TINY = 4096


@pytest.fixture(scope="module")
def library() -> Any:
    native.start()
    assert native.wait() is None
    found = native.library()
    assert found.checkmate_install()
    return found


class Blocks:
    """Blocks of memory, each full of a number of its own from its first to its last byte."""

    def __init__(self, library: Any) -> None:
        self._library, self._number = library, 0
        self.live: dict[int, tuple[int, int]] = {}  # address: words, number

    def take(self, size: int) -> int:
        address = self._library.checkmate_allocate(size)
        assert address % 64 == 0
        self._number += 1
        self.live[address] = size // 8, self._number
        self._words(address)[:] = self._number
        return address

    def free(self, address: int) -> None:
        words, (_, number) = self._words(address), self.live[address]
        assert (words == number).all(), "somebody wrote into a block that is alive"
        del self.live[address]
        self._library.checkmate_free(address)

    def _words(self, address: int) -> np.ndarray:
        count = self.live[address][0]
        about = {"data": (address, False), "shape": (count,), "typestr": "<u8", "version": 3}
        return np.asarray(type("Words", (), {"__array_interface__": about})())


def in_one_place(lives: Lives) -> Offsets:
    return [0] * len(lives.sizes)


def every_second_wrong(lives: Lives) -> Offsets:
    return [at if i % 2 else at // 128 * 64 for i, at in enumerate(place_soon(lives))]


def above_each_other(lives: Lives) -> Offsets:
    return [0, *np.cumsum(lives.sizes)[:-1].tolist()]


@dataclass
class Later:
    """Offsets that are found later."""

    result: Offsets | None
    is_over: bool = False


Event = tuple[str, int]  # take so many bytes, or free the block of that position


def draw_steps(rng: random.Random, count: int) -> list[list[Event]]:
    """A forward and a backward."""
    events: list[Event] = []
    alive: list[int] = []
    made = 0
    for _ in range(count):
        if alive and rng.random() < 0.45:
            events.append(("free", alive.pop(rng.randrange(len(alive)))))
        else:
            size = 8 * rng.choice([512, 513, 800, 1024, 5000, rng.randrange(512, 20_000), 16])
            events.append(("take", size))
            alive.append(made)
            made += 1
    return [events[: count // 2], events[count // 2 :]]


def in_a_thread(run: Callable[..., None], *args: Any) -> None:
    thread = threading.Thread(target=run, args=args)
    thread.start()
    thread.join()


def run_step(
    arena: Arena, blocks: Blocks, phases: list[list[Event]], diverge: Callable[[], bool], rng: random.Random
) -> list[int]:
    """Run both phases, now and then differently, and hand back what was not freed."""
    made: list[int | None] = []
    others: list[int] = []

    def run(events: list[Event]) -> None:
        for kind, number in events:
            if diverge():
                others.append(blocks.take(8 * rng.randrange(512, 9000)))
            if kind == "take":
                more = rng.randrange(64) if diverge() else 0
                made.append(None if diverge() else blocks.take(number + 8 * more))
            elif (block := made[number]) is not None:
                if diverge():
                    others.append(block)
                elif diverge():
                    in_a_thread(blocks.free, block)
                else:
                    blocks.free(block)
                made[number] = None

    for phase, events in zip(("forward", "backward"), phases, strict=True):
        arena.within(phase, lambda _, events=events: run(events))([])
    return [block for block in (*made, *others) if block is not None]


def repeat(arena: Arena, blocks: Blocks, phases: list[list[Event]], rng: random.Random) -> Counts:
    """Run both phases as they are, free what is left, and hand back what the arena counts."""
    for address in run_step(arena, blocks, phases, lambda: False, rng):
        blocks.free(address)
    return arena.counts


@pytest.mark.slow
@in_turn(plan=[place_soon, in_one_place, every_second_wrong], seed=[0, 1, *map(long, range(2, 6))])
def test_no_two_blocks_that_live_overlap(library: Any, seed: int, plan: Any) -> None:
    """Two arenas that take turns, steps that differ from those noted, blocks that stay for some steps."""
    rng = random.Random(seed)
    often = 0.03 if seed % 2 else 0.0
    blocks = Blocks(library)
    soon = lambda lives: Later(place_soon(lives), is_over=rng.random() < 0.5)  # noqa: E731  # other addresses, or none
    arenas = [(Arena(plan, 2_000_000, soon), draw_steps(rng, 120)) for _ in range(2)]
    stay: list[int] = []
    for step in range(24):
        arena, phases = arenas[(step // 3) % 2]
        stay += run_step(arena, blocks, phases, lambda: rng.random() < often, rng)
        rng.shuffle(stay)
        keep = rng.randrange(len(stay) + 1) if step % 4 == 1 else 0
        while len(stay) > keep:
            blocks.free(stay.pop())
        if step == 11:
            arena.expect(rng.choice([100_000, 3_000_000]))  # while some of its blocks are alive
        if step == 17:
            arenas[0] = (Arena(plan, 100_000), phases)  # the other is gone, some of its blocks are alive
    while stay:
        blocks.free(stay.pop())
    assert not blocks.live


def test_a_step_that_repeats_is_served_whole_from_the_second_time_on(library: Any) -> None:
    rng = random.Random(7)
    phases = draw_steps(rng, 200)
    arena, blocks = Arena(place_soon, 4_000_000), Blocks(library)
    for step in range(4):
        counts = repeat(arena, blocks, phases, rng)
        assert (counts.steps, counts.layouts) == (step + 1, min(step, 1))
        assert counts.fallbacks == 0
    assert counts.served == sum(kind == "take" and size >= TINY for kind, size in phases[0] + phases[1])
    assert arena.live_peak <= counts.arena <= 1.3 * arena.live_peak
    assert counts.alive == 0


@pytest.mark.parametrize("expected", [False, True])
def test_a_step_that_changes_for_good_is_planned_anew(library: Any, expected: bool) -> None:
    """One that is expected is served whole at once."""
    rng = random.Random(3)
    arena, blocks = Arena(place_soon, 4_000_000), Blocks(library)
    for layouts, phases in enumerate((draw_steps(rng, 100), draw_steps(rng, 140))):
        for step in range(3 if expected else 8):
            counts = repeat(arena, blocks, phases, rng)
            if expected:
                assert (counts.fallbacks, counts.layouts) == (0, layouts + min(step, 1))
        assert counts.fallbacks == 0
        if expected:
            arena.expect(4_000_000)
    assert counts.layouts == 2


@pytest.mark.parametrize("found", ["lower", "nothing", "no lower"])
def test_lower_addresses_that_are_found_later_hold_from_then_on(library: Any, found: str) -> None:
    rng = random.Random(5)
    phases, asked = draw_steps(rng, 150), list[Later]()

    def later(lives: Lives) -> Later:
        results = {"lower": place_soon(lives), "nothing": None, "no lower": above_each_other(lives)}
        asked.append(Later(results[found]))
        return asked[-1]

    arena, blocks = Arena(above_each_other, 4_000_000, later), Blocks(library)
    heights = []
    for step in range(6):
        if step == 4:
            asked[0].is_over = True
        heights.append(repeat(arena, blocks, phases, rng).arena)
        assert len(asked) == min(step, 1)
        assert arena.settled == (step not in (1, 2, 3))
    assert arena.counts.fallbacks == 0
    assert (heights[4] == heights[5] < 0.7 * heights[3]) == (found == "lower")
    assert heights[1] == heights[2] == heights[3]
    assert arena.counts.layouts == 1 + (found == "lower")


def test_what_is_not_of_the_step_is_not_the_arenas(library: Any) -> None:
    """Small blocks, those between forward and backward, and those of other threads."""
    arena, blocks = Arena(place_soon, 1_000_000), Blocks(library)

    def elsewhere() -> None:
        blocks.free(blocks.take(80_000))

    def forward(_: list[Any]) -> None:
        blocks.free(blocks.take(TINY - 8))
        in_a_thread(elsewhere)

    arena.within("forward", forward)([])
    elsewhere()
    assert arena.counts.served == arena.counts.fallbacks == 0
    arena.within("backward", lambda _: elsewhere())([])
    assert (arena.counts.served, arena.counts.served_bytes) == (1, 80_000)


def test_a_step_within_itself_and_in_two_threads_is_served_once(library: Any) -> None:
    arena, blocks = Arena(place_soon, 1_000_000), Blocks(library)

    def inner(_: list[Any]) -> None:
        blocks.free(blocks.take(8000))

    def outer(_: list[Any]) -> None:
        arena.within("forward", inner)([])  # by the arena all the same: it is this thread's
        in_a_thread(arena.within("forward", inner), [])

    arena.within("forward", outer)([])
    assert (arena.counts.steps, arena.counts.served) == (1, 1)
    blocks.free(blocks.take(8000))
    assert arena.counts.served == 1
    arena, other = Arena(place_soon, 1_000_000), Arena(place_soon, 1_000_000)

    def within(_: list[Any]) -> None:
        arena.within("forward", inner)([])  # which serves until it is left
        blocks.free(blocks.take(16_000))

    other.within("forward", within)([])
    assert (arena.counts.served_bytes, other.counts.served_bytes) == (8000, 16_000)


def test_the_meter_counts_the_same_bytes(library: Any) -> None:
    arena = Arena(place_soon, 1_000_000)
    sizes = (8000, 100, 50_000, 2_000_000)  # the last is more than there is room for

    def run(_: list[Any]) -> None:
        for address in [library.checkmate_allocate(size) for size in sizes]:
            library.checkmate_free(address)

    for _ in range(3):
        use = measure_peak(lambda: arena.within("forward", run)([]))
        assert (use.peak, use.final) == (sum(sizes), 0)


def test_bytes_go_back_when_the_arena_is_gone_or_another_takes_over(library: Any) -> None:
    """As the machine counts them: all but the page of what is alive."""
    arena, other, blocks = Arena(place_soon, 64_000_000), Arena(place_soon, 1_000_000), Blocks(library)

    def run(_: list[Any]) -> None:
        addresses = [blocks.take(8_000_000) for _ in range(6)]
        stay.append(blocks.take(TINY))
        for address in addresses:
            blocks.free(address)

    for taken_over in (True, False):
        stay: list[int] = []
        before = status("VmRSS")
        arena.within("forward", run)([])
        assert status("VmRSS") - before > 40_000_000
        if taken_over:
            other.within("forward", lambda _: None)([])
        else:
            del arena
        assert status("VmRSS") - before < 4_000_000
        for address in stay:
            blocks.free(address)
