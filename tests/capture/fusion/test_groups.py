"""Groups of ops on random graphs: none needs its own results by way of others, nor do two wait for one another."""

from __future__ import annotations

import random
from collections.abc import Iterable

import networkx as nx
import pytest
import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode

from checkmate.capture.fusion import groups, remade
from checkmate.capture.fusion.groups import is_member, maker, nbytes, read_from
from checkmate.capture.fusion.remade import make_again, to_make_again

aten = torch.ops.aten


def _random_graph(seed: int, ops: int = 40) -> fx.Graph:
    """A forward of pointwise ops, sums and products, and a backward that reads what it made."""
    draw, graph, mode = random.Random(seed), fx.Graph(), FakeTensorMode()
    with mode:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(8, 8)
        made = [x]
        for _ in range(ops):
            target = draw.choice(
                (aten.mul.Tensor, aten.add.Tensor, aten.add.Tensor, aten.mm.default, aten.sum.dim_IntList)
            )
            args: tuple[object, ...] = tuple(draw.sample(made[-8:] * 2, 2))
            if target is aten.sum.dim_IntList:
                args = (args[0], [0], True)
            elif target is aten.mm.default:
                args = tuple(a if a.meta["val"].shape[0] == 8 else x for a in args)  # type: ignore[attr-defined]
            node = graph.call_function(target, args)
            node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
            made.append(node)
    graph.output(tuple(made[-3:]))
    return graph


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _is_good_partition(ops: Iterable[fx.Node], parts: list[list[fx.Node]]) -> bool:
    """Tell whether what is left of a graph has no cycle once each part is one op."""
    home = {node: i for i, part in enumerate(parts) for node in part}
    name = {node: home.get(node, node) for node in ops}
    reads = nx.DiGraph((name[maker(a)], name[n]) for n in name for a in n.all_input_nodes if maker(a) in name)
    reads.remove_edges_from([*nx.selfloop_edges(reads)])
    return nx.is_directed_acyclic_graph(reads)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("reductions", [False, True])
def test_groups_do_not_wait_for_one_another(seed: int, reductions: bool) -> None:
    ops = _ops(_random_graph(seed))
    parts = groups.convex(ops, lambda node: is_member(node, reductions=reductions))
    assert sorted(node for part in parts for node in part) == [n for n in ops if is_member(n, reductions=reductions)]
    assert _is_good_partition(ops, parts)
    for behind_large in (False, True):
        for most in (0, groups.limit(ops), 10**9):
            smaller = groups.cut(parts, most, behind_large=behind_large)
            assert all(any({*part} <= {*whole} for whole in parts) for part in smaller)
            assert _is_good_partition(ops, smaller)


def test_as_many_ops_as_may_are_in_a_group() -> None:
    """No two groups that read one another could be one, by trying all pairs."""
    joined = 0
    for seed in range(10):
        ops = _ops(_random_graph(seed, ops=16))
        parts = groups.convex(ops, lambda node: is_member(node, reductions=True))
        joined += sum(len(part) > 1 for part in parts)
        for i, part in enumerate(parts):
            for other in parts[:i]:
                reads = any(maker(a) in {*other} for node in part for a in node.all_input_nodes)
                rest = [p for p in parts if p not in (part, other)]
                assert not (reads and _is_good_partition(ops, [*rest, part + other]))
    assert joined > 10


@pytest.mark.parametrize("seed", range(30))
def test_what_another_op_of_the_forward_reads_is_not_made_again(seed: int) -> None:
    graph = _random_graph(seed)
    ops = _ops(graph)
    forward, backward = ops[:25], ops[25:]

    def joins(node: fx.Node) -> bool:
        return is_member(node, reductions=True)

    parts = groups.convex(forward, joins)
    home = {node: i for i, part in enumerate(parts) for node in part}
    moved = {node: nbytes(node) * (2 if _stays_within(node, forward, home) else 1) + 1 for node in forward}
    before = sum(moved[node] for node in forward if {*node.users} - {*forward})
    copies = make_again(backward, joins, to_make_again(parts, backward, joins))
    for original in copies.values():
        assert _stays_within(original, forward, home)
    graph.lint()
    assert sum(moved[node] for node in forward if {*node.users} - {*forward}) <= before


def _stays_within(node: fx.Node, forward: list[fx.Node], home: dict[fx.Node, int]) -> bool:
    """Tell whether no op of the forward reads it beside those of its group."""
    return all(home.get(user) == home.get(node, -1) for user in node.users if user in forward)


def test_copies_are_made_where_they_save_bytes() -> None:
    assert sum(bool(_copies(seed)) for seed in range(30)) > 5


def _copies(seed: int) -> remade.Copies:
    ops = _ops(_random_graph(seed))
    parts = groups.convex(ops[:25], lambda node: is_member(node, reductions=True))
    remade = to_make_again(parts, ops[25:], lambda node: is_member(node, reductions=True))
    return make_again(ops[25:], lambda node: is_member(node, reductions=True), remade)


def test_results_that_others_read_are_known() -> None:
    graph = _random_graph(3)
    ops = _ops(graph)
    for part in groups.convex(ops, lambda node: is_member(node, reductions=True)):
        read = {node for node in part if any(user not in part for user in node.users)}
        assert {*read_from(part)} == read
