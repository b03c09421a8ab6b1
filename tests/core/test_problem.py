"""Problems: from lists, to files and back, and what they say about memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.networks.dags import unit_chain
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.host import Host
from checkmate.core.problem import Problem, Profile
from checkmate.errors import InvalidProblem
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

NAMES = ["p.json", "p.json.gz"]
DIGITS = Problem.from_dag([[], [0]], [0.1 + 0.2, 1e-300], [2**52, 1], workspace=[2**51 + 1, 0], resident_bytes=7)
WITH_HOST = unit_chain(2).with_host(Host(10**9, send=2e9, fetch=1e9, one_link=True, latency=1e-5))


@in_turn(problem=[*(random_problem(seed, most_ops=7) for seed in range(5)), DIGITS, WITH_HOST], name=NAMES)
def test_json_round_trip(tmp_path: Path, problem: Problem, name: str) -> None:
    """Every digit and byte; the same problem gives the same file."""
    problem.to_json(tmp_path / name)
    read = Problem.from_json(str(tmp_path / name))
    assert (read.graph, read.resident, read.profile.source) == (problem.graph, problem.resident, problem.profile.source)
    assert read.host == problem.host
    assert np.array_equal(read.seconds, problem.seconds)
    assert np.array_equal(read.workspace, problem.workspace)
    read.to_json(tmp_path / f"again.{name}")
    assert (tmp_path / f"again.{name}").read_bytes() == (tmp_path / name).read_bytes()
    assert (problem.host is None) or b'"version": 5' in (tmp_path / name).read_bytes() or name.endswith(".gz")


RULE = {"pattern": "op", "asks": "keep", "ops": [0], "exempt": []}
HOST = {"budget": 10, "send": 1.0, "fetch": 1.0, "one_link": False, "latency": 0.0}


def _op(k: int, **change: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["ops"][k].update(change)


def _value(v: int, **change: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["values"][v].update(change)


def _rule(**change: object) -> dict[str, Any]:
    return {"version": 2, "rules": [RULE | change]}


def _host(**change: object) -> dict[str, Any]:
    return {"version": 5, "host": HOST | change}


BAD = [  # changes of a document of three ops
    ({"format": "other"}, "'format' is not 'checkmate-problem'"),
    ({"version": 99}, "version 99; this checkmate reads 1"),
    (lambda d: d.pop("seconds"), "'seconds' is missing"),
    (lambda d: d["ops"][0].pop("inputs"), "'inputs' is missing"),
    (_op(0, surprise=1), "surprise"),
    (_op(0, inputs=3), "not iterable"),
    (_op(0, inputs=["0"]), "no valid problem"),
    (lambda d: d["ops"].append(None), "no valid problem"),
    ({"ops": {}}, "The graph is empty"),
    (_value(1, size_bytes=1e400), "Infinity is no number"),
    (_value(0, size_bytes="4"), "Value 'v0' has size '4'"),
    ({"outputs": [99]}, "Output 99 is not a value"),
    ({"outputs": ["2"]}, "The graph names '2' where an op or a value is a whole number"),
    (_op(0, name=3), "Op 0 has 3 where a name or a reason is text"),
    (_op(0, target=None), "Op 0 has None where"),
    (_op(1, pinned=True), "Op 1 has True where"),
    (_op(1, where=[1]), r"Op 1 has \[1\] where"),
    (_op(1, tags=[{}]), "Op 1 has {} where"),
    (_op(1, inputs=[False]), "Op 'op1' names False where"),
    (_op(1, outputs=[1.0]), "Op 'op1' names 1.0 where"),
    (_op(1, overwrites=["0"]), "Op 'op1' names '0' where"),
    (_value(0, name=["v0"]), r"Value 0 has \['v0'\] where"),
    (_value(0, producer="0"), "Value 'v0' names '0' where"),
    (_value(0, producer=False), "Value 'v0' names False where"),
    (_value(0, role=[]), r"has role \[\]; a role is one of"),
    ({"source": 3}, "from 3; a source is text"),
    ({"version": 2, "rules": 3}, "not iterable"),
    ({"version": 2, "rules": ["op0"]}, "no valid problem"),
    (_rule(pattern=3), "pattern or a reason that is no text"),
    (_rule(exempt=[[0, None]]), "pattern or a reason that is no text"),
    (_rule(exempt=[0]), "no valid problem"),
    *((_rule(asks=asks), "asks for none of 'keep', 'once'") for asks in ("sometimes", ["keep"], True, 0)),
    (_rule(ops=["0"]), "for ops that are not there"),
    ({"version": 5, "host": 3}, "must be a mapping"),
    (_host(send="1e9"), "send is a positive, finite number"),
    (_host(one_link="no"), "one_link is True or False, not 'no'"),
    (_host(latency=None), "latency is a finite number"),
    (_host(links=2), "links"),
    ({"seconds": [1.0]}, "1 seconds for 3 ops"),
    ({"seconds": [1.0, None, 1.0]}, "'op1' costs nan seconds"),
    ({"seconds": [1.0, float("nan"), 1.0]}, "NaN is no number"),
    ({"seconds": [[1.0], [1.0, 2.0]]}, "costs that are not numbers"),
    ({"workspace_bytes": [0, 0.5, 0]}, "Op 1 needs 0.5 workspace bytes"),
    ({"workspace_bytes": [0, 2**80, 0]}, "Op 1 needs 1.2"),
    ({"resident_bytes": 1.5}, "not numbers"),
    ({"resident_bytes": -1}, "-1 resident bytes"),
]


@in_turn(change=BAD)
def test_a_bad_document_is_refused_by_name(change: tuple[Any, str], tmp_path: Path) -> None:
    (made, says), path = change, tmp_path / "p.json"
    Problem.from_dag([[], [0], [1]], [1, 1, 1], [1, 1, 1]).to_json(path)
    document = json.loads(path.read_text())
    document.update(made) if isinstance(made, dict) else made(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidProblem, match=says) as refused:
        Problem.from_json(path)
    assert "\n" not in str(refused.value)


def test_a_file_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    """Four megabytes that unpack to four gigabytes."""
    bomb = tmp_path / "p.json.gz"
    bomb.write_bytes(gzip.compress(bytes(2**20)) * 2**12)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidProblem, match=r"p.json.gz holds more than 67_108_864 bytes, and is not read"):
            Problem.from_json(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**26
    finally:
        tracemalloc.stop()


@in_turn(
    raw=[b"", b"null", b"[]", b"\xff\xfe", b"{", b"[" * 100_000, b'{"format": "checkmate-problem"}', b"1" * 5000],
    name=NAMES,
)
def test_what_is_no_problem_file_is_refused(tmp_path: Path, raw: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    with pytest.raises(InvalidProblem, match=name):
        Problem.from_json(tmp_path / name)


def test_a_text_in_place_of_a_path_is_refused_by_its_beginning() -> None:
    with pytest.raises(InvalidProblem, match=r"'\{\"format\": .*'\.\.\. is no path of a problem file") as refused:
        Problem.from_json('{"format": "checkmate-problem", "ops": [' + 5000 * "1, ")
    assert len(str(refused.value)) < 200


@in_turn(name=NAMES)
def test_a_truncated_file_is_refused_and_a_damaged_one_too_or_still_a_problem(tmp_path: Path, name: str) -> None:
    path, rng, refused = tmp_path / name, np.random.default_rng(0), 0
    unit_chain(1).to_json(path)
    raw = path.read_bytes()
    for length in range(0, len(raw), 3):
        path.write_bytes(raw[:length])
        with pytest.raises(InvalidProblem):
            Problem.from_json(path)
    random_problem(1, most_ops=6).to_json(path)
    raw = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(raw)
        damaged[rng.integers(len(raw))] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            Problem.from_json(path)
        except InvalidProblem:
            refused += 1
    assert refused > 150


BAD_LISTS = [
    ({"deps": [[], [2], [0]]}, "'op1' reads 'v2', which is made by 'op2'"),
    ({"deps": [[], [1], [0]]}, "'op1' reads 'v1', which is made by 'op1', itself"),
    ({"deps": [[], [3], [0]]}, r"deps\[1\] names 3, but the ops are 0 to 2"),
    *(({"deps": [[], [dep], [0]]}, rf"deps\[1\] names {dep}") for dep in (-1, 0.0, True)),
    ({"deps": []}, "0 ops have dependencies, but there are 3 seconds"),
    ({"seconds": [1, 1]}, "but there are 2 seconds"),
    ({"sizes": [1, 1, 1, 1]}, "but there are 4 sizes"),
    ({"workspace": [1]}, "but there are 1 workspace"),
    *(({"seconds": [1, s, 1]}, f"'op1' costs {float(s)} seconds") for s in (float("nan"), float("inf"), -1)),
    ({"seconds": ["a", 1, 1]}, "not numbers"),
    ({"deps": [], "seconds": [], "sizes": []}, "The graph is empty"),
    *(({"sizes": [1, size, 1]}, f"'v1' has size {size}") for size in (-1, 2**53 + 1)),
    *(({"sizes": [1, size, 1]}, rf"sizes\[1\] is {size!r}") for size in (1.5, "x", float("nan"), None)),
    ({"workspace": [0, 2**53 + 2, 0]}, "Op 1 needs 9007199254740994"),
    ({"workspace": [0, -4, 0]}, "'op1' costs -4 workspace bytes"),
    ({"outputs": [3]}, "outputs names 3"),
    ({"outputs": [1, 1]}, "An output is listed twice"),
    ({"resident_bytes": -1}, "-1 resident bytes"),
    ({"sizes": [2**53, 1, 1]}, r"take 9007199254740994 bytes; 2\*\*53 at most"),
]


@in_turn(change=BAD_LISTS)
def test_bad_lists_are_refused_by_name(change: tuple[dict[str, Any], str]) -> None:
    good: dict[str, Any] = {"deps": [[], [0], [1]], "seconds": [1, 1, 1], "sizes": [1, 1, 1]}
    Problem.from_dag(**good)
    with pytest.raises(InvalidProblem, match=change[1]):
        Problem.from_dag(**{**good, **change[0]})


def test_from_dag_takes_arrays() -> None:
    deps: Any = [np.array([], int), np.array([0])]
    costs: Any = np.ones(2), np.array([4, 8]), None, np.array([1, 2])
    problem = Problem.from_dag(deps, *costs)
    assert problem.graph.deps == ((), (0,))
    assert problem.workspace.tolist() == [1, 2]
    assert problem.keep_all_peak == 14
    assert Problem.from_dag([[], [0, 0]], [1, 1], [1, 1]).graph.ops[1].inputs == (0,)  # repeated ones count once
    assert Problem.from_dag([[], [0], [0]], [1, 1, 1], [1, 1, 1]).graph.outputs == (1, 2)  # what nothing reads


def test_keep_all_by_hand() -> None:
    problem = Problem.from_dag([[], [0], [1], [0, 2]], [1, 2, 3, 4], [10, 20, 30, 40], workspace=[0, 5, 0, 0])
    assert problem.live_bytes.tolist() == [10, 10 + 20 + 5, 10 + 20 + 30, 10 + 30 + 40]
    assert (problem.keep_all_peak, problem.keep_all_cost) == (80, 10.0)
    graph = Graph((Op("a", "f", (0,), (1,)),), (Value("weight", 100, None, "parameter"), Value("x", 4, 0)), (1,))
    problem = Problem(graph, Profile(np.ones(1), np.zeros(1), resident_bytes=1000))
    assert (problem.sizes.tolist(), problem.keep_all_peak) == ([0, 4], 1004)  # the weight counts as resident


def test_unavoidable_by_hand() -> None:
    values = tuple(Value(name, size, k) for k, (name, size) in enumerate([("a", 1), ("mask", 2), ("b", 4), ("c", 8)]))
    ops = (
        Op("a", "f", (), (0,)),
        Op("mask", "f", (0,), (1,), pinned="draws random numbers"),
        Op("b", "f", (0,), (2,)),
        Op("c", "f", (1, 2), (3,)),
    )
    problem = Problem(Graph(ops, values, (3,)), Profile(np.ones(4), np.array([0, 0, 16, 0]), 32))
    assert (problem.unavoidable_bytes - 32).tolist() == [1, 1 + 2, 1 + 2 + 4 + 16, 2 + 4 + 8]


def test_profiles_are_checked() -> None:
    for seconds, workspace, says in (
        (np.ones(2), np.zeros(3), "2 seconds for 3 ops"),
        (np.ones(3), np.zeros((3, 3)), "9 workspace bytes for 3 ops"),
        (np.array([0, 0, -1]), np.zeros(3), "'op2' costs"),
    ):
        with pytest.raises(InvalidProblem, match=says):
            Problem(unit_chain(1).graph, Profile(seconds, workspace))


def test_estimated_ops_stay_marked_in_a_file(tmp_path: Path) -> None:
    problem = Problem.from_dag([[], [0]], [1, 1], [1, 1])
    problem = Problem(problem.graph, Profile(problem.seconds, problem.workspace, 0, "measured", (1,)))
    problem.to_json(tmp_path / "p.json")
    assert Problem.from_json(tmp_path / "p.json").profile.estimated == (1,)
    with pytest.raises(InvalidProblem, match="estimated that are not there"):
        Problem(problem.graph, Profile(problem.seconds, problem.workspace, 0, "measured", (2,)))
