"""The input of every solver as plain data: a graph, the costs of its ops, and JSON to carry both anywhere.

On the main path, 6 of 16: see docs/idea.md.
"""

from __future__ import annotations

import gzip
import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
from checkmate.units import exact_bytes

FORMAT = "checkmate-problem"
VERSION = 1
NEWER: dict[int, Callable[[Problem], object]] = {  # versions of files, and what a problem has then
    7: lambda problem: problem.homes,  # who does not know them would look for these values here
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
            all bytes together are more than 2**53, or a value cannot be at home where it is said to be.

    >>> problem = Problem.from_dag(deps=[[], [0], [0, 1]], seconds=[1, 1, 1], sizes=[4, 4, 4])
    >>> problem.keep_all_peak
    12
    """

    graph: Graph
    profile: Profile
    codegen: Callable[[Plan], Any] | None = field(default=None, repr=False)  # writes fx modules; None: not from PyTorch
    rules: tuple[Rule, ...] = ()  # obeyed by every plan; put here by `checkmate.core.rules.with_rules`
    host: Host | None = None  # a second memory, where values may wait; `with_host` puts one here
    homes: frozenset[int] = frozenset()  # values whose place between calls is the second memory; see `with_homes`
    kept: frozenset[int] = frozenset()  # those of them of which a copy stays here between calls, too
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
        if self.homes or self.kept:
            self._check_homes()

    def _check_homes(self) -> None:
        """Raise unless the homes can be those of a step with this graph and this second memory."""
        graph, host, values = self.graph, self.host, self.graph.values
        if not all(type(v) is int and 0 <= v < len(values) for v in self.homes | self.kept):
            raise InvalidProblem(f"Values are at home in the second memory that are not there: {[*self.homes]}.")
        if host is None:
            raise InvalidProblem("Values are at home in a second memory, and the problem has none: Problem.with_host.")
        if graph.links:
            raise InvalidProblem("A step whose ops links between ranks carry has no values at home in a second memory.")
        if self.kept - self.homes:
            name = values[min(self.kept - self.homes)].name
            raise InvalidProblem(f"{name!r} is kept from call to call, so it must be at home in the second memory.")
        for v in sorted(self.homes):
            why, by = "", graph.overwritten_by.get(v)
            if values[v].producer is not None:
                why = "an op makes it"
            elif v in graph.outputs:
                why = "it is a result of the step, and so here in the end"
            elif by is not None and v not in graph.ops[by].inputs:
                why = f"{graph.ops[by].name} overwrites it without reading it"
            if why:
                raise InvalidProblem(f"{values[v].name!r} cannot be at home in the second memory: {why}.")
        if self.homes_bytes > host.budget:
            sums = Counter[str]()
            for v in self.homes:
                sums[values[v].role] += values[v].size_bytes
            parts = ", ".join(f"{exact_bytes(size)} of role {role!r}" for role, size in sums.most_common())
            raise InvalidProblem(
                f"The second memory has room for {exact_bytes(host.budget)}, and {exact_bytes(self.homes_bytes)} are "
                f"at home there: {parts}. Give it as much at least, or have less at home there."
            )

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
        parameters: Sequence[tuple[int, Sequence[int], int | None]] = (),
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
                other ops that read it. Such an op runs once; those before it must not run after it. It has no bytes.
            parameters: further values that are there before the step begins: the bytes of each, which are resident, the
                ops that read it, and the op that overwrites it or None.

        Raises:
            InvalidProblem: naming the op with a bad dependency, cost or size.

        >>> Problem.from_dag([[], [0]], seconds=[1.0, 2.0], sizes=[10, 20]).graph.outputs
        (1,)
        >>> Problem.from_dag([[], [0]], seconds=[1.0, 2.0], sizes=[10, 10], over={1: [0]}).keep_all_peak
        10
        >>> Problem.from_dag([[], [0]], [1, 1], [10, 20], parameters=[(4, [0], 1)]).resident
        4
        """
        n = len(deps)
        workspace = [0] * n if workspace is None else workspace
        forward = n if forward is None else forward
        for name, entries in (("seconds", seconds), ("sizes", sizes), ("workspace", workspace)):
            if len(entries) != n:
                raise InvalidProblem(f"{n} ops have dependencies, but there are {len(entries)} {name}.")
        # One value per op; unread ones are the results.
        inputs = [tuple(sorted({_index(d, n, f"deps[{k}]") for d in ds})) for k, ds in enumerate(deps)]
        if outputs is None:
            read = {d for ds in inputs for d in ds}
            outputs = [k for k in range(n) if k not in read]
        ops = [Op(f"op{k}", "op", inputs[k], (k,), "forward" if k < forward else "backward") for k in range(n)]
        values = [Value(f"v{k}", _size(sizes[k], k), k) for k in range(n)]
        # Values that are there before: read by some ops, and overwritten by one of them or by none.
        of_none = [(0, readers, by, f"p{by}") for by, readers in (overwrites or {}).items()]
        named = [(size, readers, by, f"w{i}") for i, (size, readers, by) in enumerate(parameters)]
        for size, readers, by, name in (*of_none, *named):
            for k in {*readers, *(() if by is None else (by,))}:
                ops[_index(k, n, "overwrites")] = replace(ops[k], inputs=(*ops[k].inputs, len(values)))
            if by is not None:
                overwritten = (*ops[by].overwrites, len(values))
                ops[by] = replace(ops[by], overwrites=overwritten, pinned=ops[by].pinned or f"overwrites {name}")
            values.append(Value(name, size, None, "parameter"))
        resident_bytes += sum(size for size, *_ in parameters)
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
        """(V,) int64: bytes of each value (M in the paper); 0 for those here before the step, which are resident."""
        moves = [value.producer is not None or v in self.homes for v, value in enumerate(self.graph.values)]
        return np.array([value.size_bytes for value in self.graph.values], dtype=np.int64) * moves

    @cached_property
    def homes_bytes(self) -> int:
        """Bytes of the values that are at home in the second memory."""
        return sum(self.graph.values[v].size_bytes for v in self.homes)

    @cached_property
    def begin_bytes(self) -> int:
        """Bytes here before the first step of a plan: resident values and kept copies."""
        return self.resident + sum(self.graph.values[v].size_bytes for v in self.kept)

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

        Ways that are slower than a plain run are not taken. What is at home in a second memory is here all the time.
        """
        last = [max((*users, self.graph.values[v].producer or 0)) for v, users in enumerate(self.graph.users)]
        for v in (*self.graph.outputs, *self.homes):
            last[v] = len(self.graph.ops)
        dying: list[int] = [0] * (len(self.graph.ops) + 1)
        for v, end in enumerate(last):
            dying[end] += int(self.sizes[v])
        live, at = self.resident + self.homes_bytes, []
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
        meantime. Beside the first op counts what is here when the step begins, beside the last what stays here. No
        budget below the largest of these can be met.
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
            at_hand = held.union(op.inputs, op.outputs)
            stay = {v for v in held if graph.users[v] and graph.users[v][-1] > k}
            saved = next((saved for v, saved in self.savings[k] if v not in stay), 0)
            bytes_at.append(self.resident + int(self.sizes[list(at_hand)].sum()) + int(self.workspace[k]) - saved)
            stays = op.pinned is not None and self.host is None
            held.update(v for v in op.outputs if v in results or (stays and graph.users[v]))
        bytes_at[0] = max(bytes_at[0], self.begin_bytes)
        outputs = [v for v in graph.outputs if graph.values[v].producer is not None]
        bytes_at[-1] = max(bytes_at[-1], self.begin_bytes + int(self.sizes[outputs].sum()))
        return np.array(bytes_at, dtype=np.int64)

    def let_go(self, next_split: Callable[[], Problem | None] | None) -> Problem:
        """The problem with this function for its further split; of what was computed of it, two numbers stay."""
        light = replace(self, next_split=next_split)
        vars(light).update(keep_all_peak=self.keep_all_peak, keep_all_cost=self.keep_all_cost)
        return light

    def with_host(self, host: Host | None) -> Problem:
        """The problem and its further splits with this second memory, or with none.

        >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
        >>> print(problem.with_host(Host(100, send=1e9, fetch=1e9)).host)
        100 B, 1 GB/s there, 1 back, a link each way
        """
        if host is None and self.homes:
            return self.with_homes(()).with_host(None)
        return replace(self, host=host, next_split=self._next_split(lambda problem: problem.with_host(host)))

    def with_homes(self, homes: Iterable[int], kept: Iterable[int] = ()) -> Problem:
        """The problem and its further splits with these values at home in the second memory, and all others here.

        Between calls of the step they are there, and current. A plan fetches them, and frees a copy that is current
        there as well. What an op overwrites it sends back, and frees only then.

        Args:
            homes: values that are there before the step begins. Their bytes are no longer resident.
            kept: those of them of which a copy is here as well when the step begins, and when it ends.

        Raises:
            InvalidProblem: if a value cannot be at home there, or the second memory has no room for all.

        >>> step = Problem.from_dag([[], [0], [1]], [1] * 3, [4] * 3, parameters=[(8, [0], 2)])
        >>> there = step.with_host(Host(100, send=1e9, fetch=1e9)).with_homes([3])
        >>> step.resident, there.resident, there.homes_bytes
        (8, 0, 8)
        """
        home_set, kept, values = frozenset(homes), frozenset(kept), self.graph.values
        names = [{values[v].name for v in vs if v < len(values)} for vs in (home_set, kept)]

        def likewise(problem: Problem) -> Problem:
            inputs = [(v, value.name) for v, value in enumerate(problem.graph.values) if value.producer is None]
            return problem.with_homes(*([v for v, name in inputs if name in group] for group in names))

        resident = self.resident + self.homes_bytes - sum(values[v].size_bytes for v in home_set if v < len(values))
        if resident < 0:
            more = exact_bytes(-resident)
            raise InvalidProblem(f"The homes take {more} more than what is resident, of which they are a part.")
        moved = [(v, (v in self.homes) - (v in home_set)) for v, value in enumerate(values) if value.role == "state"]
        states = self.profile.state_bytes + sum(times * values[v].size_bytes for v, times in moved)
        profile = replace(self.profile, resident_bytes=resident, state_bytes=max(0, states))
        return replace(self, profile=profile, homes=home_set, kept=kept, next_split=self._next_split(likewise))

    def _next_split(self, change: Callable[[Problem], Problem]) -> Callable[[], Problem | None] | None:
        """The function for the further split, changed as this problem is; None if there is no split."""
        next_split = self.next_split

        def split_further() -> Problem | None:
            problem = next_split() if next_split is not None else None
            return None if problem is None else change(problem)

        return None if next_split is None else split_further

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
            **({"homes": sorted(self.homes), "kept": sorted(self.kept)} if self.homes else {}),
        }
        text = json.dumps(document, allow_nan=False).encode()
        path = Path(path)
        # Equal problems give equal files.
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Problem:
        """Read what `to_json` wrote, 2**26 bytes at most, unpacked. Nothing in the file can run.

        Raises:
            InvalidProblem: if the file is not such a file, is larger, or describes no valid problem.
            OSError: if it cannot be read.
        """
        path, kind = Path(path), "problem file"
        document = read_json(path, format=FORMAT, versions=(VERSION, *NEWER), what=kind, most=MOST_BYTES)
        try:
            # JSON has lists where the records have tuples.
            ops = []
            for op in document["ops"]:
                fields = {**op, "inputs": tuple(op["inputs"]), "outputs": tuple(op["outputs"])}
                fields |= {name: tuple(op[name]) for name in ("tags", "overwrites") if name in op}
                ops.append(Op(**fields))
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
            homes, kept = (frozenset(document.get(name, ())) for name in ("homes", "kept"))
            name = document.get("name", "")
            return cls(graph, profile, rules=tuple(rules), host=host, homes=homes, kept=kept, name=name)
        except KeyError as error:
            raise InvalidProblem(f"{path} describes no valid problem: {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise InvalidProblem(f"{path} describes no valid problem: {error}") from None


def _without_defaults(part: Op | InPlace) -> dict[str, Any]:
    """An op or an in-place way for JSON, without newer fields that have their defaults."""
    return {name: value for name, value in asdict(part).items() if name not in NOT_IN_OLDER or value}


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
