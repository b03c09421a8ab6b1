"""The findings in words: the verdict, the line of code to write, and the assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.fitting.answer import LargestSizes, MemoryOption
from checkmate.fitting.memory_options import IN_PARTS, RECOMPUTATION, WITH_HOST
from checkmate.fitting.target_device import TargetDevice, written
from checkmate.units import format_bytes, format_seconds


def verdict(
    place: TargetDevice,
    plain_peak: int,
    plain_seconds: float,
    ways: tuple[MemoryOption, ...],
    best: MemoryOption | None,
    sizes: LargestSizes | None,
) -> str:
    """Tell whether it fits, and how, in a sentence."""
    needs, room = format_bytes(plain_peak), format_bytes(place.room)
    if plain_peak <= place.room:
        return f"It fits {place.name} as it is: plain PyTorch takes about {needs}, and there is room for {room}."
    if best is None:
        least = min((way.smallest for way in ways if way.smallest is not None), default=plain_peak)
        smaller = f"; a batch of {sizes.planned} does" if sizes is not None and sizes.planned else ""
        proven = all(way.bound is None or way.bound > place.budget for way in ways)
        found = "the smallest budget" if proven else "the smallest budget found"
        return (
            f"It does not fit {place.name}: there is room for {room}, plain PyTorch takes about {needs}, and {found} "
            f"of any way is {format_bytes(least)}{smaller}."
        )
    again = f"{best.overhead:.1%} of it runs again" if best.overhead else "nothing runs twice"
    took, plain_took = format_seconds(best.seconds or 0.0), format_seconds(plain_seconds)
    how = _HOW[best.name] if best.overhead or best.name != RECOMPUTATION else "as one whole step"
    return (
        f"It fits {place.name} {how}: planned, the step takes {format_bytes(best.peak or 0)} of the {room} "
        f"that there is room for, where plain PyTorch takes about {needs}; {again}, and it takes about {took} instead "
        f"of {plain_took}."
    )


_HOW = {
    RECOMPUTATION: "by recomputation",
    IN_PARTS: "by recomputation, with its loss in parts",
    WITH_HOST: "only with a second memory",
}


def line_of_code(fn: Callable[..., Any], best: MemoryOption | None, *, plainly: bool, room: int) -> str:
    """The line to write."""
    name = getattr(fn, "__name__", "loss_fn")
    name = name if name.isidentifier() else "loss_fn"
    if plainly:
        return f"loss = {name}(*batch); loss.backward(); optimizer.step(); optimizer.zero_grad()"
    if best is None:
        return "none: take a smaller batch, a lower precision or another device"
    options = "".join(f", {option}={value}" for option, value in best.options.items())
    return f'step = checkmate.training_step({name}, optimizer, budget="{written(room)}"{options})'


def notes(
    place: TargetDevice,
    problem: Problem,
    host: Host | None,
    make_batch: Callable[[int], Any] | None,
    ways: tuple[MemoryOption, ...],
    largest: LargestSizes | None,
) -> Iterator[str]:
    """The assumptions, and the meaning of the words on the page."""
    yield "nothing run twice: a planned step that runs each op once, and lets go of each gradient at its update"
    looked_at = {way.name for way in ways if way.smallest is not None}
    if IN_PARTS in looked_at:
        yield f"{IN_PARTS}: logits of a language model are computed for some rows after the others, with the same bits"
    if WITH_HOST in looked_at:
        yield f"{WITH_HOST}: values wait in the memory of the host until the backward reads them"
    yield f"costs: {problem.profile.source}"
    if WITH_HOST in looked_at and (there := place.host(host)) is not None:
        yield f"second memory: {there}{'' if host is not None else ' (assumed)'}"
    if make_batch is None and largest is not None:
        yield "sizes of the batch scale the first dimension that all its tensors share"
