"""Pictures by Matplotlib, by the data of their artists. Colours and places of words are not held here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.look.timeline import timeline
from checkmate.units import format_bytes
from tests.look.plans import frontier, keep_all, no_cost, on_links
from tests.look.test_timeline import _chain
from tests.look.test_transfers import SOLUTION as SENDS
from tests.project.test_import_without_torch import BLOCK, _python
from tests.support import oracle
from tests.support.by_hand import solution_of

matplotlib: Any = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt: Any = pytest.importorskip("matplotlib.pyplot")
plot: Any = checkmate.plot
AGAIN: Any = solution_of(dags.unit_chain(2), (4, 0), budget=9)  # op 0 of five runs again before the last


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def _drawn(ax: Any) -> Any:
    ax.figure.canvas.draw()
    return ax


def _labels(ax: Any) -> list[str]:
    return ax.get_legend_handles_labels()[1]


def test_the_schedule_shows_r_and_s() -> None:
    ax = _drawn(plot.schedule(AGAIN))
    first, again = ax.collections
    assert first.get_offsets().tolist() == [[k, k] for k in range(5)]
    assert again.get_offsets().tolist() == [[0, 4]]  # op 0 along, stage 4 down
    assert np.array_equal(ax.images[0].get_array(), AGAIN.schedule.S)  # a value for each op, in their order
    assert _labels(ax) == ["first run", "run again (1 times)"]
    assert ax.get_title() == "by hand: 1 of 5 ops run again, 1 times in all"
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines] == [(2.5, 0), (0, 2.5)]
    problem = oracle.random_problem(3)  # ops of several values
    solution = keep_all(problem)
    cells = plot.schedule(solution).images[0].get_array()
    for k, op in enumerate(problem.graph.ops):
        assert np.array_equal(cells[:, k].astype(bool), solution.schedule.S[:, list(op.outputs)].any(axis=1))


def test_the_areas_add_up_to_the_bytes_that_the_simulator_sees() -> None:
    solution = keep_all(_chain())
    line = timeline(solution.plan, solution.problem)
    for by in ("role", "module"):
        ax = _drawn(plot.memory(solution, by=by))
        areas = [area for area in ax.collections if area.get_label() in line.by(by)]
        assert [area.get_label() for area in areas] == list(line.by(by))
        assert areas[-1].get_paths()[0].vertices[:, 1].max() == solution.peak
        (outline,) = [drawn for drawn in ax.lines if len(drawn.get_ydata()) == len(line.moments) + 1]
        assert outline.get_ydata()[:-1].tolist() == list(simulator.simulate(solution.plan, solution.problem).bytes_at)
        assert outline.get_xdata().tolist() == [0.0, 1.0, 3.0, 7.0, 15.0]
    for draw in (plot.schedule, plot.memory):
        _drawn(draw(no_cost()))


def test_budget_and_peak_are_named() -> None:
    """A budget far above does not flatten the picture; without transfers there is nothing below it."""
    solution = replace(keep_all(_chain()), budget=200)
    ax = plot.memory(solution)
    (budget,) = [drawn for drawn in ax.lines if drawn.get_label() == "budget 200 B"]
    assert set(budget.get_ydata()) == {200}
    level, peak = ax.texts[-2:]
    assert (level.get_text(), level.xy) == ("budget 200 B", (0.0, 200))  # at the left, away from the peak
    assert peak.get_text() == f"peak {format_bytes(solution.peak)}\nd\nnet.py:3"
    assert peak.xy == (11.0, solution.peak)  # the middle of the last op, from 7 s to 15 s
    assert ax.get_title() == f"plain PyTorch: peak {format_bytes(solution.peak)}\nstep 15.0 s"
    ax = plot.memory(AGAIN)
    assert ax.get_title() == "planned within 9 B (by hand): peak 3 B\nstep 6.0 s (+20.00% recomputation)"
    words = {text.get_text() for text in ax.get_legend().get_texts()}
    assert {"made again: recomputed", "activations: made by the forward", "budget 9 B, above this picture"} <= words
    assert ax.get_ylim()[1] < 2 * 3
    assert len(ax.figure.axes) == 1


def test_a_plan_beside_the_drawn_one_is_named_in_the_legend_and_the_drawn_one_has_an_end() -> None:
    fast = keep_all(AGAIN.problem)
    for one, other, called in ((AGAIN, fast, "plain PyTorch"), (fast, AGAIN, "planned within 9 B (by hand)")):
        ax = _drawn(plot.memory(one, compare=[other]))
        (line,) = [drawn for drawn in ax.lines if drawn.get_label() == f"{called}: peak {other.peak} B"]
        assert line.get_ydata()[:-1].tolist() == list(simulator.simulate(other.plan, other.problem).bytes_at)
        assert ax.get_xlim()[1] == AGAIN.cost > fast.cost
        assert [text.xy[0] for text in ax.texts if text.get_text() == "end"] == [fast.cost] * (one is fast)


def _bars(lanes: Any) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of each bar, by its name."""
    bars = {bar.get_label(): bar.get_paths() for bar in lanes.collections}
    return {name: [tuple(path.get_extents().intervalx) for path in paths] for name, paths in bars.items()}


def test_links_are_strips_under_the_memory() -> None:
    for given in (False, True):
        ax = _drawn(plot.memory(SENDS, ax=plt.figure().add_axes((0.1, 0.4, 0.6, 0.5)) if given else None))
        assert ax.get_title().endswith("6.0 s (+20.00% recomputation and waiting)")
        lanes, there = ax.child_axes if given else ax.figure.axes[1:]
        assert _bars(lanes) == {"sent": [(1.0, 2.0)], "fetched": [(3.0, 5.0)], "the step waits": [(4.0, 5.0)]}
        (area,) = there.collections
        assert area.get_paths()[0].get_extents().intervaly.tolist() == [0.0, 4.0]
    solution = on_links()
    uses = timeline(solution.plan, solution.problem).lanes["gathers"]
    (lanes,) = _drawn(plot.memory(solution)).figure.axes[1:]
    stalls = [use.stall for use in uses if use.waited]
    assert _bars(lanes) == {"gathers": [(use.begin, use.end) for use in uses], "the step waits": stalls}


def test_each_method_is_a_line_of_its_plans_and_none_is_where_that_is_proven() -> None:
    ax = _drawn(plot.frontier(frontier()))
    auto, keep_all = [line for line in ax.lines if not line.get_label().startswith("_")]
    assert auto.get_xydata().tolist() == [[3, 45], [4, 26], [6, 21], [10, 17]]  # as known of this chain
    assert keep_all.get_xydata().tolist() == [[10, 17]]
    assert [line.get_linestyle() for line in (auto, keep_all)] == ["None"] * 2  # a line would read as measured
    assert _labels(ax) == ["auto (4 of 5 budgets)", "checkpoint-all (1 of 5 budgets)", "proven: no schedule is here"]
    (shade,) = ax.collections
    path = shade.get_paths()[0]
    for row in frontier():
        if row.peak is not None:
            assert not path.contains_point((row.peak - 0.01, row.cost + 0.01))
            assert path.contains_point((row.budget - 0.01, row.bound - 0.01))
    assert path.contains_point((1.99, ax.get_ylim()[1] - 0.01))  # nothing fits 2 bytes, whatever it costs
    assert path.contains_point((3.01, 25.9))  # the bound of 4 bytes holds for all smaller peaks
    assert not path.contains_point((4.01, 25.9))
    assert path.contains_point((ax.get_xlim()[1] - 0.01, 16.9))  # each op runs once at least


def test_methods_without_a_plan_stand_in_the_title_of_the_legend() -> None:
    ax = plot.frontier(row for row in frontier() if row.budget in (3, 4, 6))
    assert ax.get_legend().get_title().get_text().endswith(": checkpoint-all")
    ax = _drawn(plot.frontier(checkmate.frontier(dags.unit_chain(4), [1, 2], jobs=1)))
    assert _labels(ax) == ["proven: no schedule is here"]
    assert ax.get_legend().get_title().get_text() == "no plan within any of these budgets: auto"


def test_each_draws_on_the_axes_given() -> None:
    figure, axes = plt.subplots(1, 3)
    drawn = [plot.schedule(AGAIN, ax=axes[0]), plot.memory(AGAIN, ax=axes[1]), plot.frontier(frontier(), ax=axes[2])]
    assert drawn == list(axes)
    own = figure.subfigures(1, 2)[0].subplots()
    assert plot.memory(SENDS, ax=own) is own
    assert plt.get_fignums() == [figure.number]
    for wrong in (axes, figure):
        with pytest.raises(TypeError, match=r"ax is one Axes to draw on, such as plt\.subplots\(\)\[1\], not"):
            plot.memory(AGAIN, ax=wrong)


def test_what_cannot_be_drawn_is_refused() -> None:
    nothing = checkmate.solve(dags.unit_chain(4), 1)
    for draw in (plot.schedule, plot.memory, lambda none: plot.memory(AGAIN, compare=[none])):
        with pytest.raises(ValueError, match="There is no plan to draw: No schedule fits 1 B"):
            draw(nothing)
    with pytest.raises(ValueError, match="no rows"):
        plot.frontier([])
    for name in ("graph", "addresses"):
        with pytest.raises(AttributeError, match=rf"{name}'; the page of checkmate\.report\(solution\) shows it"):
            getattr(plot, name)


def test_pictures_load_nothing_before_they_are_drawn_and_say_what_to_install() -> None:
    block = BLOCK.replace("torch", "matplotlib").replace("NoTorch", "NoPictures")
    code = """
import checkmate, sys
checkmate.plot.memory
print("torch" in sys.modules)
try:
    checkmate.plot.schedule(checkmate.solve(checkmate.Problem.from_dag([[], [0]], [1, 1], [1, 1]), 9))
except ImportError as error:
    print(error)
"""
    said = "False\nPictures need Matplotlib: pip install 'checkmate-torch[plot]'"
    assert _python(block + code) == said
