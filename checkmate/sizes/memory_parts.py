"""The parts of a step's peak: as plain PyTorch runs it, and as a whole step that reruns nothing.

Plain PyTorch keeps each gradient until `optimizer.step`, which comes last; a whole step of `checkmate.training_step`
updates each parameter as soon as it can, and lets ops write over what nobody reads any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from checkmate.core.graph import Graph, Op
from checkmate.core.problem import Problem, Profile
from checkmate.core.simulator import lower_runs, without_slower_ways
from checkmate.look.timeline import Timeline, timeline
from checkmate.memory.lives import Lives

UPDATES = "checkmate.update_parameter"  # the target of ops that update a parameter begins so


@dataclass(frozen=True)
class Parts:
    """Bytes at the peak of a step, by part."""

    parameters: int
    gradients: int  # of parameters
    optimizer_state: int
    activations: int  # made by the forward
    activation_gradients: int  # made by the backward, but for gradients of parameters
    workspaces: int  # of the op that runs, or of `optimizer.step`
    buffers_and_batch: int  # and whatever else is there all the time
    at: str  # name of the op at the peak

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return sum(bytes_ for _, bytes_ in self)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield the names of the parts, in words, with their bytes."""
        for part in fields(self)[:-1]:
            yield part.name.replace("_", " "), getattr(self, part.name)


def gradients_of(problem: Problem) -> frozenset[int]:
    """The gradients: values that ops make and updates of parameters read."""
    graph = problem.graph
    read = (v for op in graph.ops if op.target.startswith(UPDATES) for v in op.inputs)
    return frozenset(v for v in read if graph.values[v].producer is not None)


def as_plain(problem: Problem, update_bytes: int) -> Problem:
    """The step as plain PyTorch runs it: no op in place, and one update of all parameters at the end.

    The update takes ``update_bytes`` beside gradients. This is an estimate: where a Python function holds a tensor
    longer than its last reader, PyTorch does too.
    """
    graph = problem.graph
    order = [k for k, op in enumerate(graph.ops) if not op.target.startswith(UPDATES)]
    now = {k: i for i, k in enumerate(order)}
    values = (replace(v, producer=None if v.producer is None else now.get(v.producer)) for v in graph.values)
    update = Op("optimizer.step()", UPDATES, tuple(sorted(gradients_of(problem))), (), "backward")
    seconds, workspaces = problem.seconds[order], problem.workspace[order]
    seconds, workspaces = np.append(seconds, 0.0), np.append(workspaces, update_bytes)
    profile = Profile(seconds, workspaces, problem.resident, state_bytes=problem.profile.state_bytes)
    return Problem(Graph((*(graph.ops[k] for k in order), update), tuple(values), graph.outputs), profile)


def keep_all_timeline(problem: Problem) -> Timeline:
    """The timeline of the plan that runs each op once; its peak is `Problem.keep_all_peak`."""
    plan = lower_runs(problem, [[k] for k in range(len(problem.graph.ops))])
    return timeline(without_slower_ways(plan, problem, problem.keep_all_peak), problem)


def parts_of(problem: Problem) -> Parts:
    """The bytes at the peak of a step that runs each op once."""
    line, gradients = keep_all_timeline(problem), gradients_of(problem)
    peak = line.peak_moment
    at_hand: Counter[str] = Counter()
    for span in line.alive(peak.index):
        forward = problem.graph.ops[span.producer].phase == "forward"
        part = "gradients" if span.value in gradients else "activations" if forward else "activation_gradients"
        at_hand[part] += span.bytes
    parameters, state = (line.resident.get(role, 0) for role in ("parameters", "optimizer state"))
    return Parts(
        parameters=parameters,
        gradients=at_hand["gradients"],
        optimizer_state=state,
        activations=at_hand["activations"],
        activation_gradients=at_hand["activation_gradients"],
        workspaces=int(line.workspaces[peak.index]),
        buffers_and_batch=problem.resident - parameters - state,
        at=peak.name,
    )


def lives_of_plain(plain: Problem) -> Lives:
    """The blocks that plain PyTorch allocates in a step, from the problem that `as_plain` gives."""
    line = keep_all_timeline(plain)
    values = [(span.bytes, span.born, span.died) for span in line.spans]
    workspaces = [(size, at, at + 1) for at, size in enumerate(line.workspaces.tolist())]
    return Lives(*np.array(values + workspaces, dtype=np.int64).T)
