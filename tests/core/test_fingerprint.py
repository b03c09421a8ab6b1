"""Hashes of problems: equal where they should be, and not where a plan would no longer fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.networks import dags
from checkmate.core.fingerprint import fingerprints, renumbered, same_ops
from checkmate.core.problem import Problem

PLAIN = dags.vgg(2)


def _changed(op: dict[str, Any] | None = None, **costs: Any) -> Problem:
    first, *others = PLAIN.graph.ops
    ops = (replace(first, **op or {}), *others)
    return Problem(replace(PLAIN.graph, ops=ops), replace(PLAIN.profile, **costs))


def test_a_change_shows_where_it_matters_and_nowhere_else() -> None:
    step = np.eye(len(PLAIN.seconds))[3]
    for changed, differ in (
        (dags.vgg(2), set()),
        (_changed(op={"name": "another", "where": "there"}), set()),
        (_changed(resident_bytes=7, source="x"), set()),
        (_changed(op={"target": "other"}), {"structure"}),
        (_changed(op={"pinned": "draws random numbers"}), {"structure"}),
        (dags.vgg(2, batch=3), {"sizes", "costs"}),
        (_changed(seconds=PLAIN.seconds * (1 + 3e-16 * step)), {"costs"}),  # the last digit
        (_changed(workspace_bytes=PLAIN.workspace + step.astype(int)), {"sizes"}),  # a byte
    ):
        found, plain = asdict(fingerprints(changed)), asdict(fingerprints(PLAIN))
        assert {name for name in found if found[name] != plain[name]} == differ, differ


def test_ops_in_another_order_are_those_of_the_same_step_and_other_ops_are_not() -> None:
    graph = PLAIN.graph
    reads = {(k - 1, k) for k, op in enumerate(graph.ops) for v in op.inputs if graph.values[v].producer == k - 1}
    for k in range(1, len(graph.ops)):
        if (k - 1, k) in reads or graph.ops[k - 1].phase != graph.ops[k].phase:
            continue
        order = [*range(len(graph.ops))]
        order[k - 1 : k + 1] = [k, k - 1]
        other = Problem(graph.in_order(order), PLAIN.profile)
        assert not same_ops(other, PLAIN)
        ops, values = renumbered(other, PLAIN)
        assert [other.graph.ops[i].name for i in ops] == [op.name for op in graph.ops]
        assert [other.graph.values[v].name for v in values] == [value.name for value in graph.values]
    for changed in ({"target": "other"}, {"name": "another"}, {"pinned": "draws random numbers"}):
        one = _changed(op=changed)
        assert (renumbered(one, other), same_ops(one, PLAIN)) == (None, "name" in changed)
    assert renumbered(dags.vgg(3), PLAIN) is None
