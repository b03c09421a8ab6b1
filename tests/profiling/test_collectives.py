"""What collectives cost: by hand, by what others measured, off a table, and by two ranks that measure over gloo."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx

from benchmarks.sharded.graph import fitted, table
from checkmate.capture.sharded.collectives import EXCHANGES, GATHER_AGAIN
from checkmate.core import files
from checkmate.core.files import DATABASE
from checkmate.core.graph import Graph, Op, Value
from checkmate.profiling import measure, mesh
from checkmate.profiling.cost_cache import Conditions, OpCost, conditions_on, load, store
from checkmate.profiling.data_sheets import DEVICES, Device
from checkmate.profiling.mesh import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER
from checkmate.profiling.roofline import roofline_seconds
from tests.support.processes import start_ranks
from tests.support.sampling import in_turn


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (1, 2, 8, 64, None):
        both = mesh.traffic(REDUCE_SCATTER, 1e9, ranks) + mesh.traffic(ALL_GATHER, 1e9, ranks)
        assert mesh.traffic(ALL_REDUCE, 1e9, ranks) == both
    assert mesh.traffic(ALL_REDUCE, 1e9, 1) == 0
    assert mesh.traffic(ALL_GATHER, 1e9, None) >= mesh.traffic(ALL_GATHER, 1e9, 10**6)


@in_turn(collective=COLLECTIVES, latency=[0.0, 3e-5])
def test_a_fit_finds_the_link_that_made_the_points(collective: str, latency: float) -> None:
    link = mesh.Link(latency, 2e10)
    points = [(2.0**n, link.seconds(collective, 2.0**n, 4)) for n in range(12, 28, 3)]
    found = fitted(collective, points, 4)
    assert found.rate == pytest.approx(link.rate, rel=1e-6)
    assert found.latency == pytest.approx(latency, abs=1e-12)


def test_a_fit_has_no_latency_below_zero_and_sizes_are_positive() -> None:
    """Seconds that grow faster than bytes: a line through them would begin below zero."""
    found = fitted(ALL_GATHER, [(1e6, 1e-4), (2e6, 4e-4), (4e6, 1.6e-3)], 2)
    assert found.latency == 0.0
    assert found.rate > 0
    for points in ([(1e6, 1e-3)], [(1e6, 1e-3), (1e6, 2e-3)], [(1e6, 2e-3), (2e6, 1e-3)]):  # no link explains them
        with pytest.raises(ValueError, match="rate"):
            fitted(ALL_GATHER, points, 2)
    with pytest.raises(ValueError, match="positive"):
        mesh.measure_collectives(sizes=[4096, 0])


def test_a_table_gives_back_its_points_and_lines_between() -> None:
    points = table("colls8_8")["1", 8][ALL_GATHER]
    for (low, short), (high, long) in itertools.pairwise(points):
        assert mesh.interpolated(points, low) == pytest.approx(short)
        assert mesh.interpolated(points, (low + high) / 2) == pytest.approx((short + long) / 2)
    assert mesh.interpolated(points, points[0][0] / 8) == points[0][1]
    (_, before), (last, took) = points[-2:]
    assert mesh.interpolated(points, 1.5 * last) == pytest.approx(took + (took - before))


def test_an_estimate_for_nvlink_is_near_what_others_have() -> None:
    """All-gathers of 8 ranks of a node, of 8 MiB and more: no constant was set by them. Each device has a link."""
    link = mesh.link_of(DEVICES["h100"])
    for whole, seconds in table("colls8_8")["1", 8][ALL_GATHER]:
        assert link.seconds(ALL_GATHER, whole, 8) == pytest.approx(seconds, rel=0.05)
    assert mesh.link_of(DEVICES["a100"]).rate < mesh.link_of(DEVICES["h100"]).rate
    with pytest.raises(ValueError, match="positive"):
        Device("none", {"float32": 1.0}, 1.0, 0.0, link=0.0)


SIZES = (1000, 2**14, 2**17)
CPU = torch.device("cpu")


def _functional(name: str, *args: Any, bytes_in: int, bytes_out: int) -> tuple[fx.Node, fx.Node]:
    """A collective of float32 in a graph, and its wait."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(bytes_in // 4)
    op = getattr(torch.ops._c10d_functional, name).default
    collective = graph.call_function(op, (x, *args))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (collective,))
    collective.meta["val"] = wait.meta["val"] = torch.empty(bytes_out // 4)
    return collective, wait


def _nodes(group: str, ranks: int) -> dict[str, fx.Node]:
    whole, part = 2**13, 2**13 // ranks
    return {
        ALL_GATHER: _functional(ALL_GATHER, ranks, group, bytes_in=part, bytes_out=whole)[0],
        REDUCE_SCATTER: _functional(REDUCE_SCATTER, "sum", ranks, group, bytes_in=whole, bytes_out=part)[0],
        ALL_REDUCE: _functional(ALL_REDUCE, "sum", group, bytes_in=whole, bytes_out=whole)[0],
    }


def _rank(rank: int, meeting: str, out: str) -> None:
    """What one of two ranks does: measure, measure again, alone in a group, and look up what a step has."""
    os.environ[files.VARIABLE] = f"{out}/costs of {rank}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found = mesh.measure_collectives(sizes=SIZES)
    kept = load(conditions_on(CPU))
    if rank:  # whose file is lost asks the first rank's, and does not measure alone
        Path(os.environ[files.VARIABLE], DATABASE).unlink()
    again = mesh.measure_collectives(sizes=SIZES[:2])
    anew = mesh.measure_collectives(sizes=SIZES[:1], cache=False)
    alone = [dist.new_group([r]) for r in (0, 1)][rank]
    of_one = mesh.measure_collectives(alone, sizes=SIZES[:2], cache=False)
    world: Any = dist.group.WORLD
    nodes = _nodes(world.group_name, 2)
    store(conditions_on(CPU), kept)
    by_table = mesh.measured_collectives([None, *nodes.values()], lambda node: load(conditions_on(CPU)))
    told = {
        "points": found.points,
        "same": again.points == found.points,
        "anew": {name: len(of) for name, of in anew.points.items()},
        "kept": sorted(kept),
        "of one": [of_one.ranks, sorted(of_one.points)],
        "by table": list(by_table.items()),
        "interpolated": [found.seconds(name, 2**13) for name in nodes],
        "of all-reduce": roofline_seconds(nodes[ALL_REDUCE], DEVICES["h100"]),
        "layout": str(mesh.layout_of()),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without ranks")
def test_two_ranks_measure_together(tmp_path: Path) -> None:
    start_ranks(_rank, 2, str(tmp_path / "meeting"), str(tmp_path))
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for one in told:
        assert one["layout"] == "collectives by gloo, 2 ranks, 2 on a host"
        assert sorted(one["points"]) == sorted(COLLECTIVES)
        for points in one["points"].values():
            assert [whole for whole, _ in points] == [1000, 2**14, 2**17]
            assert all(seconds > 0 for _, seconds in points)
        assert len(one["kept"]) == 3 * len(SIZES)
        assert one["same"], "what was measured is measured again"
        assert one["anew"] == dict.fromkeys(COLLECTIVES, 1)
        assert one["of one"] == [1, sorted(COLLECTIVES)]
        assert one["by table"] == [[1 + i, seconds] for i, seconds in enumerate(one["interpolated"])]
    assert told[0]["points"] == told[1]["points"], "the ranks have the same costs, those of the slowest"
    h100 = DEVICES["h100"]
    assert told[0]["of all-reduce"] == pytest.approx(28e-6 + 2 * 2**13 / 2 / (0.8 * h100.link))


def test_collectives_of_no_group_here_are_estimated_by_the_ranks_that_they_name() -> None:
    """In a step that was captured elsewhere; an all-reduce then counts as one among many."""
    h100 = DEVICES["h100"]
    of = {name: roofline_seconds(node, h100) for name, node in _nodes("elsewhere", 4).items()}
    assert of[ALL_GATHER] == of[REDUCE_SCATTER] == pytest.approx(28e-6 + 2**13 * 3 / 4 / (0.8 * h100.link))
    assert of[ALL_REDUCE] == pytest.approx(28e-6 + 2 * 2**13 / (0.8 * h100.link))
    launch, wait = _functional(ALL_GATHER, 4, "elsewhere", bytes_in=1024, bytes_out=4096)
    assert mesh.is_wait(wait)
    assert mesh.collective_of(wait) is None
    assert roofline_seconds(wait, h100) == h100.latency
    nodes = [*_nodes("elsewhere", 4).values(), wait, None]
    assert mesh.measured_collectives(nodes, lambda node: {}) == {}
    for joined in (EXCHANGES[ALL_GATHER], GATHER_AGAIN):  # one op with its wait
        launch.target = joined
        assert mesh.collective_of(launch) == mesh.Collective(ALL_GATHER, 4096, 4)


def test_collectives_of_a_step_cost_what_was_measured_or_an_estimate_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the ops of this machine take three times their estimates says nothing of what links do."""
    nodes = list(_nodes("elsewhere", 4).values())
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    x.meta["val"] = product.meta["val"] = torch.empty(8, 8)
    laptop = DEVICES["laptop"]
    measured = 3 * roofline_seconds(product, laptop)
    given = Value("x", 256, None, "input")
    made = [Value(f"v{k}", 256, k) for k in range(4)]
    ops = [Op(f"op{k}", "op", (0,), (1 + k,)) for k in range(4)]
    joint: Any = SimpleNamespace(graph=Graph((*ops,), (given, *made), (4,)), nodes=[product, *nodes], resident_bytes=0)
    monkeypatch.setattr(measure, "candidates", lambda joint: [])
    profile = measure.fill(joint, [OpCost(measured, 256), None, None, None], "measured", {2: 0.5})
    estimates = [roofline_seconds(node, laptop) for node in nodes]
    assert profile.seconds.tolist() == [measured, estimates[0], 0.5, estimates[2]]
    assert profile.estimated == (1, 3)
    assert profile.source == "measured; 2 ops estimated"


def test_a_group_has_only_what_was_measured_on_one_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    here, there = mesh.Layout("nccl", 8, 8), mesh.Layout("nccl", 8, 1)
    conditions = Conditions("cuda some GPU", "2.15.0", 1)
    costs: dict[str, OpCost | None] = {
        here.key(ALL_GATHER, 2**20): OpCost(1e-3, 2**20),
        here.key(ALL_GATHER, 2**10): OpCost(1e-4, 2**10),
        there.key(ALL_GATHER, 2**20): OpCost(1e-2, 2**20),
        "aten.mm.default (…)": OpCost(1.0, 1),
    }
    store(conditions, costs)
    assert here.table(load(conditions)).points == {ALL_GATHER: ((2**10, 1e-4), (2**20, 1e-3))}
    other = there.table(load(conditions))
    assert other.points == {ALL_GATHER: ((2**20, 1e-2),)}
    assert other.seconds(ALL_GATHER, 2**20) is None, "one point is no line"
