"""The largest batch of a step within a device's room: from two traces, and where there is time looked at itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from checkmate.batch import LARGEST
from checkmate.batch.size_search import KEEP_ALL, ONE_FORWARD, Attempt, SizeSearch, most_seconds, plan_within
from checkmate.batch.sized_problems import SizedProblems
from checkmate.capture.nodes import storage
from checkmate.core.fingerprint import same_ops
from checkmate.core.graph import Graph, Op
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import Unsupported
from checkmate.fitting.answer import LargestSizes
from checkmate.fitting.memory_parts import without_parts
from checkmate.solvers.catalogue import METHODS
from checkmate.torch_internals.trees import tree_leaves, tree_map_only

TRY_SECONDS = 0.5  # to plan an estimated size
TRACES = 5  # as many should be possible in the time that is left, else all sizes are estimated

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def size_of(batch: Batch) -> int:
    """The first dimension that the tensors of a batch share.

    Raises:
        Unsupported: if they share none.

    >>> size_of(((torch.ones(8, 3), torch.ones(8)), {}))
    8
    """
    shapes = [tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.ndim]
    sizes = {shape[0] for shape in shapes}
    if len(sizes) != 1 or not all(sizes):
        what = ", ".join(map(str, shapes)) if shapes else "none"
        raise Unsupported(
            f"not looked for: the batch's tensors share no first dimension (shapes: {what}). Give make_batch=, a "
            "function of the size"
        )
    return next(iter(sizes))


def scaled(batch: Batch, size: int) -> Batch:
    """The batch with another first dimension of all its tensors, laid out as before; with data its rows are repeated.

    >>> args, kwargs = scaled(((torch.ones(8, 3)[:, 1:],), {}), 2)
    >>> args[0].shape, args[0].stride()
    (torch.Size([2, 2]), (3, 1))
    """
    made: dict[int, torch.Tensor] = {}
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.ndim:
            groups.setdefault((storage(tensor), tensor.dtype), []).append(tensor)
    for views in groups.values():  # of one storage, as labels and tokens are that are slices of one text
        layouts = [((size, *view.shape[1:]), _strides_at(size, view), view.storage_offset()) for view in views]
        ends = [1 + at + sum((n - 1) * step for n, step in zip(*layout, strict=True)) for *layout, at in layouts]
        base = torch.empty(max(ends), dtype=views[0].dtype, device=views[0].device)
        for view, (shape, strides, at) in zip(views, layouts, strict=True):
            one = base.as_strided(shape, strides, at)
            if not view.is_meta:
                rows, once = torch.arange(size) % len(view), tuple(slice(1 if step == 0 else None) for step in strides)
                one[once] = view.detach()[rows.to(view.device)][once]
            made[id(view)] = one.requires_grad_(view.requires_grad)
    scaled_batch: Batch = tree_map_only(torch.Tensor, lambda tensor: made.get(id(tensor), tensor), batch)
    return scaled_batch


def _strides_at(size: int, tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides with another first dimension: those of dimensions outside of it grow as it does.

    >>> _strides_at(6, torch.ones(2, 3, 4).transpose(0, 1))
    (4, 24, 1)
    """
    rows, step = len(tensor), tensor.stride(0)
    return step, *(other // rows * size if 0 < step * rows <= other else other for other in tensor.stride()[1:])


def other_size(size: int) -> int:
    """A size to trace beside this one: half of it, which takes no longer; twice as much where half is 1 or less."""
    return size // 2 if size >= 4 else 2 * size


def largest_sizes(
    problems: SizedProblems,
    size: int,
    room: int,
    *,
    trace_seconds: float,
    plain_peak: Callable[[Problem], int],
    deadline: float,
) -> LargestSizes:
    """The largest sizes within a room, of a step that was traced at ``size``.

    Args:
        problems: of the step at any size.
        trace_seconds: that a trace takes.
        plain_peak: bytes of plain PyTorch, of the problem of a size.
        deadline: of `time.perf_counter`; what is estimated is looked at as far as there is time.

    Raises:
        Unsupported: if the step's ops change with the size, so that nothing can be estimated.
    """
    given = without_parts(problems.at(size))
    pair = SizedProblems(problems.at)
    pair.traced = {size: given, other_size(size): in_order_of(given, without_parts(problems.at(other_size(size))))}

    def estimated(n: int) -> Problem:
        problem = pair.estimate(n)
        assert problem is not None
        return problem

    plain = _largest(size, lambda n: plain_peak(estimated(n)) <= room)
    keep_all = _largest(size, lambda n: estimated(n).keep_all_peak <= room)
    low, high = keep_all, _largest(max(1, keep_all), lambda n: int(estimated(n).unavoidable_bytes.max()) <= room)
    found: Solution | None = None
    while high > low:
        n = high if found is None and high == low + 1 else (low + high + 1) // 2
        problem = estimated(n)
        cap = most_seconds(problem, ONE_FORWARD)
        plan = plan_within(problem, room, cap, time_limit=TRY_SECONDS)
        if Attempt(n, plan, cap, traced=False).fits:
            low, found = n, plan
        else:
            high = n - 1
    checked = False
    if deadline - time.perf_counter() > TRACES * trace_seconds:
        kept = _looked_at(
            SizeSearch(problems, room, ONE_FORWARD, 1, LARGEST, deadline, TRY_SECONDS, KEEP_ALL), keep_all
        )
        planned = _looked_at(SizeSearch(problems, room, ONE_FORWARD, 1, LARGEST, deadline, TRY_SECONDS), low)
        keep_all = 0 if kept.low is None else kept.low.size
        low, found = (0, None) if planned.low is None else (planned.low.size, planned.low.solution)
        checked = all(one.low is None or not one.is_open() for one in (kept, planned))
    if found is None and low:
        found = METHODS[KEEP_ALL].solve(estimated(low), room)
    seconds, overhead = (None, None) if found is None else (found.cost, max(0.0, found.overhead))
    return LargestSizes(
        size, plain, keep_all, low, tuple(sorted({*problems.traced, *pair.traced})), checked, seconds, overhead
    )


def _looked_at(search: SizeSearch, guess: int) -> SizeSearch:
    """The search at its end: the step is traced at a size that is estimated to be the answer, and at the next one."""
    fits = guess > 0 and search.traced(guess).fits
    if not fits or (guess < LARGEST and search.traced(guess + 1).fits):  # the estimate was none
        search.run()
    return search


def in_order_of(like: Problem, problem: Problem) -> Problem:
    """The problem of a step at another size with the ops and values numbered as in this one, to which they belong.

    Which half of a gradient comes first, for example, depends on which is larger. Nothing can run the plans.

    Raises:
        Unsupported: if it has other ops.
    """
    if same_ops(like, problem):
        return problem
    ops = {op.name: k for k, op in enumerate(problem.graph.ops)}
    values = {value.name: v for v, value in enumerate(problem.graph.values)}
    to_op = {ops[op.name]: k for k, op in enumerate(like.graph.ops) if op.name in ops}
    to_value = {values[value.name]: v for v, value in enumerate(like.graph.values) if value.name in values}
    if len(to_op) < len(problem.graph.ops) or len(to_value) < len(problem.graph.values):
        raise _OTHER_OPS
    order = [ops[op.name] for op in like.graph.ops]

    def numbered(vs: Sequence[int]) -> tuple[int, ...]:
        return tuple(to_value[v] for v in vs)

    def moved(op: Op) -> Op:
        return replace(op, inputs=numbered(op.inputs), outputs=numbered(op.outputs), overwrites=numbered(op.overwrites))

    moved_values = [problem.graph.values[values[value.name]] for value in like.graph.values]
    graph = Graph(
        tuple(moved(problem.graph.ops[k]) for k in order),
        tuple(replace(v, producer=None if v.producer is None else to_op[v.producer]) for v in moved_values),
        numbered(problem.graph.outputs),
    )
    ways = tuple(
        replace(
            way, op=to_op[way.op], over=to_value[way.over], makes=None if way.makes is None else to_value[way.makes]
        )
        for way in problem.profile.ways
    )
    profile = replace(
        problem.profile,
        seconds=problem.seconds[order],
        workspace_bytes=problem.workspace[order],
        estimated=tuple(sorted(to_op[k] for k in problem.profile.estimated)),
        ways=ways,
    )
    found = Problem(graph, profile, host=problem.host)
    if not same_ops(like, found):
        raise _OTHER_OPS
    return found


_OTHER_OPS = Unsupported(
    "not looked for: the step has other ops at another size. checkmate.max_batch_size looks at each"
)


def _largest(start: int, fits: Callable[[int], bool]) -> int:
    """The largest size that fits; 0: none does.

    >>> _largest(8, lambda n: n <= 13), _largest(8, lambda n: n <= 3), _largest(8, lambda n: False)
    (13, 3, 0)
    """
    good, bad = (start, 2 * start) if fits(start) else (0, start)
    while good and bad <= LARGEST and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, LARGEST + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
