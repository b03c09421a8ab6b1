"""A step as a picture of boxes and arrows, grouped by module if there are many ops."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from checkmate.core.problem import Problem
from checkmate.inspection.modules import fold
from checkmate.plot.style import BLUE, axes_of, pyplot
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODES = 40  # boxes, where nobody says how many
LONGEST = 40  # characters of a name in a box


@dataclass(frozen=True)
class _Node:
    """Neighbouring ops of the forward or of the backward, drawn as one box."""

    name: str
    ops: range
    x: float
    y: float
    seconds: float
    bytes: int  # of what they make


def graph(problem: Problem, *, most: int = NODES, ax: Axes | None = None) -> Axes:
    r"""Draw ops as boxes with their seconds and the bytes they make: the forward downwards, the backward upwards.

    Arrows are values, the wider the more bytes; the bytes of those from forward to backward, which a plan keeps or
    makes again, stand beside them where there is room. The darker a box the more time it takes. Where there are more
    than ``most`` ops, those of a module are one box, or those of neighbouring modules: the same of the forward and of
    the backward, in one row.

    Raises:
        TypeError: if ``ax`` is no Axes.
        ValueError: if ``most`` is less than 2.
        ImportError: without Matplotlib.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], [1.0] * 4, [4, 4, 4, 1], forward=2)
    >>> graph(problem).texts[0].get_text()
    'op0\n1.0 s, makes 4 B'
    """
    if most < 2:
        raise ValueError(f"most is a number of boxes, at least 2, not {most!r}.")
    nodes = _nodes(problem, most)
    rows = max(sum(node.x == x for node in nodes) for x in (0.0, 2.0))
    ax = axes_of(ax, (10, 1.5 + 0.46 * rows))
    from matplotlib.patches import FancyArrowPatch

    # The boxes, the darker the more time they take.
    slowest = max(node.seconds for node in nodes) or 1.0
    for node in nodes:
        shade = str(1 - 0.35 * node.seconds / slowest)
        ax.add_patch(
            pyplot().Rectangle((node.x - 0.5, node.y - 0.3), 1, 0.6, fc=shade, ec="black", lw=0.8, label=node.name)
        )
        many = f"{len(node.ops)} ops, " if len(node.ops) > 1 else ""
        facts = f"{many}{format_seconds(node.seconds)}, makes {format_bytes(node.bytes)}"
        name = node.name
        if len(name) > LONGEST:
            name = f"{name[: LONGEST // 2 - 1]}…{name[-LONGEST // 2 :]}"
        ax.text(node.x, node.y, f"{name}\n{facts}", ha="center", va="center", fontsize=7.5)
    ax.set(xlim=(-1.0, 3.0), ylim=(-rows + 0.3, 1.2))  # before labels look for room
    # An arrow for each pair of boxes between which values go; neighbours straight, others around the column.
    box = {k: i for i, node in enumerate(nodes) for k in node.ops}
    edges: dict[tuple[int, int], int] = {}
    for v, value in enumerate(problem.graph.values):
        if value.producer is not None:
            for b in {box[k] for k in problem.graph.users[v]} - {box[value.producer]}:
                edges[box[value.producer], b] = edges.get((box[value.producer], b), 0) + value.size_bytes
    largest = max(edges.values(), default=0) or 1
    crossing = []  # from forward to backward: bytes, ends, width
    for (a, b), size in edges.items():
        begin, end = nodes[a], nodes[b]
        across, down = begin.x != end.x, -1.0 if end.y < begin.y else 1.0
        side = 0.5 if begin.x else -0.5  # where arrows around a column leave it
        if across:
            points, bend = ((begin.x + 0.5, begin.y), (end.x - 0.5, end.y)), 0.0
        elif b == a + 1:
            points, bend = ((begin.x, begin.y + 0.3 * down), (end.x, end.y - 0.3 * down)), 0.0
        else:
            far = min(0.45, 0.9 / max(1.0, abs(end.y - begin.y)))
            points, bend = ((begin.x + side, begin.y), (end.x + side, end.y)), far
        width = 0.4 + 3 * size / largest
        arrow = FancyArrowPatch(
            *points, arrowstyle="-|>", mutation_scale=7, connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0,
            label=f"{begin.name} -> {end.name}: {format_bytes(size)}", zorder=0.5,
            lw=width, color=BLUE if across else "#444444", alpha=0.75,
        )  # fmt: skip
        ax.add_patch(arrow)
        if across:
            crossing.append((size, np.array(points), width))
    crossing.sort(key=lambda arrow: -arrow[0])
    _label(ax, [(format_bytes(size) if size >= 0.02 * largest else "", ends, lw) for size, ends, lw in crossing])
    for x, head in ((0.0, "forward, downwards"), (2.0, "backward, upwards")):
        if any(node.x == x for node in nodes):
            ax.text(x, 0.75, head, ha="center", weight="bold")
    ax.set_axis_off()
    drawn = "" if len(nodes) == len(problem.graph.ops) else f" in {len(nodes)} boxes"
    step = f"{format_seconds(problem.keep_all_cost)}, {format_bytes(problem.keep_all_peak)} keeping all"
    in_place = sum(map(bool, problem.savings))
    ways = f"; {in_place} can write over an input" if in_place else ""
    ax.set_title(f"{len(problem.graph.ops)} ops{drawn}: {step}{ways}")
    return ax


def _nodes(problem: Problem, most: int) -> list[_Node]:
    """The boxes in the order of ops: one each, or one for neighbours of some modules if these are too many."""
    ops, forward = problem.graph.ops, problem.graph.forward_length
    halves = [half for half in (range(forward), range(forward, len(ops))) if half]
    if len(ops) <= most:
        named = [[("", half[i : i + 1]) for i in range(len(half))] for half in halves]
        height = max(map(len, halves)) - 1
        rows = [[height * i / max(1, len(half) - 1) for i in range(len(half))] for half in halves]
    else:
        first = halves[0]
        # An op without a module between two of a network is of that of the op before: a sum of gradients, say.
        paths = [ops[k].place.module for k in first]
        last = max((i for i, path in enumerate(paths) if path), default=-1)
        for i in range(1, last):
            paths[i] = paths[i] or paths[i - 1]
        folded = fold(paths, min(max(1, most // len(halves)), len(first)))
        named, rows = [[(label, first[part.start : part.stop]) for label, part in folded]], [[*range(len(folded))]]
        height = len(folded) - 1
        if len(halves) == 2:
            groups = _aligned(problem, [inside for _, inside in named[0]], halves[1])
            back = [(g, [*same]) for g, same in itertools.groupby(halves[1], key=lambda k: groups[k - forward])]
            named.append([(named[0][g][0], range(inside[0], inside[-1] + 1)) for g, inside in back])
            rows.append([height - g for g, _ in back])
    nodes, labels = [], [label for label, _ in named[0]]
    for half, boxes, at in zip(halves, named, rows, strict=True):
        for (label, inside), row in zip(boxes, at, strict=True):
            name = label if label and labels.count(label) == 1 else _ends([ops[k].name for k in inside])
            made = sum(int(problem.sizes[v]) for k in inside for v in ops[k].outputs)
            seconds = float(problem.seconds[inside.start : inside.stop].sum())
            where = (2.0, float(row - height)) if half[0] >= forward else (0.0, float(-row))
            nodes.append(_Node(name, inside, *where, seconds, made))
    return nodes


def _aligned(problem: Problem, groups: list[range], backward: range) -> list[int]:
    """For each op of the backward the forward's group, the last group first, so that most ops match.

    An op fits the groups of its module; where none is of it, those that make or read what it reads.
    """
    ops, B, G = problem.graph.ops, len(backward), len(groups)
    modules = [{ops[k].place.module for k in group} - {""} for group in groups]
    touched = [{v for k in group for v in (*ops[k].inputs, *ops[k].outputs)} for group in groups]
    made = {v for group in groups for k in group for v in ops[k].outputs}
    # How well each op fits each group, from 0 to 1.
    fits = np.zeros((B, G))
    for i, k in enumerate(backward):
        own = [float(ops[k].place.module in inside) for inside in modules]
        read = made.intersection(ops[k].inputs)
        near = [len(read & inside) / (2 * max(1, len(read))) for inside in touched]
        fits[i] = own if any(own) else near
    # The best sum up to each op, if that is in each group, from the last group to the first.
    best, came = np.zeros(G), np.zeros((B, G), dtype=int)
    for i, row in enumerate(fits[:, ::-1]):
        for g in range(1, G):  # of what is as good, to stay
            came[i, g] = g if best[g] >= best[came[i, g - 1]] else came[i, g - 1]
        best = best[came[i]] + row
    at = [int(best.argmax())]
    for i in range(B - 1, 0, -1):
        at.append(int(came[i, at[-1]]))
    return [G - 1 - g for g in reversed(at)]


def _ends(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} - {names[-1]}"


PLACES = (0.2, 0.3, 0.12, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88)  # of the way along an arrow, where its label may stand


def _label(ax: Axes, arrows: list[tuple[str, np.ndarray, float]]) -> None:
    """Label each arrow above or below it, clear of arrows and other labels.

    Arrows are a text, two points and a width; the first ones choose first. What finds no room is not written.
    """
    points = ax.figure.dpi / 72  # pixels of one
    lines = [(ax.transData.transform(ends), (0.5 * width + 1.5) * points) for _, ends, width in arrows]
    taken: list[np.ndarray] = []  # the lower left and the upper right corner of each label
    for (words, _, _), (ends, margin) in zip(arrows, lines, strict=True):
        if not words:
            continue
        text = ax.text(0, 0, words, fontsize=7, ha="center", va="center")
        extent = text.get_window_extent()
        # How far from the arrow a label has to be.
        half = np.array([extent.width, extent.height]) / 2
        along = ends[1] - ends[0]
        off = half[1] + abs(along[1] / along[0]) * half[0] + 1.05 * margin
        for share, side in itertools.product(PLACES, (1, -1)):
            middle = ends[0] + share * along + [0, side * off]
            box = np.array([middle - half, middle + half])
            # Take the first place clear of boxes, arrows and labels; else no label.
            inside = ends[0][0] < box[0][0] and box[1][0] < ends[1][0]
            free = not any(_crosses(*other, box) for other in lines)
            if inside and free and not any((box[0] < b[1]).all() and (b[0] < box[1]).all() for b in taken):
                x, y = ax.transData.inverted().transform(middle)
                text.set_position((x, y))
                taken.append(box)
                break
        else:
            text.remove()


def _crosses(ends: np.ndarray, margin: float, box: np.ndarray) -> bool:
    """Tell whether a straight line comes closer to a box than the margin, above or below it."""
    (x, y), (dx, dy) = ends[0], ends[1] - ends[0]
    over = np.clip(box[:, 0], *sorted(ends[:, 0]))  # from where to where the line is over or under the box
    if over[0] == over[1]:
        return False
    heights = y + (over - x) * dy / dx
    return bool(heights.min() - margin < box[1][1] and heights.max() + margin > box[0][1])
