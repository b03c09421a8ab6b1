"""A long row of module paths as a few groups of neighbours that people know by name, for pictures and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

Path = tuple[str, ...]  # layer1.0.conv2 is ("layer1", "0", "conv2")


@dataclass(frozen=True)
class Fold:
    """Neighbours of a row: those from ``first`` to ``last``, both included."""

    first: int
    last: int
    label: str  # their common module, with the first and last of its parts where it is not whole; may be empty

    def __len__(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class _Group:
    first: int
    last: int
    begin: Path  # of the first of them
    end: Path  # of the last
    shared: int  # how many names at the front all of them have in common
    whole: bool  # stands for everything of its module around here

    @property
    def module(self) -> Path:
        return self.begin[: self.shared]


def fold(paths: Sequence[str], most: int) -> tuple[Fold, ...]:
    """Neighbours with a common module as one group, the innermost modules first, until few enough groups are left.

    Where folding one more level of modules would leave no more than half of ``most``, as with the many equal blocks of
    a transformer, only neighbours are taken together, two by two.

    Args:
        paths: a module path each, such as ``layer1.0.conv2``, empty where there is none, in order of execution.
        most: how many groups may be left, at least 1.

    Raises:
        ValueError: if it is less.

    >>> blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    >>> [group.label for group in fold(["embed", *blocks, "head"], most=8)]
    ['embed', 'h.0', 'h.1', 'h.2', 'h.3', 'h.4', 'h.5', 'head']
    >>> [group.label for group in fold(["embed", *blocks, "head"], most=6)]
    ['embed', 'h.0-1', 'h.2-3', 'h.4-5', 'head']
    """
    if most < 1:
        raise ValueError(f"most is a number of groups, at least 1, not {most!r}.")
    split = [tuple(path.split(".")) if path else () for path in paths]
    groups = [_Group(i, i, path, path, len(path), True) for i, path in enumerate(split)]
    depth = max(map(len, split), default=0)
    while len(groups) > most:
        folded = list(_merged(groups, depth, lambda run: [run]))
        if len(folded) > most or len(folded) * 2 > most:
            groups, depth = folded, depth - 1
        else:
            groups = list(_merged(groups, depth, lambda run: [run[i : i + 2] for i in range(0, len(run), 2)]))
    return tuple(Fold(group.first, group.last, _label(group)) for group in groups)


def _merged(groups: list[_Group], depth: int, cut: Callable[[list[_Group]], list[list[_Group]]]) -> Iterator[_Group]:
    """Each run of neighbours with the same first ``depth`` names, cut into pieces, each piece as one group."""
    for _, same in groupby(groups, key=lambda g: g.module[:depth] if g.shared >= depth else (*g.module, g.first)):
        pieces = cut(list(same))
        for piece in pieces:
            first, last = piece[0], piece[-1]
            if len(piece) == 1:
                yield first
            else:
                yield _Group(first.first, last.last, first.begin, last.end, depth, len(pieces) == 1)


def _label(group: _Group) -> str:
    if group.whole:
        return ".".join(group.module)
    ends = [".".join(path[: group.shared + 1]) for path in (group.begin, group.end)]
    if not group.shared or ends[0] == ends[1]:
        return " - ".join(dict.fromkeys(filter(None, ends)))
    tail = group.end[group.shared : group.shared + 1]
    return "-".join([ends[0], *tail])
