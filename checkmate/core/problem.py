"""The input of every solver as plain data: a graph, the costs of its ops, and JSON to carry both anywhere.

On the main path, 6 of 16: see docs/idea.md.
"""

from __future__ import annotations

import gzip
import json
import operator
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from checkmate.core.files import read_json
from checkmate.core.graph import MAX_BYTES, Graph, Op, Value
from checkmate.core.host import Host
from checkmate.core.inplace import InPlace, Saving, savings
from checkmate.core.limits import Limits, Rule
from checkmate.core.plan import Plan
from checkmate.errors import InvalidProblem

FORMAT = "checkmate-problem"
VERSION = 1
NEWER: dict[int, Callable[[Problem], object]] = {  # versions of files, and what a problem has then
    6: lambda problem: problem.graph.links,  # who does not know them would count other seconds
    5: lambda problem: problem.host,  # likewise
    4: lambda problem: problem.graph.overwritten_by,  # ... would run other ops after what overwrites
    3: lambda problem: problem.profile.ways,  # ... would count other bytes
    2: lambda problem: problem.rules,  # ... would break them
}
NOT_IN_OLDER = ("tags", "overwrites", "link", "slower")  # of ops and ways
MOST_BYTES = 2**26  # of a file, unpacked: some 100,000 ops


@dataclass(frozen=True, eq=False)
class Profile:
    """The costs of all ops, measured or estimated.

    Raises:
        InvalidProblem: if the costs are no numbers, or bytes are no whole numbers.
    """

    seconds: np.ndarray  # (T,) float64, one execution of each op
    workspace_bytes: np.ndarray  # (T,) int64, needed while the op runs, beyond its inputs and outputs
    resident_bytes: int = 0  # there before the step begins and until its end: parameters, buffers, inputs
    source: str = "given"  # where the numbers come from, e.g. "measured on cpu, 2 threads; 3 ops estimated"
    estimated: tuple[int, ...] = ()  # the ops whose costs are no measurements
    ways: tuple[InPlace, ...] = ()  # to run ops other than plainly; the same seconds, the same bits
    state_bytes: int = 0  # of the resident ones: what the optimizers of a whole training step keep

    def __post_init__(self) -> None:
        try:
            seconds = np.asarray(self.seconds, dtype=np.float64)
            workspace = np.asarray(self.workspace_bytes, dtype=np.float64)
            resident = operator.index(self.resident_bytes)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidProblem(f"The profile has costs that are not numbers: {error}.") from None
        # Bytes are whole numbers.
        bad = np.flatnonzero((workspace != np.rint(workspace)) | (np.abs(workspace) > MAX_BYTES))
        if bad.size:
            raise InvalidProblem(f"Op {bad[0]} needs {workspace[bad[0]]} workspace bytes; a size is a whole number.")
        if not isinstance(self.source, str):
            raise InvalidProblem(f"The profile is from {self.source!r}; a source is text.")
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "workspace_bytes", workspace.astype(np.int64))
        object.__setattr__(self, "resident_bytes", resident)


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A step to schedule: the input of every solver.

    Raises:
        InvalidProblem: if the profile does not fit the graph, or a cost is negative or not finite, or a way is none, or
            all bytes together are more than 2**53.

    >>> problem = Problem.from_dag(deps=[[], [0], [0, 1]], seconds=[1, 1, 1], sizes=[4, 4, 4])
    >>> problem.keep_all_peak
    12
    """

    graph: Graph
    profile: Profile
    codegen: Callable[[Plan], Any] | None = field(default=None, repr=False)  # writes fx modules; None: not from PyTorch
    rules: tuple[Rule, ...] = ()  # obeyed by every plan; put here by `checkmate.core.rules.with_rules`
    host: Host | None = None  # a second memory, where values may wait; `with_host` puts one here
    name: str = ""  # of the step in words, such as "GPT2 with AdamW"; empty: unknown
    splits: tuple[str, ...] = ()  # the parts it runs in, in words; not in files
    next_split: Callable[[], Problem | None] | None = field(default=None, repr=False)  # the step split further

    def __post_init__(self) -> None:
        ops = self.graph.ops
        for name, costs in (("seconds", self.seconds), ("workspace bytes", self.workspace)):
            if costs.shape != (len(ops),):
                raise InvalidProblem(f"The profile has {costs.size} {name} for {len(ops)} ops.")
            bad = np.flatnonzero(~np.isfinite(costs) | (costs < 0) | (costs > MAX_BYTES))
            if bad.size:
                op, cost = ops[bad[0]], costs[bad[0]]
                raise InvalidProblem(f"Op {op.name!r} costs {cost} {name}; a cost is finite and >= 0.")
        if not all(type(k) is int and 0 <= k < len(ops) for k in self.profile.estimated):
            raise InvalidProblem(f"The profile marks ops as estimated that are not there: {self.profile.estimated}.")
        for rule in self.rules:
            if not all(type(k) is int and 0 <= k < len(ops) for k in (*rule.ops, *(k for k, _ in rule.exempt))):
                raise InvalidProblem(f"The rule {rule.text} is for ops that are not there.")
        for way in self.profile.ways:
            way.check(self.graph)
        if not 0 <= self.resident <= MAX_BYTES:
            raise InvalidProblem(f"{self.resident} resident bytes; they are between 0 and 2**53.")
        together = self.resident + sum(self.sizes.tolist()) + int(self.workspace.max())
        if together > MAX_BYTES:
            raise InvalidProblem(f"All values, resident bytes and a workspace take {together} bytes; 2**53 at most.")

    @classmethod
    def from_dag(
        cls,
        deps: Sequence[Sequence[int]],
        seconds: Sequence[float],
        sizes: Sequence[int],
        outputs: Sequence[int] | None = None,
        workspace: Sequence[int] | None = None,
        resident_bytes: int = 0,
        forward: int | None = None,
        over: Mapping[int, Sequence[int]] | None = None,
        overwrites: Mapping[int, Sequence[int]] | None = None,
    ) -> Problem:
        """A problem from plain lists, one value per op, for experiments without PyTorch.

        Args:
            deps: for each op, the earlier ops whose values it reads.
            seconds: for each op, the time of one execution.
            sizes: for each op, the bytes of its value.
            outputs: ops whose values are results of the step; by default those that no op reads.
            workspace: for each op, bytes needed only while it runs; by default none.
            resident_bytes: bytes there all the time.
            forward: how many of the ops, the first ones, are of the forward; by default all.
            over: for some ops, those whose values they may write over, if these are not needed any more.
            overwrites: ops that overwrite a value which is there before the step begins, each one of its own, with the
                other ops that read it. Such an op runs once; those before it must not run after it.

        Raises:
            InvalidProblem: naming the op with a bad dependency, cost or size.

        >>> Problem.from_dag([[], [0]], seconds=[1.0, 2.0], sizes=[10, 20]).graph.outputs
        (1,)
        >>> Problem.from_dag([[], [0]], seconds=[1.0, 2.0], sizes=[10, 10], over={1: [0]}).keep_all_peak
        10
        """
        n = len(deps)
        workspace = [0] * n if workspace is None else workspace
        forward = n if forward is None else forward
        for name, given in (("seconds", seconds), ("sizes", sizes), ("workspace", workspace)):
            if len(given) != n:
                raise InvalidProblem(f"{n} ops have dependencies, but there are {len(given)} {name}.")
        # One value per op; unread ones are the results.
        inputs = [tuple(sorted({_index(d, n, f"deps[{k}]") for d in ds})) for k, ds in enumerate(deps)]
        if outputs is None:
            read = {d for ds in inputs for d in ds}
            outputs = [k for k in range(n) if k not in read]
        ops = [Op(f"op{k}", "op", inputs[k], (k,), "forward" if k < forward else "backward") for k in range(n)]
        values = [Value(f"v{k}", _size(sizes[k], k), k) for k in range(n)]
        # A parameter for each op that overwrites one, read by the others.
        for by, readers in (overwrites or {}).items():
            for k in {by, *readers}:
                ops[_index(k, n, "overwrites")] = replace(ops[k], inputs=(*ops[k].inputs, len(values)))
            ops[by] = replace(ops[by], overwrites=(len(values),), pinned=f"overwrites p{by}")
            values.append(Value(f"p{by}", 0, None, "parameter"))
        graph = Graph(tuple(ops), tuple(values), tuple(_index(k, n, "outputs") for k in outputs))
        ways = tuple(InPlace(k, k, v, int(workspace[k])) for k, vs in (over or {}).items() for v in vs)
        profile = Profile(seconds, workspace, resident_bytes, ways=ways)  # type: ignore[arg-type]  # it makes arrays
        return cls(graph, profile)

    def __repr__(self) -> str:
        graph, in_place = self.graph, sum(map(bool, self.savings))
        ways = f"{in_place} ops in place, " if in_place else ""
        return (
            f"Problem({len(graph.ops)} ops, {len(graph.values)} values, {ways}keep_all_peak={self.keep_all_peak}, "
            f"keep_all_cost={self.keep_all_cost:g}, {self.profile.source})"
        )

    @property
    def seconds(self) -> np.ndarray:
        """(T,) float64: the time of one execution of each op (C in the paper)."""
        return self.profile.seconds

    @property
    def workspace(self) -> np.ndarray:
        """(T,) int64: bytes each op needs while it runs, beyond inputs and outputs."""
        return self.profile.workspace_bytes

    @property
    def resident(self) -> int:
        """Bytes resident throughout the step."""
        return self.profile.resident_bytes

    @cached_property
    def savings(self) -> tuple[tuple[Saving, ...], ...]:
        """For each op (value that it may write over, bytes saved if that value goes), the most bytes first."""
        return savings(self.profile.ways, self.sizes, self.workspace)

    def saved(self, k: int, dying: Container[int]) -> Saving | None:
        """The input that a run of op k writes over, and the bytes saved, if these values are freed with the run."""
        return next((saving for saving in self.savings[k] if saving[0] in dying), None)

    @cached_property
    def slower(self) -> frozenset[tuple[int, int]]:
        """The (op, overwritten value) pairs whose in-place run is slower than the plain one."""
        return frozenset((way.op, way.over) for way in self.profile.ways if way.slower)

    @cached_property
    def limits(self) -> Limits:
        """The limits beside pinned ops: from rules, and from ops that overwrite inputs of others."""
        return Limits.of(self.graph, self.rules)

    @cached_property
    def sizes(self) -> np.ndarray:
        """(V,) int64: bytes of each value; 0 for values that no op makes (they count as resident; M in the paper)."""
        return np.array([0 if v.producer is None else v.size_bytes for v in self.graph.values], dtype=np.int64)

    @cached_property
    def keep_all_cost(self) -> float:
        """Seconds of a step that runs each op once, one after another."""
        return float(self.seconds.sum())

    @cached_property
    def least_cost(self) -> float:
        """A lower bound on the seconds of every plan: all ops of the processor, or of a link if that is more."""
        on_links = [float(self.seconds[[*ops]].sum()) for ops in self.graph.links.values()]
        return max(self.keep_all_cost - sum(on_links), *on_links) if on_links else self.keep_all_cost

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """(T,) int64: bytes in memory while each op runs, if each runs once and values go after their last use.

        Ways that are slower than a plain run are not taken.
        """
        last = [max((*users, self.graph.values[v].producer or 0)) for v, users in enumerate(self.graph.users)]
        for v in self.graph.outputs:
            last[v] = len(self.graph.ops)
        dying: list[int] = [0] * (len(self.graph.ops) + 1)
        for v, end in enumerate(last):
            dying[end] += int(self.sizes[v])
        live, at = self.resident, []
        for k, op in enumerate(self.graph.ops):
            live += int(self.sizes[list(op.outputs)].sum())
            saved = next((saved for v, saved in self.savings[k] if last[v] == k and (k, v) not in self.slower), 0)
            at.append(live + int(self.workspace[k]) - saved)
            live -= dying[k]
        return np.array(at, dtype=np.int64)

    @cached_property
    def keep_all_peak(self) -> int:
        """The peak in bytes of a step that runs each op once."""
        return int(self.live_bytes.max())

    @cached_property
    def unavoidable_bytes(self) -> np.ndarray:
        """(T,) int64: bytes that every schedule has in memory while each op runs for the first time.

        Its inputs, outputs and workspace, the results of the step made so far, and the values that a later op still
        reads and whose own op must not run again, since it is pinned or since what it reads has been overwritten; less
        what the best way of the op saves where its value may go. With a second memory such values may be there in the
        meantime. No budget below the largest of these can be met.
        """
        graph = self.graph
        results, bytes_at = set(graph.outputs), []
        held: set[int] = set()  # made earlier, and here in every schedule
        closed: dict[int, list[int]] = {}  # with each op: what cannot be made again after it
        for k, last in self.limits.last_stage.items() if self.host is None else ():
            closed.setdefault(last, []).extend(graph.ops[k].outputs)
        for k, op in enumerate(graph.ops):
            held.update(v for v in closed.get(k, ()) if v in results or graph.users[v])
            held = {v for v in held if v in results or graph.users[v][-1] >= k}
            here = held.union(op.inputs, op.outputs)
            stay = {v for v in held if graph.users[v] and graph.users[v][-1] > k}
            saved = next((saved for v, saved in self.savings[k] if v not in stay), 0)
            bytes_at.append(self.resident + int(self.sizes[list(here)].sum()) + int(self.workspace[k]) - saved)
            stays = op.pinned is not None and self.host is None
            held.update(v for v in op.outputs if v in results or (stays and graph.users[v]))
        return np.array(bytes_at, dtype=np.int64)

    def let_go(self, next_split: Callable[[], Problem | None] | None) -> Problem:
        """The problem with this function for its further split, and without what was computed of it but two numbers."""
        light = replace(self, next_split=next_split)
        vars(light).update(keep_all_peak=self.keep_all_peak, keep_all_cost=self.keep_all_cost)
        return light

    def with_host(self, host: Host | None) -> Problem:
        """The problem and its further splits with this second memory, or with none.

        >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
        >>> print(problem.with_host(Host(100, send=1e9, fetch=1e9)).host)
        100 B, 1 GB/s there, 1 back, a link each way
        """
        next_split = self.next_split

        def split_further() -> Problem | None:
            problem = next_split() if next_split is not None else None
            return None if problem is None else problem.with_host(host)

        return replace(self, host=host, next_split=None if next_split is None else split_further)

    def splits_in_turn(self) -> Iterator[Problem]:
        """The problem, then the step split further and further, as long as that helps."""
        problem: Problem | None = self
        while problem is not None:
            yield problem
            problem = None if problem.next_split is None else problem.next_split()

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write everything a solver needs to a JSON file, compressed where the name ends in ``.gz``."""
        document = {
            "format": FORMAT,
            "version": next((n for n, has in NEWER.items() if has(self)), VERSION),  # the oldest that holds all
            "ops": [_without_defaults(op) for op in self.graph.ops],
            "values": [asdict(value) for value in self.graph.values],
            "outputs": self.graph.outputs,
            "seconds": self.seconds.tolist(),
            "workspace_bytes": self.workspace.tolist(),
            "resident_bytes": self.resident,
            "source": self.profile.source,
            "estimated": self.profile.estimated,
            **({"name": self.name} if self.name else {}),
            **({"state_bytes": self.profile.state_bytes} if self.profile.state_bytes else {}),
            **({"rules": [asdict(rule) for rule in self.rules]} if self.rules else {}),
            **({"ways": [_without_defaults(way) for way in self.profile.ways]} if self.profile.ways else {}),
            **({"host": asdict(self.host)} if self.host is not None else {}),
        }
        # Equal problems give equal files.
        text = json.dumps(document, allow_nan=False).encode()
        path = Path(path)
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Problem:
        """Read what `to_json` wrote, 2**26 bytes at most, unpacked. Nothing in the file can run.

        Raises:
            InvalidProblem: if the file is not such a file, is larger, or describes no valid problem.
            OSError: if it cannot be read.
        """
        path, what = Path(path), "problem file"
        document = read_json(path, format=FORMAT, versions=(VERSION, *NEWER), what=what, most=MOST_BYTES)
        try:
            # JSON has lists where the records have tuples.
            ops = []
            for op in document["ops"]:
                made = {**op, "inputs": tuple(op["inputs"]), "outputs": tuple(op["outputs"])}
                made |= {name: tuple(op[name]) for name in ("tags", "overwrites") if name in op}
                ops.append(Op(**made))
            values = tuple(Value(**value) for value in document["values"])
            graph = Graph(tuple(ops), values, tuple(document["outputs"]))
            costs = {name: document[name] for name in ("seconds", "workspace_bytes", "resident_bytes", "source")}
            ways = tuple(InPlace(**way) for way in document.get("ways", ()))  # older files lack these, and what follows
            rules = []
            for rule in document.get("rules", ()):
                exempt = tuple((k, why) for k, why in rule["exempt"])
                rules.append(Rule(rule["pattern"], rule["asks"], tuple(rule["ops"]), exempt))
            state = document.get("state_bytes", 0)
            profile = Profile(**costs, estimated=tuple(document.get("estimated", ())), ways=ways, state_bytes=state)
            host = Host(**document["host"]) if "host" in document else None
            return cls(graph, profile, rules=tuple(rules), host=host, name=document.get("name", ""))
        except KeyError as error:
            raise InvalidProblem(f"{path} describes no valid problem: {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise InvalidProblem(f"{path} describes no valid problem: {error}") from None


def _without_defaults(part: Op | InPlace) -> dict[str, Any]:
    """An op or an in-place way for JSON, without newer fields that have their defaults."""
    return {name: what for name, what in asdict(part).items() if name not in NOT_IN_OLDER or what}


def _index(k: Any, n: int, where: str) -> int:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 0 <= k < n:
        raise InvalidProblem(f"{where} names {k!r}, but the ops are 0 to {n - 1}.")
    return int(k)


def _size(size: Any, k: int) -> int:
    try:
        if size == int(size):
            return int(size)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidProblem(f"sizes[{k}] is {size!r}; a size is a whole number of bytes.")
