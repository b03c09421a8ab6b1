"""Before any training: whether a step can be planned, what in it must run once and why, and what stands in the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.backends.state import tensors_within, unchanged
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.patches.is_compiling import Answer
from checkmate.capture.provenance import is_users
from checkmate.compiler import trace
from checkmate.core.problem import Problem
from checkmate.core.table import html_table, text_table
from checkmate.errors import CheckmateError
from checkmate.profiling.profilers import Choice, profiler
from checkmate.solvers.search.min_budget import MinBudget
from checkmate.units import format_bytes


@dataclass(frozen=True)
class Pinned:
    """An op that runs exactly once in every plan."""

    name: str
    target: str
    where: str  # module path and line of the user's code
    why: str
    phase: str
    output_bytes: int
    held_bytes: int  # of these, what the backward reads: no plan frees it before


@dataclass(frozen=True)
class Break:
    """A place in the user's code where `torch.compile` cannot go on with one graph."""

    where: str
    why: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found. ``problem`` is None where the step cannot be planned; ``reason`` says why."""

    pinned: tuple[Pinned, ...]  # most bytes first
    breaks: tuple[Break, ...]
    reason: str
    problem: Problem | None
    smallest: MinBudget | None
    top: int = 10  # how many rows the printed table shows

    @property
    def can_be_planned(self) -> bool:
        """Whether the whole step was captured."""
        return self.problem is not None

    @property
    def held_bytes(self) -> int:
        """Bytes that every plan holds between forward and backward, since what makes them runs once."""
        return sum(row.held_bytes for row in self.pinned)

    def _facts(self) -> Iterator[tuple[str, str]]:
        if self.problem is None or self.smallest is None:
            return
        graph, smallest = self.problem.graph, self.smallest
        phases = Counter(op.phase for op in graph.ops)
        yield "ops", f"{phases['forward']} in the forward, {phases['backward']} in the backward"
        yield "keep all", format_bytes(self.problem.keep_all_peak)
        yield "smallest", f"{format_bytes(smallest.peak)} (proven: none below {format_bytes(smallest.bound)})"
        yield "resident", f"{format_bytes(self.problem.resident)} of parameters, buffers and inputs"
        waiting = format_bytes(self.held_bytes)
        yield "pinned", f"{len(self.pinned)} ops run once; {waiting} of what they make wait for the backward"

    def _title(self) -> str:
        return "This step can be planned." if self.can_be_planned else f"This step cannot be planned. {self.reason}"

    def _rows(self) -> list[tuple[str, ...]]:
        shown: list[tuple[str, ...]] = [
            (r.target, r.why, r.phase, format_bytes(r.output_bytes), format_bytes(r.held_bytes), r.where)
            for r in self.pinned[: self.top]
        ]
        left = len(self.pinned) - self.top
        return [*shown, (f"... and {left} more", "", "", "", "", "")] if left > 0 else shown

    def __repr__(self) -> str:
        lines = [self._title(), *(f"  {name:<11}{text}" for name, text in self._facts())]
        blocks = ["\n".join(lines)]
        if self.pinned:
            blocks.append(text_table(_HEADS, self._rows(), _NUMBERS))
        if self.breaks:
            blocks.append("\n".join(["graph breaks", *(f"  {b.where}\n    {b.why}" for b in self.breaks)]))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        facts = html_table((self._title(), ""), self._facts())
        pinned = html_table(_HEADS, self._rows()) if self.pinned else ""
        breaks = html_table(("graph break", "why"), [(b.where, b.why) for b in self.breaks]) if self.breaks else ""
        return facts + pinned + breaks


_HEADS = ("op", "runs once: it", "phase", "makes", "held", "where")
_NUMBERS = {"makes", "held"}


def explain(
    fn: Callable[..., Any], *args: Any, profile: Choice = "measure", cache: bool = True, top: int = 10, **kwargs: Any
) -> Explanation:
    """Say of a step, before any training, what a plan can and cannot do with it. Nothing of the model's state changes.

    A step that cannot be captured as one graph raises nothing: the explanation says why. To find all the places where
    it breaks, and not only the first, its forward then runs once, in pieces.

    Args:
        fn: a module or function; args, kwargs: an example batch for it.
        profile, cache: where costs come from, as for `checkmate.trace`.
        top: how many of the pinned ops are printed.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5))
    >>> [(row.why, row.output_bytes) for row in explain(model, torch.ones(2, 8)).pinned]
    [('is handed in by autograd', 32), ('draws random numbers', 8)]
    >>> explain(lambda x: model(x) * x.sum().item(), torch.ones(2, 8)).can_be_planned
    False
    """
    profiler(profile, cache=cache)  # a profile that there is none of is no fault of the step
    try:
        problem = trace(fn, *args, profile=profile, cache=cache, **kwargs)
    except CheckmateError as error:
        return Explanation((), tuple(_breaks(fn, args, kwargs)), str(error), None, None, top)
    except Exception as error:  # noqa: BLE001  # plain PyTorch fails on this batch as well
        return Explanation((), (), f"{type(error).__name__}: {error}", None, None, top)
    return Explanation(_pinned(problem), (), "", problem, problem.min_budget(), top)


def _pinned(problem: Problem) -> tuple[Pinned, ...]:
    graph, sizes = problem.graph, problem.sizes
    in_backward = {v for op in graph.ops if op.phase == "backward" for v in op.inputs}
    rows = [
        Pinned(
            name=op.name,
            target=op.target,
            where=op.where or "",
            why=op.pinned,
            phase=op.phase,
            output_bytes=sum(int(sizes[v]) for v in op.outputs),
            held_bytes=sum(int(sizes[v]) for v in op.outputs if op.phase == "forward" and v in in_backward),
        )
        for op in graph.ops
        if op.pinned
    ]
    return tuple(sorted(rows, key=lambda row: -row.output_bytes))


def _breaks(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Break]:
    """Where `torch.compile` would split the step, in the order of the code that runs."""
    found: dict[Break, None] = {}
    if any(map(is_fake, tensors_within((fn, args, kwargs)))):
        return []  # nothing can run

    def note(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            frames = [f for f in reason.user_stack if is_users(f.filename)] or list(reason.user_stack)
            at = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-1:]]
            found[Break("".join(at), reason.reason.strip().splitlines()[0])] = None
        return module.forward

    note.answer = Answer()  # type: ignore[attr-defined]  # captured as a step is

    def step(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    try:
        with unchanged((fn, args, kwargs)):
            torch.compile(step, backend=note, dynamic=False)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # the reason is known already; what fails here, fails in plain PyTorch
        found[Break("", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")] = None
    return list(found)
