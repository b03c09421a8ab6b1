"""Hashes of problems: equal where they should be, and not where a plan would no longer fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.fingerprint import fingerprints
from checkmate.core.problem import Problem


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


PLAIN = dags.vgg(2)
STEP = np.eye(len(PLAIN.seconds))[3]


@pytest.mark.parametrize(
    ("changed", "differ"),
    [
        (_changed(op={"target": "other"}), {"structure"}),
        (_changed(op={"pinned": "draws random numbers"}), {"structure"}),
        (dags.vgg(2, batch=3), {"sizes", "costs"}),
        (_changed(profile={"seconds": PLAIN.seconds * (1 + 3e-16 * STEP)}), {"costs"}),  # the last digit
        (_changed(profile={"workspace_bytes": PLAIN.workspace + STEP.astype(int)}), {"sizes"}),  # a byte
    ],
    ids=["target", "pinned", "batch", "cost", "workspace"],
)
def test_a_change_shows_where_it_matters(changed: Problem, differ: set[str]) -> None:
    found, plain = fingerprints(changed), fingerprints(PLAIN)
    assert {name for name in ("structure", "sizes", "costs") if getattr(found, name) != getattr(plain, name)} == differ
