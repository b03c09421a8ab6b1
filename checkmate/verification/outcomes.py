"""What a step leaves behind, and how far from plain PyTorch's it may be where bits cannot be compared.

By as much as plain runs differ among themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.backends.tensor_state import same_bits
from checkmate.errors import VerificationError
from checkmate.memory import MemoryUse

log = logging.getLogger("checkmate.verification.compare")

PLAIN_RUNS = 5  # of a plain step that a compiled one differs from: ten distances between them
TIMES_SPREAD = 4  # as far off as gradients of plain runs are among themselves, those of a compiled step may be


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind."""

    results: dict[str, torch.Tensor]
    random_states: dict[str, Any]  # by the generator's name
    use: MemoryUse

    def count(self, kind: str) -> int:
        """How many results are of a kind: those whose names begin so."""
        return sum(name.startswith(kind) for name in self.results)


def as_error(name: str, *, repeats: bool) -> str:
    """What to say of a result that differs."""
    if repeats:
        return (
            f"{name} of the compiled step differs from plain PyTorch, which repeats its own bits. Please report this."
        )
    return (
        f"{name} of the compiled step differs from plain PyTorch, which does not give the same bits twice here. "
        "torch.use_deterministic_algorithms(True) may help."
    )


def names_that_differ(expected: Outcome, found: Outcome) -> list[str]:
    """Names of the results that are not the same bits in both."""
    names = [*expected.results, *(found.results.keys() - expected.results.keys())]
    return [name for name in names if not same_bits(expected.results.get(name), found.results.get(name))]


def is_gradient(name: str) -> bool:
    """Whether a result is a gradient."""
    return name.startswith("the gradient")


def compare_with_spread(
    names: list[str], plain: list[Outcome], found: Outcome, sums: Callable[[str], bool] = is_gradient
) -> float:
    """Hold what differs against what plain runs differ by among themselves, in each tensor by the largest element.

    Where kernels add in no order of their own, a tensor may come out the same in all of a few runs and differ in the
    next. So it is decided for all gradients together: if one of them differs between plain runs, each may be off by
    `TIMES_SPREAD` times the largest spread of its type, as a share of its largest element. What is off by less is not
    told from rounding. Outputs are held against their own spread: as many as repeat must be the same.

    Args:
        names: of what differs.
        plain: several runs of the plain step.
        found: the compiled one.
        sums: of a result, by its name: it is a gradient, or is computed from gradients.

    Returns the largest spread of two plain runs.

    min_i |found - plain_i|  <=  max_ij |plain_i - plain_j|,  or of gradients
                             <=  4 * max |plain| * max over all of their type (max_ij |plain_i - plain_j| / max |plain|)
    """
    together = [name for name, t in plain[0].results.items() if sums(name) and t.is_floating_point() and t.numel()]
    spreads = {name: _spread(name, plain) for name in dict.fromkeys([*names, *together])}
    share: dict[torch.dtype, float] = {}
    for name in together:
        kind, most = plain[0].results[name].dtype, _largest(plain[0].results[name])
        share[kind] = max(share.get(kind, 0.0), spreads[name] / most if most else 0.0)
    for name in names:
        runs, result = [outcome.results.get(name) for outcome in plain], found.results.get(name)
        off, allowed = min(distance(result, run) for run in runs), spreads[name]
        if name in together and runs[0] is not None:
            allowed = TIMES_SPREAD * max(allowed, share[runs[0].dtype] * _largest(runs[0]))
        if allowed == 0:
            raise VerificationError(as_error(name, repeats=True))
        if not off <= allowed:
            raise VerificationError(
                f"{name} of the compiled step differs from plain PyTorch by {off:.3g} at least. Plain PyTorch does not "
                f"repeat its own numbers here, but {len(plain)} runs of it differ by {spreads[name]:.3g} at most, and "
                f"{allowed:.3g} is allowed. torch.use_deterministic_algorithms(True) makes it repeat them. Please "
                "report this if it differs then."
            )
    largest = max(spreads, key=lambda name: spreads[name])
    log.warning(
        "Plain PyTorch does not repeat its own numbers here: %d of its results differ between %d runs, %s by %.3g. "
        "The compiled step is within that spread; bits could not be compared. "
        "torch.use_deterministic_algorithms(True) makes them repeat.",
        sum(spread > 0 for spread in spreads.values()),
        len(plain),
        largest,
        spreads[largest],
    )
    return spreads[largest]


def _spread(name: str, plain: list[Outcome]) -> float:
    """The largest difference of an element between two runs."""
    runs = [outcome.results.get(name) for outcome in plain]
    return max(distance(a, b) for i, a in enumerate(runs) for b in runs[:i])


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference of two elements; 0 for the same bits, infinite where they cannot be compared."""
    if same_bits(a, b):
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    apart = (x - y).abs()
    apart[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal infinities
    return float(apart.nan_to_num(nan=float("inf")).max())
