"""Fold neighbouring ops by their modules in the user's code, until few enough groups are left to show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

Path = tuple[str, ...]  # layer1.0.conv2 is ("layer1", "0", "conv2")


class _Group(NamedTuple):
    """Neighbouring rows from ``first`` to ``last``, both included."""

    first: int
    last: int
    begin: Path  # module of the first of them that has one
    end: Path  # and of the last; the same where they are all of one
    weight: int


def fold(paths: Sequence[str], most: int, weights: Sequence[int] | None = None) -> list[tuple[str, range]]:
    """Group neighbours of one module, the innermost modules first, until few enough groups are left.

    Where one module would hold more than half of the weight, as with the many equal blocks of a transformer, it stays
    apart: then neighbours are taken together so that the heaviest group is as light as it can be; or, where this would
    leave no more than half of ``most``, the lightest neighbours first.

    Args:
        paths: a module path each, such as ``layer1.0.conv2``, empty where there is none, in order of execution.
        most: how many groups may be left, at least 1.
        weights: of each, whole numbers; by default 1.

    Returns:
        Of each group its module, or the first and the last of its modules, empty where there is none; and which of the
        paths it has.

    Raises:
        ValueError: if ``most`` is less than 1.

    >>> blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    >>> [label for label, _ in fold(["embed", *blocks, "head"], most=8)]
    ['embed', 'h.0', 'h.1', 'h.2', 'h.3', 'h.4', 'h.5', 'head']
    >>> fold([*blocks, "head"], most=4)
    [('h.0-1', range(0, 4)), ('h.2-3', range(4, 8)), ('h.4-5', range(8, 12)), ('head', range(12, 13))]
    """
    if most < 1:
        raise ValueError(f"most is a number of groups, at least 1, not {most!r}.")
    split = [tuple(path.split(".")) if path else () for path in paths]
    weights = [1] * len(split) if weights is None else weights
    groups = [_Group(i, i, path, path, weights[i]) for i, path in enumerate(split)]
    half = sum(weights) / 2
    deepest = max(map(len, split), default=0)
    for depth in range(deepest, 0, -1):
        if len(groups) <= most:
            break
        # Each run of neighbours that share the first names of their module, as many as the depth, is one group.
        folded: list[_Group] = []
        for module, same in groupby(groups, key=lambda g: g.begin[:depth] or g.first):
            run = list(same)
            whole = len(run) > 1 and isinstance(module, tuple)
            weight = sum(group.weight for group in run)
            folded.append(_Group(run[0].first, run[-1].last, module, module, weight) if whole else run[0])
        if depth < deepest and max(group.weight for group in folded) > max(half, *(g.weight for g in groups)):
            break
        groups = folded
    if len(groups) > most:
        # Group neighbours evenly, so that the heaviest group is as light as it can be.
        single, weighs = groups, [group.weight for group in groups]
        capacity = bisect_left(range(sum(weighs)), True, max(weighs), key=lambda c: len(_packed(single, c)) <= most)
        packed = _packed(groups, capacity)
        groups = packed if 2 * len(packed) > most else groups
    # A few are far heavier: take the lightest neighbours together.
    while len(groups) > most:
        i = min(range(len(groups) - 1), key=lambda i: groups[i].weight + groups[i + 1].weight)
        groups[i : i + 2] = [_joined(groups[i], groups[i + 1])]
    return [(_label(group, split), range(group.first, group.last + 1)) for group in groups]


def _packed(groups: list[_Group], capacity: int) -> list[_Group]:
    """Merge neighbouring groups up to this weight."""
    packed: list[_Group] = []
    for group in groups:
        if packed and packed[-1].weight + group.weight <= capacity:
            packed[-1] = _joined(packed[-1], group)
        else:
            packed.append(group)
    return packed


def _joined(a: _Group, b: _Group) -> _Group:
    return _Group(a.first, b.last, a.begin or b.begin, b.end or a.end, a.weight + b.weight)


def _label(group: _Group, paths: list[Path]) -> str:
    """``h`` for a whole module, ``h.0-3`` for some neighbours within it, ``embed - h.3`` for others."""
    inside = [path for path in paths[group.first : group.last + 1] if path]
    # Names at the front that all of them have in common.
    pairs = zip(min(inside, default=()), max(inside, default=()), strict=False)
    shared = tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    outside = (*paths[: group.first], *paths[group.last + 1 :])
    if shared and (len(set(inside)) == 1 or all(path[: len(shared)] != shared for path in outside)):
        return ".".join(shared)
    begin, end = group.begin, group.end
    if begin == end:  # some of a module, the rest of which is elsewhere
        begin, end = (path[: len(shared) + 1] for path in (inside[0], inside[-1])) if inside else ((), ())
    n = len(shared)
    if n and begin != end and min(len(begin), len(end)) > n and begin[n + 1 :] == end[n + 1 :]:
        return f"{'.'.join(begin[: n + 1])}-{end[n]}"
    return " - ".join(dict.fromkeys(filter(None, map(".".join, (begin, end)))))
