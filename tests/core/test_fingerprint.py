"""Hashes of problems: equal where they should be, and not where a plan would no longer fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.networks import dags
from checkmate.core.fingerprint import fingerprints
from checkmate.core.problem import Problem, Profile


def _changed(**changes: object) -> Problem:
    problem = dags.vgg(2)
    graph, profile = problem.graph, problem.profile
    if "op" in changes:
        graph = replace(graph, ops=(replace(graph.ops[0], **changes["op"]), *graph.ops[1:]))
    if "profile" in changes:
        profile = replace(profile, **changes["profile"])
    return Problem(graph, profile)


def test_equal_problems_have_equal_hashes() -> None:
    assert fingerprints(dags.vgg(2)) == fingerprints(dags.vgg(2))
    assert fingerprints(_changed(op={"name": "another", "where": "there"})) == fingerprints(dags.vgg(2))
    assert fingerprints(_changed(profile={"resident_bytes": 7, "source": "x"})) == fingerprints(dags.vgg(2))


@pytest.mark.parametrize("change", [{"target": "other"}, {"pinned": "draws random numbers"}])
def test_another_op_is_another_structure(change: dict[str, str]) -> None:
    found, plain = fingerprints(_changed(op=change)), fingerprints(dags.vgg(2))
    assert found.structure != plain.structure
    assert (found.sizes, found.costs) == (plain.sizes, plain.costs)


def test_another_batch_has_other_sizes_and_costs_and_the_same_structure() -> None:
    small, large = fingerprints(dags.vgg(4, batch=2)), fingerprints(dags.vgg(4, batch=3))
    assert small.structure == large.structure
    assert small.sizes != large.sizes
    assert small.costs != large.costs


def test_the_last_digit_of_a_cost_and_each_byte_of_workspace_count() -> None:
    problem = dags.vgg(2)
    seconds, workspace = problem.seconds.copy(), problem.workspace.copy()
    seconds[3] *= 1 + 3e-16
    workspace[3] += 1
    changed = Problem(problem.graph, Profile(seconds, workspace, problem.resident))
    assert fingerprints(changed).costs != fingerprints(problem).costs
    assert fingerprints(changed).sizes != fingerprints(problem).sizes
