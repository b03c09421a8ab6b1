"""The benchmark of a sharded step: how its graph is read, what policies are, its rows and what pages say of them."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.rows import read
from benchmarks.sharded import graph, planned
from benchmarks.sharded.policies import POLICIES, runs_of
from checkmate.core.problem import Problem
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.mesh import ALL_GATHER, REDUCE_SCATTER, Link
from checkmate.solvers.common.schedules import cost_of, peak_of

GATHER, SCATTER = (f"_c10d_functional.{name}.default" for name in (ALL_GATHER, REDUCE_SCATTER))
WAIT, PRODUCT, ADD = "_c10d_functional.wait_tensor.default", "aten.mm.default", "aten.add.Tensor"
LAYERS = 3
ROWS = read(planned.BENCHMARK.path)


def _document() -> dict[str, Any]:
    """A step of three layers on 4 ranks: x is looked up, then x = add(x, mm(x, w)) + x, one w for each layer."""
    nodes: list[dict[str, Any]] = []
    sizes: list[int] = []

    def node(name: str, op: str, inputs: list[str], made: int | None, phase: str = "fwd", **more: Any) -> str:
        """``made``: bytes; None: a view."""
        if made is None:
            storages = next(n for n in nodes if n["name"] == inputs[0])["storages"]
        else:
            storages = [len(sizes)]
            sizes.append(made)
        about = {"name": name, "op": op, "phase": phase, "inputs": inputs, "storages": storages, "flop": 0, **more}
        nodes.append(about)
        return name

    one = {"group": ["0"], "size": [4]}
    node("tokens", "placeholder", [], 8)
    for i in range(LAYERS + 1):
        node(f"w{i}", "placeholder", [], 200)
    node("cast0", "prims.convert_element_type.default", ["w0"], 100)
    node("gather0", GATHER, ["cast0"], 400, **one)
    node("wait0", WAIT, ["gather0"], 400)
    x = node("x0", "aten.embedding.default", ["wait0", "tokens"], 1000)
    for i in range(1, LAYERS + 1):
        node(f"cast{i}", "prims.convert_element_type.default", [f"w{i}"], 100)
        node(f"gather{i}", GATHER, [f"cast{i}"], 400, **one)
        node(f"wait{i}", WAIT, [f"gather{i}"], 400)
        node(f"mm{i}", PRODUCT, [x, f"wait{i}"], 1000)
        node(f"act{i}", "aten.sigmoid.default", [f"mm{i}"], 1000)
        half = node(f"half{i}", ADD, [x, f"act{i}"], 1000)
        x = node(f"x{i}", ADD, [half, f"act{i}"], 1000)
    node("logits", "aten.view.default", [x], None)
    grad = node("tangents", "placeholder", [], 1000, "input")
    for i in reversed(range(1, LAYERS + 1)):
        grad = node(f"dx{i}", PRODUCT, [grad, f"wait{i}", f"act{i}"], 1000, "bwd")
        node(f"dw{i}", PRODUCT, [grad, f"mm{i}", f"x{i - 1}"], 800, "bwd")
        node(f"scatter{i}", SCATTER, [f"dw{i}"], 200, "bwd", **one)
        node(f"done{i}", WAIT, [f"scatter{i}"], 200, "bwd")
    node("dw0", PRODUCT, [grad], 800, "bwd")
    node("scatter0", SCATTER, ["dw0"], 200, "bwd", **one)
    node("done0", WAIT, ["scatter0"], 200, "bwd")
    outputs = ["logits", None, *(f"done{i}" for i in range(LAYERS + 1))]
    return {"groups": {"0": {"size": 4, "rank": 0}}, "storage_bytes": sizes, "nodes": nodes, "outputs": outputs}


def _read(folder: Path, document: dict[str, Any]) -> Problem:
    path = folder / "graph.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return graph.read(path, reach=Link(latency=1.0, rate=100.0))


@pytest.fixture
def step(tmp_path: Path) -> Problem:
    return _read(tmp_path, _document())


def test_views_and_waits_are_no_ops_and_the_loss_is_one(step: Problem) -> None:
    """Seconds are of the traffic and of the bytes."""
    ops = {op.name: op for op in step.graph.ops}
    assert len(ops) == (2 + 1) + LAYERS * (2 + 4) + 1 + LAYERS * 3 + 2
    names = [value.name for value in step.graph.values]
    assert ([names[v] for v in ops["tangents"].inputs], ops["tangents"].phase) == ([f"x{LAYERS}"], "backward")
    assert step.graph.forward_length == step.graph.ops.index(ops["tangents"])
    assert [names[v] for v in step.graph.outputs] == [f"scatter{i}" for i in range(LAYERS + 1)]
    assert step.resident == 8 + 200 * (LAYERS + 1)
    seconds = dict(zip(ops, step.seconds, strict=True))
    assert seconds["gather1"] == pytest.approx(1 + 400 * 3 / 4 / 100)
    assert seconds["scatter1"] == pytest.approx(1 + 800 * 3 / 4 / 100)
    reads_what_it_picks = DEVICES["h100"].seconds(0, "bfloat16", 2000)
    assert seconds["act1"] == seconds["x0"] == reads_what_it_picks


def test_all_gathers_of_parameters_may_run_again_and_no_other_collective(tmp_path: Path) -> None:
    document = _document()
    plain = _read(tmp_path, document)
    nodes = {node["name"]: node for node in document["nodes"]}
    nodes["cast1"]["inputs"] = ["tokens"]  # no parameter: it has no gradient
    nodes["cast2"]["inputs"] = ["w2", "w3"]  # two inputs: more than a cast
    nodes["cast3"]["inputs"] = ["x2"]  # an activation
    changed = _read(tmp_path, document)
    for problem, again in ((plain, {f"gather{i}" for i in range(LAYERS + 1)}), (changed, {"gather0"})):
        collectives = {op.name: op.pinned for op in problem.graph.ops if op.target.startswith("_c10d")}
        assert {name for name, pinned in collectives.items() if pinned is None} == again
    assert {op.name for op in plain.graph.ops if op.pinned} == {"tangents", *(f"scatter{i}" for i in range(LAYERS + 1))}


def test_policies_keep_what_they_say(step: Problem) -> None:
    names = [op.name for op in step.graph.ops]
    gathered = {f"{what}{i}" for what in ("cast", "gather") for i in range(1, LAYERS + 1)}
    read = {kind: {f"{kind}{i}" for i in range(1, LAYERS + 1)} for kind in ("act", "mm")}  # by the backward; no halves
    of_layers = {"no": set(), "selective": read["act"], "full": read["act"] | read["mm"]}
    for policy, (gathering, checkpointing) in POLICIES.items():
        R = runs_of(step, policy)
        assert R.sum(axis=0).max() <= 2
        again = {names[k] for k in np.flatnonzero(R.sum(axis=0) > 1)}
        assert again == of_layers[checkpointing] | (gathered if gathering == "twice" else set()), policy


@pytest.mark.long
def test_letting_go_of_more_takes_less_room_and_more_time() -> None:
    problem = graph.read()
    R = {policy: runs_of(problem, policy) for policy in POLICIES}
    grid = [
        [f"gather {times}, {what} checkpointing" for what in ("no", "selective", "full")] for times in ("once", "twice")
    ]
    for line in (*grid, *zip(*grid, strict=True)):  # each lets go of more than the one before
        for before, after in itertools.pairwise(R[policy] for policy in line):
            assert cost_of(problem, before) < cost_of(problem, after)
            assert peak_of(problem, before) > peak_of(problem, after)
    assert peak_of(problem, R["gather once, no checkpointing"]) == problem.keep_all_peak


def test_the_graph_is_what_its_source_says() -> None:
    problem = graph.read()
    targets = [op.target for op in problem.graph.ops]
    assert targets.count(GATHER) == targets.count(SCATTER) == 291
    gathered = sum(int(problem.sizes[op.outputs[0]]) for op in problem.graph.ops if op.target == GATHER)
    assert 16.0e9 < gathered < 16.1e9  # two bytes for each of 8.03e9 parameters
    between, of_layers = graph.layers(problem)
    assert len(between) == 32
    assert problem.graph.ops[of_layers[-1]].outputs == (between[-1],)


def test_the_committed_document_is_of_the_committed_rows() -> None:
    assert planned.BENCHMARK.path.with_suffix(".md").read_text() == planned.markdown(ROWS)


def test_rows_of_policies_are_what_they_are_now() -> None:
    found = {(row["link"], row["method"]): row for row in planned.in_order(ROWS)}
    seconds = ("keep_all_seconds", "cost_ratio", "waited")
    for policy in ("gather once, selective checkpointing", "gather twice, full checkpointing"):
        (row,) = planned.rows_of(policy, "network", 0.0, 0.0)
        committed = found["network", policy]
        assert (committed["peak"], committed["ops"]) == (row["peak"], row["ops"])
        assert [committed[key] for key in seconds] == pytest.approx([row[key] for key in seconds], rel=1e-9)


def test_beside_other_ops_a_gather_reads_the_parameter(step: Problem) -> None:
    """Its casts are within it: the same seconds together, and the cast shard's bytes while it is under way."""
    problem = planned.beside(step)
    ops = {op.name: op for op in problem.graph.ops}
    assert {name for name, op in ops.items() if op.link} == {
        f"{what}{i}" for what in ("gather", "scatter") for i in range(LAYERS + 1)
    }
    assert not any(name.startswith("cast") for name in ops)
    for i in range(LAYERS + 1):
        assert [problem.graph.values[v].name for v in ops[f"gather{i}"].inputs] == [f"w{i}"]
        assert problem.workspace[problem.graph.ops.index(ops[f"gather{i}"])] == 100
    assert problem.keep_all_cost == pytest.approx(step.keep_all_cost)
    assert (problem.resident, len(problem.graph.outputs)) == (step.resident, len(step.graph.outputs))


def test_beside_other_ops_ours_is_as_fast_as_each_choice_that_fits() -> None:
    rows = planned.in_order(ROWS)
    choices, ours = ([row for row in rows if (row["method"] == planned.AUTO) is auto] for auto in (False, True))
    budgets = [int(budget * planned.GB) for budget in planned.BUDGETS]
    assert {(row["link"], row["method"]) for row in choices} == {*itertools.product(graph.LINKS, POLICIES)}
    assert {(row["link"], row["budget"]) for row in ours} == {*itertools.product(graph.LINKS, budgets)}
    for row in ours:
        fit = [one["cost_ratio"] for one in choices if one["link"] == row["link"] and one["peak"] <= row["budget"]]
        assert row["cost_ratio"] <= min(fit, default=float("inf"))
        assert row["peak"] <= row["budget"]
