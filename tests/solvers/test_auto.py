"""The stages of `auto`, each of which can be left out."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from benchmarks.networks import dags
from checkmate.core.solution import Status
from checkmate.solvers.auto import STAGES, Portfolio, Stage
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.search.greedy import GRID, next_use
from tests.solvers.checks import by

auto = by("auto")

CHAIN = dags.unit_chain(8)


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_without_a_stage_what_is_found_still_holds(stage: str) -> None:
    """The optimum takes 22 seconds."""
    solution = auto(CHAIN, 5, time_limit=5, without=[stage])
    assert solution.cost >= 22
    assert solution.bound <= 22 * (1 + 1e-9)
    assert solution.peak <= 5


def test_without_all_stages_nothing_is_found() -> None:
    solution = auto(CHAIN, 5, without=[stage.name for stage in STAGES])
    assert (solution.status, solution.plan) == (Status.NOT_FOUND, None)
    with pytest.raises(ValueError, match="no stage 'magic'; its stages are known, next-use"):
        auto(CHAIN, 5, without=["magic"])


@pytest.mark.parametrize(("budget", "best"), [(4, 67), (5, 53), (6, 47)])
def test_a_chain_close_to_its_smallest_budget_is_solved(budget: int, best: int) -> None:
    """The exact model alone takes 37 to 93 seconds for these, and had all the time of `auto`."""
    solution = auto(dags.unit_chain(16), budget, time_limit=20)
    assert solution.cost == solution.bound == best


def test_patience_ends_the_look_for_a_first_plan_and_not_for_better_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes have one of twenty seconds, half of it for the first plan; of a patience of 0.4 they had 0.02."""
    passes = Mock(wraps=next_use)
    monkeypatch.setattr("checkmate.solvers.auto.next_use", passes)
    auto(CHAIN, 5, time_limit=20, patience=0.4)
    passes.assert_called_once()
    assert passes.call_args.args[0].clock.seconds == pytest.approx(1.0, rel=0.1)
    assert 0.1 < passes.call_args.kwargs["patience"] <= 0.2


@pytest.mark.parametrize(("passes", "looks"), [(1, 2), (len(GRID), 1)])
def test_passes_that_were_cut_short_run_again(monkeypatch: pytest.MonkeyPatch, passes: int, looks: int) -> None:
    """The second look has a quarter of the time that is left."""
    clocks = []

    def look(task: Task, incumbent: Incumbent, **patience: float) -> Remarks:
        clocks.append(task.clock.seconds)
        remarks = next_use(task, incumbent, **patience)
        return replace(remarks, details={**remarks.details, "passes": passes})

    monkeypatch.setattr("checkmate.solvers.auto.next_use", look)
    others = {stage.name for stage in STAGES} - {"next-use", "all passes"}
    auto(dags.unit_chain(40), 8, time_limit=100, without=others)
    assert len(clocks) == looks
    assert looks == 1 or clocks[1] == pytest.approx(0.25 * (100 - clocks[0]), rel=0.1)


def test_a_tiny_graph_with_many_states_leaves_time_for_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact search ends after its share: the other stages are begun all the same."""
    begun = []

    def watch(stage: Stage) -> Stage:
        def run(search: Portfolio, task: Task) -> None:
            begun.append(stage.name)
            stage.run(search, task)

        return replace(stage, run=run)

    monkeypatch.setattr("checkmate.solvers.auto.STAGES", tuple(map(watch, STAGES)))
    auto(dags.unit_chain(24), 11, time_limit=2)
    assert {"exact at once", "bound"} <= {*begun}
