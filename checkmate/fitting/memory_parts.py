"""Where the bytes of a step are at its peak: run plainly, as PyTorch does, and as a whole step that runs nothing twice.

Plain PyTorch keeps each gradient until `optimizer.step`, which comes last; a whole step of `checkmate.training_step`
updates each parameter as soon as it can, and lets ops write over what nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np

from checkmate.core.problem import Problem
from checkmate.memory.lives import Lives

UPDATES = "checkmate.update_parameter"  # what the ops that update a parameter compute


@dataclass(frozen=True)
class Resident:
    """Bytes that are there all the time, as far as they are told apart; the others are of buffers and the batch."""

    parameters: int
    optimizer_state: int


@dataclass(frozen=True)
class Parts:
    """Bytes at the peak of a step. They add up to it."""

    parameters: int
    gradients: int  # of parameters
    optimizer_state: int
    activations: int  # what the forward has made
    activation_gradients: int  # what the backward has made, but for gradients of parameters
    workspaces: int  # what an op needs while it runs, and `optimizer.step`
    buffers_and_batch: int  # and whatever else is there all the time
    at: str  # name of the op at the peak

    @property
    def peak(self) -> int:
        """All of them."""
        return sum(bytes_ for _, bytes_ in self)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Each part's name, in words, and its bytes."""
        for one in fields(self)[:-1]:
            yield one.name.replace("_", " "), getattr(self, one.name)


def is_update(problem: Problem, k: int) -> bool:
    """Whether an op updates a parameter."""
    return problem.graph.ops[k].target.startswith(UPDATES)


def gradients_of(problem: Problem) -> frozenset[int]:
    """The values that updates of parameters read, and ops make: gradients."""
    graph = problem.graph
    read = chain.from_iterable(op.inputs for k, op in enumerate(graph.ops) if is_update(problem, k))
    return frozenset(v for v in read if graph.values[v].producer is not None)


def kept_parts(problem: Problem, resident: Resident) -> Parts:
    """Of the whole step that runs each op once; its peak is `Problem.keep_all_peak`."""
    return _parts(problem, range(len(problem.graph.ops)), resident, in_place=True)


def plain_parts(problem: Problem, resident: Resident, update_bytes: int) -> Parts:
    """Of plain PyTorch: nothing is written over, all updates come last; they take ``update_bytes`` beside gradients.

    It is an estimate: where a function of Python's holds a tensor longer than its last reader, PyTorch does too.
    """
    order = [k for k in range(len(problem.graph.ops)) if not is_update(problem, k)]
    backward = _parts(problem, order, resident, in_place=False)
    gradients = int(problem.sizes[[*gradients_of(problem)]].sum())
    rest = problem.resident - resident.parameters - resident.optimizer_state
    results = {v for v in problem.graph.outputs if v not in gradients_of(problem)}
    held = int(problem.sizes[[*results]].sum())
    about = resident.parameters, gradients, resident.optimizer_state, held, 0, update_bytes, rest
    update = Parts(*about, "optimizer.step()")
    return max(backward, update, key=lambda parts: parts.peak)


def plain_lives(problem: Problem, update_bytes: int) -> Lives:
    """What plain PyTorch allocates in a step, in order."""
    order = [k for k in range(len(problem.graph.ops)) if not is_update(problem, k)]
    time, last = {k: i for i, k in enumerate(order)}, _last_uses(problem, order)
    made = [(v, time[k]) for k in order for v in problem.graph.ops[k].outputs]
    sizes = [*(int(problem.sizes[v]) for v, _ in made), *(int(problem.workspace[k]) for k in order), update_bytes]
    born = [*(at for _, at in made), *range(len(order)), len(order)]
    died = [*(last[v] + 1 for v, _ in made), *range(1, len(order) + 1), len(order) + 1]
    by_birth = np.argsort(born, kind="stable")
    return Lives(*(np.array(column, dtype=np.int64)[by_birth] for column in (sizes, born, died)))


def _last_uses(problem: Problem, order: Sequence[int]) -> dict[int, int]:
    """By value, when in this order it is read for the last time; gradients and results stay to the end."""
    graph, gradients = problem.graph, gradients_of(problem)
    last: dict[int, int] = {}
    for at, k in enumerate(order):
        last.update(dict.fromkeys((*graph.ops[k].inputs, *graph.ops[k].outputs), at))
    for v in graph.outputs:
        last[v] = len(order)
    if len(order) < len(graph.ops):  # the updates come later
        last.update(dict.fromkeys(gradients, len(order)))
    return last


def _parts(problem: Problem, order: Sequence[int], resident: Resident, *, in_place: bool) -> Parts:
    """Of each op run once, in this order: what is at hand where most is."""
    graph, sizes, last = problem.graph, problem.sizes.tolist(), _last_uses(problem, order)
    gradients, dying = gradients_of(problem), dict[int, list[int]]()
    kinds = {
        v: 0 if v in gradients else 1 if graph.ops[k].phase == "forward" else 2
        for k in order
        for v in graph.ops[k].outputs
    }
    for v, at in last.items():
        dying.setdefault(at, []).append(v)
    here, most, found = [0, 0, 0], -1, (0, 0, 0, 0, "")
    for at, k in enumerate(order):
        op = graph.ops[k]
        for v in op.outputs:
            here[kinds[v]] += sizes[v]
        then, workspace = [*here], int(problem.workspace[k])
        if in_place and (way := _taken(problem, k, at, last)) is not None:
            over, saved = way
            then[kinds[over]] -= sizes[over]
            workspace += sizes[over] - saved
        if sum(then) + workspace > most:
            most = sum(then) + workspace
            found = (*then, workspace, op.name)  # type: ignore[assignment]
        for v in dying.get(at, ()):
            if v in kinds:
                here[kinds[v]] -= sizes[v]
    of_gradients, activations, others, workspace, name = found
    rest = problem.resident - resident.parameters - resident.optimizer_state
    return Parts(
        resident.parameters, of_gradients, resident.optimizer_state, activations, others, workspace, rest, name
    )


def _taken(problem: Problem, k: int, at: int, last: dict[int, int]) -> tuple[int, int] | None:
    """The value that an op writes over which goes with it, and the bytes less that it takes then."""
    return next(((v, saved) for v, saved in problem.savings[k] if last[v] == at and (k, v) not in problem.slower), None)


def without_parts(problem: Problem) -> Problem:
    """The step with its loss at once, for each budget."""
    return replace(problem, smaller=None)
