"""The graph of a step: ops, the storages they read and write, and the order of their first execution.

Operations and values are two sets, because an operation may have several outputs with different lives (batch
normalization: an output and two statistics), and because a view is neither: it is the same value, seen differently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from checkmate.errors import InvalidProblem

Phase = Literal["forward", "backward"]
Role = Literal["parameter", "buffer", "input", "state", "tangent", "intermediate"]

MAX_BYTES = 2**53  # beyond it a float64, which solvers compute in, no longer holds every integer

# makers of values that others hold: autograd, and ops that communicate with other ranks
_HELD_BY_OTHERS = ("autograd", "_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")
_WHERE = re.compile(r"(?P<module>[^\s(]+) \((?P<facts>.*)\)")
_LINE = re.compile(r"[^\s,()]+:\d+$")


@dataclass(frozen=True)
class CodePlace:
    """The place in the user's code that an op comes from; parts are empty if unknown."""

    module: str = ""  # path, such as "layer1.0.conv2"
    kind: str = ""  # class of the module, such as "Conv2d"
    line: str = ""  # file and line, such as "resnet.py:31"


def code_place_of(where: str | None) -> CodePlace:
    """The parts of `Op.where`.

    >>> code_place_of("layer1.0.conv2 (Conv2d, resnet.py:31)")
    CodePlace(module='layer1.0.conv2', kind='Conv2d', line='resnet.py:31')
    >>> code_place_of("train.py:7").line, code_place_of(None).line
    ('train.py:7', '')
    """
    match = _WHERE.fullmatch(where or "")
    module, facts = (match["module"], match["facts"]) if match else ("", where or "")
    *kind, last = facts.split(", ")
    line = last if _LINE.fullmatch(last) else ""
    named = ", ".join(kind if line else [*kind, last])
    if not match and not line:  # a bare path, or words such as "generated code"
        return CodePlace(module="" if " " in facts else facts)
    return CodePlace(module, named, line)


@dataclass(frozen=True, slots=True)
class Value:
    """A storage, which occupies memory. All views of it are the same value."""

    name: str
    size_bytes: int
    producer: int | None  # index of the op that makes it; None: it is there before the step begins
    role: Role = "intermediate"


@dataclass(frozen=True)
class Op:
    """An operation that runs once or more often in a step."""

    name: str
    target: str  # its operator, e.g. "aten.mm.default"
    inputs: tuple[int, ...]  # indices of the values it reads, each once
    outputs: tuple[int, ...]  # indices of the values it makes
    phase: Phase = "forward"
    pinned: str | None = None  # why it must run exactly once, in words; None: it may run again
    where: str | None = None  # the line of the user's code it comes from, where known
    tags: tuple[str, ...] = ()  # names that the user's code gave to what it makes
    overwrites: tuple[int, ...] = ()  # values without producer that hold something else once it has run
    link: str = ""  # the link that carries it, such as "ranks 0-7"; empty: the processor runs it

    @cached_property
    def place(self) -> CodePlace:
        """The parts of ``where``."""
        return code_place_of(self.where)


@dataclass(frozen=True)
class Graph:
    """Ops in the order of their first execution, the values, and which values are the step's results.

    An op may overwrite what is there before the step begins, as the update of a parameter does. Ops before it in the
    order read the old content, so that they must not run after it; ops after it read the new one.

    Raises:
        InvalidProblem: if the graph is empty, an input is made only later (a cycle) or by nobody, a value is made
            twice, a size is negative or beyond 2**53 bytes, an output does not exist, a forward op follows a backward
            op, or an op overwrites what an op makes or another one overwrites, or may do so more than once.

    >>> g = Graph((Op("a", "f", (), (0,)), Op("b", "f", (0,), (1,))), (Value("x", 4, 0), Value("y", 4, 1)), (1,))
    >>> g.users, g.deps
    (((1,), ()), ((), (0,)))
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ops:
            raise InvalidProblem("The graph is empty: there is nothing to schedule.")
        for v, value in enumerate(self.values):
            _check_texts(f"Value {v}", value.name)
            size, producer, item = value.size_bytes, value.producer, f"Value {value.name!r}"
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_BYTES:
                raise InvalidProblem(f"{item} has size {size!r}; a size is an int between 0 and 2**53 bytes.")
            if value.role not in get_args(Role):
                raise InvalidProblem(f"{item} has role {value.role!r}; a role is one of {get_args(Role)}.")
            if producer is None:
                continue
            _check_indices(item, [producer])
            if not 0 <= producer < len(self.ops):
                raise InvalidProblem(f"{item} is made by op {producer}, but there are {len(self.ops)} ops.")
            if v not in (maker := self.ops[producer]).outputs:
                raise InvalidProblem(f"{item} names {maker.name!r} as its producer, whose outputs lack it.")
        for k, op in enumerate(self.ops):
            self._check_op(k, op)
        _check_indices("The graph", self.outputs)
        for v in self.outputs:
            if not 0 <= v < len(self.values):
                raise InvalidProblem(f"Output {v} is not a value: there are {len(self.values)}.")
        if len(set(self.outputs)) != len(self.outputs):
            raise InvalidProblem("An output is listed twice.")
        # An op overwrites what is there before the step begins, once, and no other op does.
        first: dict[int, str] = {}
        for op in self.ops:
            for v in op.overwrites:
                if not 0 <= v < len(self.values):
                    raise InvalidProblem(f"Op {op.name!r} overwrites value {v}, but there are {len(self.values)}.")
                name = self.values[v].name
                if self.values[v].producer is not None:
                    raise InvalidProblem(
                        f"Op {op.name!r} overwrites {name!r}, which an op makes: only what is there before the step "
                        "begins can be overwritten."
                    )
                if op.pinned is None:
                    raise InvalidProblem(f"Op {op.name!r} overwrites {name!r}, so it must be pinned: to run once.")
                if v in first:
                    raise InvalidProblem(f"Ops {first[v]!r} and {op.name!r} both overwrite {name!r}; one op may.")
                first[v] = op.name

    def _check_op(self, k: int, op: Op) -> None:
        _check_texts(f"Op {k}", op.name, op.target, op.pinned or "", op.where or "", *op.tags, op.link)
        _check_indices(f"Op {op.name!r}", [*op.inputs, *op.outputs, *op.overwrites])
        # Phases: first the forward, then the backward.
        if op.phase not in get_args(Phase):
            raise InvalidProblem(f"Op {op.name!r} has phase {op.phase!r}; a phase is 'forward' or 'backward'.")
        if k and op.phase == "forward" and self.ops[k - 1].phase == "backward":
            raise InvalidProblem(f"Op {op.name!r} is of the forward but stands after {self.ops[k - 1].name!r}.")
        # Values: known, each once, made before they are read.
        for v in (*op.inputs, *op.outputs):
            if not 0 <= v < len(self.values):
                raise InvalidProblem(f"Op {op.name!r} names value {v}, but there are {len(self.values)} values.")
        if len(set(op.inputs)) != len(op.inputs) or len(set(op.outputs)) != len(op.outputs):
            raise InvalidProblem(f"Op {op.name!r} lists an input or an output twice.")
        for v in op.outputs:
            if self.values[v].producer != k:
                raise InvalidProblem(f"Op {op.name!r} makes {self.values[v].name!r}, which names another producer.")
        for v in op.inputs:
            producer = self.values[v].producer
            if producer is not None and producer >= k:
                raise InvalidProblem(
                    f"Op {op.name!r} reads {self.values[v].name!r}, which is made by {self.ops[producer].name!r}, "
                    "itself or a later op: the graph has a cycle or is not in execution order."
                )

    @cached_property
    def overwritten_by(self) -> dict[int, int]:
        """For each overwritten value, the op that overwrites it."""
        return {v: k for k, op in enumerate(self.ops) for v in op.overwrites}

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of states of optimizers and sums of gradients, which updates overwrite."""
        return sum(value.size_bytes for value in self.values if value.role == "state")

    @cached_property
    def links(self) -> dict[str, tuple[int, ...]]:
        """For each link, the ops that it carries, ascending."""
        names = dict.fromkeys(op.link for op in self.ops if op.link)
        return {name: tuple(k for k, op in enumerate(self.ops) if op.link == name) for name in names}

    def without_links(self) -> Graph:
        """The graph with all ops on the processor, which waits for each."""
        return replace(self, ops=tuple(replace(op, link="") for op in self.ops)) if self.links else self

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The ops that read each value, ascending."""
        users: list[list[int]] = [[] for _ in self.values]
        for k, op in enumerate(self.ops):
            for v in op.inputs:
                users[v].append(k)
        return tuple(map(tuple, users))

    def first_op(self, v: int) -> int:
        """The op that makes a value; of one that is there before the step, the first that reads it."""
        producer = self.values[v].producer
        return next(iter(self.users[v]), 0) if producer is None else producer

    @cached_property
    def deps(self) -> tuple[tuple[int, ...], ...]:
        """The ops whose values each op reads, ascending."""
        producers = ({self.values[v].producer for v in op.inputs} for op in self.ops)
        return tuple(tuple(sorted(p for p in made_by if p is not None)) for made_by in producers)

    @cached_property
    def only_here(self) -> frozenset[int]:
        """Values that cannot wait in a second memory.

        Others hold them, or write to them when their op has returned; or they are on the host already.
        """
        on_host = "checkmate.save_device_state"
        sets = (op.outputs for op in self.ops if op.target == on_host or op.target.partition(".")[0] in _HELD_BY_OTHERS)
        return frozenset(v for outputs in sets for v in outputs)

    @cached_property
    def forward_length(self) -> int:
        """The number of forward ops, and so the index of the backward's first op."""
        return sum(op.phase == "forward" for op in self.ops)

    def sharing(self, known: Graph) -> Graph:
        """The graph, with the parts that it has in common with a known one taken from that, so as to keep them once."""
        if self.ops != known.ops or len(self.values) != len(known.values):
            return self
        pairs, shared = zip(self.values, known.values, strict=True), copy(self)
        values = tuple(theirs if ours == theirs else ours for ours, theirs in pairs)
        vars(shared).update(ops=known.ops, values=values, users=known.users, deps=known.deps)
        return shared

    def in_order(self, order: Sequence[int]) -> Graph:
        """The graph with its ops in another order: ``order[i]`` becomes op i.

        Raises:
            InvalidProblem: if an op then reads what is made only later, or the old content of what is overwritten in
                place of the new or the reverse, or a forward op follows a backward op.

        >>> ops = Op("a", "f", (), (0,)), Op("b", "f", (), (1,))
        >>> Graph(ops, (Value("x", 4, 0), Value("y", 4, 1)), (0, 1)).in_order([1, 0]).values[0].producer
        1
        """
        place = {k: i for i, k in enumerate(order)}
        for v, by in self.overwritten_by.items():
            for k in self.users[v]:
                if (k < by) != (place[k] < place[by]) and k != by:
                    reads, name = self.ops[k].name, self.ops[by].name
                    raise InvalidProblem(
                        f"Op {reads!r} reads {self.values[v].name!r}, which {name!r} overwrites, and would change "
                        "sides with it in this order."
                    )
        makers = (None if value.producer is None else place[value.producer] for value in self.values)
        values = tuple(replace(value, producer=k) for value, k in zip(self.values, makers, strict=True))
        return Graph(tuple(self.ops[k] for k in order), values, self.outputs)


def _check_texts(whose: str, *texts: object) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise InvalidProblem(f"{whose} has {text!r} where a name or a reason is text.")


def _check_indices(whose: str, indices: Sequence[object]) -> None:
    for k in indices:
        if type(k) is not int:
            raise InvalidProblem(f"{whose} names {k!r} where an op or a value is a whole number.")
