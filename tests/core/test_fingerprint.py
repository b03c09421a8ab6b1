"""Hashes of problems: equal where they should be, and not where a plan would no longer fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.networks import dags
from checkmate.core.fingerprint import fingerprints
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
