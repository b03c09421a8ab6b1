"""The largest batch of a step within a device's room: from two traces, and checked by a trace if there is time."""

from __future__ import annotations

import time
from typing import Any

import torch

from checkmate.batch import LARGEST
from checkmate.batch.size_search import (
    AUTO,
    KEEP_ALL,
    ONE_FORWARD,
    SizeSearch,
    is_within,
    largest_size,
    most_seconds,
    plan_within,
)
from checkmate.batch.sized_steps import SizedProblems
from checkmate.capture.nodes import storage
from checkmate.core.problem import Problem
from checkmate.core.solution import Query, Solution
from checkmate.errors import Unsupported
from checkmate.fitting.answer import LargestSizes
from checkmate.fitting.memory_parts import as_plain, without_parts
from checkmate.solvers.solve import attempt
from checkmate.torch_internals.trees import tree_leaves, tree_map_only

TRY_SECONDS = 0.5  # to plan an estimated size
TRACES = 5  # as many should be possible in the time that is left, else all sizes are estimated
LEAST_SIZE = 2  # of a batch to estimate others from: a dimension of 1 is broadcast, by other ops

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
    """The batch with another size of the first dimension of all tensors, strides in proportion; data rows repeat.

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
    return tree_map_only(torch.Tensor, lambda tensor: made.get(id(tensor), tensor), batch)


def _strides_at(size: int, tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for another size of the first dimension: dimensions outside of it grow in proportion.

    >>> _strides_at(6, torch.ones(2, 3, 4).transpose(0, 1))
    (4, 24, 1)
    """
    rows, step = len(tensor), tensor.stride(0)
    return step, *(other // rows * size if 0 < step * rows <= other else other for other in tensor.stride()[1:])


def largest_sizes(
    problems: SizedProblems, given: int, room: int, *, update_bytes: int, trace_seconds: float, deadline: float
) -> LargestSizes:
    """The largest sizes within a room: of plain PyTorch, of a step that reruns nothing, and of a planned one.

    Args:
        given: the size of the batch that was looked at.
        update_bytes: that the update of plain PyTorch takes, as for `as_plain`.
        deadline: of `time.perf_counter`; sizes found by estimates are searched on from, traced, if there is time.

    Raises:
        Unsupported: if the step's ops change with the size, so that nothing can be estimated.
    """
    size = max(LEAST_SIZE, given)
    pair = SizedProblems(lambda n: without_parts(problems.at(n)))
    pair.at(size), pair.at(size // 2 if size >= 4 else 2 * size)  # half of it takes no longer to trace

    def estimated(n: int) -> Problem:
        if (problem := pair.estimate(n)) is None:
            raise Unsupported(
                "not looked for: the step has other ops at another size. checkmate.max_batch_size looks at each"
            )
        return problem

    found: Solution | None = None

    def has_plan(n: int) -> bool:
        nonlocal found
        problem = estimated(n)
        cap = most_seconds(problem, ONE_FORWARD)
        solution = plan_within(problem, room, cap, time_limit=TRY_SECONDS)
        found = solution if is_within(solution, cap) else found
        return is_within(solution, cap)

    # By estimates from two sizes.
    end = LARGEST + 1
    plain = largest_size(lambda n: as_plain(estimated(n), update_bytes).keep_all_peak <= room, 0, end, size)
    keep_all = largest_size(lambda n: estimated(n).keep_all_peak <= room, 0, end, size)
    planned = largest_size(has_plan, keep_all, end, max(1, keep_all))
    # From these on by traced sizes, where there is time.
    checked = False
    if deadline - time.perf_counter() > TRACES * trace_seconds:
        searches = [
            SizeSearch(problems, room, ONE_FORWARD, deadline, TRY_SECONDS, method, hint=guess or None, near=True)
            for method, guess in ((KEEP_ALL, keep_all), (AUTO, planned))
        ]
        kept, best = [search.run() for search in searches]
        keep_all = 0 if kept is None else kept.size
        planned, found = (0, None) if best is None else (best.size, best.solution)
        checked = all(search.low is None or not search.is_open for search in searches)
    if found is None and planned:
        found = attempt(Query(estimated(planned), room, KEEP_ALL), progress=False)
    seconds, overhead = (None, None) if found is None else (found.cost, max(0.0, found.overhead))
    return LargestSizes(given, plain, keep_all, planned, tuple(sorted(problems.traced)), checked, seconds, overhead)
