"""Pictures, by what is in them: the data of their artists, their labels and texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate import Problem
from checkmate.core import simulator
from checkmate.inspection.timeline import timeline
from checkmate.plot import draw_plan
from checkmate.plot.style import BLUE, LANES, ROLE_STYLES
from checkmate.solvers.common.incumbent import certify
from checkmate.units import format_bytes
from tests.inspection.test_timeline import _chain
from tests.inspection.test_transfers import SOLUTION as SENDS
from tests.pictures.plans import frontier, keep_all, no_cost, on_links
from tests.project.test_import_without_torch import BLOCK, _python
from tests.support import oracle

matplotlib: Any = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt: Any = pytest.importorskip("matplotlib.pyplot")
plot: Any = checkmate.plot


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def _again() -> Any:
    """The chain of five units whose op 0 runs again before the last op."""
    problem = dags.unit_chain(2)
    R = np.eye(5, dtype=bool)
    R[4, 0] = True
    return certify(problem, 9, R, method="by hand")


def _drawn(ax: Any) -> Any:
    ax.figure.canvas.draw()
    return ax


def _texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def _labels(ax: Any) -> list[str]:
    return ax.get_legend_handles_labels()[1]


# schedule


def test_the_schedule_shows_r_and_s() -> None:
    solution = _again()
    ax = plot.schedule(solution)
    first, again = ax.collections
    assert first.get_offsets().tolist() == [[k, k] for k in range(5)]
    assert again.get_offsets().tolist() == [[0, 4]]  # op 0 along, stage 4 down
    assert np.array_equal(ax.images[0].get_array(), solution.schedule.S)  # a value for each op, in their order
    assert _labels(ax) == ["first run", "run again (1 times)"]
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "at hand when the stage begins"
    assert ax.get_title() == "by hand: 1 of 5 ops run again, 1 times in all"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [f"op{k}" for k in range(5)]
    marks = _drawn(ax).get_legend().legend_handles[:2]  # the first once was as large as a cell, and covered the words
    assert [mark.get_sizes().tolist() for mark in marks] == [[draw_plan.LEGEND_SIZE]] * 2
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines] == [(2.5, 0), (0, 2.5)]
    assert _texts(ax) == ["forward", "forward", "backward", "backward"]
    only_forward = Problem.from_dag([[], [0]], [1, 1], [1, 1])
    assert not plot.schedule(keep_all(only_forward)).lines


def test_an_op_is_shaded_where_any_of_its_values_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many cells are averaged."""
    problem = oracle.random_problem(3)
    solution = keep_all(problem)
    cells = plot.schedule(solution).images[0].get_array()
    for k, op in enumerate(problem.graph.ops):
        expected = solution.schedule.S[:, list(op.outputs)].any(axis=1)
        assert np.array_equal(cells[:, k].astype(bool), expected)
    monkeypatch.setattr(draw_plan, "MOST_CELLS", 2)
    cells, S = plot.schedule(_again()).images[0].get_array(), _again().schedule.S
    assert cells.shape == (2, 2)
    assert cells[:, 0].tolist() == pytest.approx([S[:3, :3].mean(), S[3:, :3].mean()])


# memory


def test_the_areas_add_up_to_the_bytes_that_the_simulator_sees() -> None:
    solution = keep_all(_chain())
    for by in ("role", "module"):
        ax = plot.memory(solution, by=by)
        line = timeline(solution.plan, solution.problem)
        rows = line.by(by)
        areas = [area for area in ax.collections if area.get_label() in rows]
        assert [area.get_label() for area in areas] == list(rows)
        top = areas[-1].get_paths()[0].vertices
        assert top[:, 1].max() == solution.peak
        (outline,) = [drawn for drawn in ax.lines if len(drawn.get_ydata()) == len(line.moments) + 1]
        assert outline.get_ydata()[:-1].tolist() == list(simulator.simulate(solution.plan, solution.problem).bytes_at)
        assert outline.get_xdata().tolist() == [0.0, 1.0, 3.0, 7.0, 15.0]
        _drawn(ax)


def test_areas_differ_without_colour() -> None:
    line = timeline(keep_all(dags.gpt(2)).plan, dags.gpt(2))
    for rows, styles in ((line.by_role(), ROLE_STYLES), (line.by_module(), draw_plan._styles(line.by_module()))):
        assert len({styles[name] for name in rows}) == len(rows)
    hatches = [hatch for fill, hatch in ROLE_STYLES.values() if fill.strip("#").isalnum() and hatch]
    assert len(set(hatches)) == len(hatches)


OKABE_ITO = {"#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"}
COLOUR_BLIND = {  # what each kind of eye sees of linear red, green and blue: Machado, Oliveira and Fernandes, 2009
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
JUST_SEEN, FAR_APART = 2.3, 10.0  # differences of colours, as CIE 1976 counts them


def _seen(colour: str, matrix: list[list[float]]) -> np.ndarray:
    """A colour as such eyes see it: lightness and two hues (CIE L*a*b*)."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = np.array(to_xyz) @ np.clip(np.array(matrix) @ linear, 0, 1) / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_are_okabes_and_itos_mixed_with_white_or_grey() -> None:
    assert {BLUE, *(fill for fill, _ in LANES)} <= OKABE_ITO
    white = np.ones(3)
    for name, (fill, _) in ROLE_STYLES.items():
        rgb = np.array(matplotlib.colors.to_rgb(fill))
        bases = [np.array(matplotlib.colors.to_rgb(colour)) for colour in OKABE_ITO]
        shares = [float(np.dot(rgb - base, white - base) / np.dot(white - base, white - base)) for base in bases]
        off = [abs(base + share * (white - base) - rgb).max() for base, share in zip(bases, shares, strict=True)]
        assert np.ptp(rgb) == 0 or min(off) <= 1 / 255, name


@pytest.mark.parametrize("eyes", COLOUR_BLIND)
@pytest.mark.parametrize("styles", [ROLE_STYLES, dict(enumerate(LANES))], ids=["roles", "lanes"])
def test_colour_blind_eyes_tell_areas_apart(eyes: str, styles: dict[Any, tuple[str, str]]) -> None:
    """Colours are enough, but for areas that are near to each other, whose hatches differ."""
    for (a, (fill, hatch)), (b, (other, its)) in itertools.combinations(styles.items(), 2):
        apart = float(np.linalg.norm(_seen(fill, COLOUR_BLIND[eyes]) - _seen(other, COLOUR_BLIND[eyes])))
        assert apart > (JUST_SEEN if hatch != its else FAR_APART), (a, b)


def test_budget_and_peak_are_named() -> None:
    solution = replace(keep_all(_chain()), budget=200)
    ax = plot.memory(solution)
    (budget,) = [drawn for drawn in ax.lines if drawn.get_label().startswith("budget")]
    assert set(budget.get_ydata()) == {200}
    assert budget.get_label() == "budget 200 B"
    peak = ax.texts[-1]
    assert peak.get_text() == f"peak {format_bytes(solution.peak)}\nd\nnet.py:3"
    assert peak.xy == (11.0, solution.peak)  # the middle of the last op, from 7 s to 15 s
    (level,) = [text for text in ax.texts if text.get_text() == "budget 200 B"]
    assert level.xy == (0.0, 200)  # at the left, away from the peak
    assert ax.get_ylim()[1] > 200
    assert ax.get_title() == f"plain PyTorch: peak {format_bytes(solution.peak)}\nstep 15.0 s"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time since the step began", "memory in use")


def test_a_plan_is_called_by_its_budget_and_its_areas_by_what_they_are() -> None:
    """A budget far above does not flatten the picture; without transfers there is nothing below it."""
    ax = plot.memory(_again())
    assert ax.get_title() == "planned within 9 B (by hand): peak 3 B\nstep 6.0 s (+20.00% recomputation)"
    words = {text.get_text() for text in ax.get_legend().get_texts()}
    assert {"made again: recomputed", "activations: made by the forward", "budget 9 B, above this picture"} <= words
    assert "budget 9 B" not in _texts(ax)
    assert ax.get_ylim()[1] < 2 * 3
    assert len(ax.figure.axes) == 1


@pytest.mark.parametrize("at", [0, 4])
def test_words_at_lines_and_at_the_peak_do_not_overlap(at: int) -> None:
    """The budget and the peak, as near to each other as they get, at either end of the step."""
    sizes = [1, 1, 1, 1, 1]
    sizes[at] = 40
    problem = Problem.from_dag([[], [0], [1], [2], [3]], [1] * 5, sizes, forward=3)
    solution = keep_all(problem)
    for more in (0, 1, 5, 15):
        ax = plot.memory(replace(solution, budget=solution.peak + more), compare=[solution])
        ax.figure.canvas.draw()
        named = [text for text in ax.texts if text.get_text() not in ("forward", "backward")]
        assert [text.get_text()[:6] for text in named] == ["budget", "peak 4"]
        boxes = [text.get_bbox_patch().get_window_extent() for text in named]
        for (a, one), (b, other) in itertools.combinations(zip(named, boxes, strict=True), 2):
            assert not one.overlaps(other), (more, a.get_text(), b.get_text())
        inside = ax.get_window_extent()
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)


def test_a_step_of_no_seconds_and_no_bytes_is_drawn() -> None:
    for ax in (plot.schedule(no_cost()), plot.memory(no_cost())):
        _drawn(ax)


# frontier


def test_each_method_is_a_line_of_its_plans() -> None:
    ax = plot.frontier(frontier())
    auto, keep_all = [line for line in ax.lines if not line.get_label().startswith("_")]
    assert auto.get_xydata().tolist() == [[3, 45], [4, 26], [6, 21], [10, 17]]  # as known of this chain
    assert keep_all.get_xydata().tolist() == [[10, 17]]
    assert auto.get_marker() != keep_all.get_marker()
    for line in (auto, keep_all):  # a line between plans would read as measured
        assert line.get_linestyle() == "None"
        assert line.get_markersize() > 1
    steps = [line for line in ax.lines if line.get_label().startswith("_")]
    assert [line.get_drawstyle() for line in steps] == ["steps-post"] * 2
    assert all(line.get_marker() in ("", "None") and line.get_linewidth() < 1 for line in steps)
    assert _labels(ax) == ["auto (4 of 5 budgets)", "checkpoint-all (1 of 5 budgets)", "proven: no schedule is here"]
    _drawn(ax)


def test_methods_without_a_plan_stand_in_the_title_of_the_legend() -> None:
    rows = [row for row in frontier() if row.budget in (3, 4, 6)]
    ax = plot.frontier(rows)
    assert {"auto", "proven: no schedule is here"} == {*_labels(ax)}
    assert ax.get_legend().get_title().get_text().endswith(": checkpoint-all")


def test_what_is_proven_is_shaded_and_no_plan_is_within() -> None:
    ax = plot.frontier(frontier())
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


def test_rows_without_any_plan_are_drawn_as_what_is_proven() -> None:
    ax = plot.frontier(checkmate.frontier(dags.unit_chain(4), [1, 2], jobs=1))
    assert _labels(ax) == ["proven: no schedule is here"]
    assert ax.get_legend().get_title().get_text() == "no plan within any of these budgets: auto"
    _drawn(ax)
    with pytest.raises(ValueError, match="no rows"):
        plot.frontier([])


# all


def test_each_draws_on_the_axes_given() -> None:
    figure, axes = plt.subplots(1, 3)
    solution = _again()
    drawn = [
        plot.schedule(solution, ax=axes[0]),
        plot.memory(solution, ax=axes[1]),
        plot.frontier(frontier(), ax=axes[2]),
    ]
    assert drawn == list(axes)
    assert plt.get_fignums() == [figure.number]
    for own in (figure.add_axes((0.1, 0.1, 0.2, 0.2)), figure.subfigures(1, 2)[0].subplots()):
        assert plot.memory(SENDS, ax=own) is own
    assert plt.get_fignums() == [figure.number]
    for wrong in (axes, figure):
        with pytest.raises(TypeError, match=r"ax is one Axes to draw on, such as plt\.subplots\(\)\[1\], not"):
            plot.memory(solution, ax=wrong)


def test_without_a_plan_there_is_nothing_to_draw() -> None:
    nothing = checkmate.solve(dags.unit_chain(4), 1)
    for draw in (plot.schedule, plot.memory):
        with pytest.raises(ValueError, match="There is no plan to draw: No schedule fits 1 B"):
            draw(nothing)
    with pytest.raises(ValueError, match="There is no plan to draw"):
        plot.memory(_again(), compare=[nothing])


def test_pictures_are_there_after_a_plain_import_and_load_nothing_before_they_are_drawn() -> None:
    code = "import checkmate, sys; checkmate.plot.memory; print('matplotlib' in sys.modules, 'torch' in sys.modules)"
    assert _python(code) == "False False"


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    block = BLOCK.replace("torch", "matplotlib").replace("NoTorch", "NoPictures")
    code = """
import checkmate
problem = checkmate.Problem.from_dag([[], [0]], [1, 1], [1, 1])
try:
    checkmate.plot.schedule(checkmate.solve(problem, 9))
except ImportError as error:
    print(error)
"""
    assert _python(block + code) == "Pictures need Matplotlib: pip install 'checkmate-torch[plot]'"


def _bars(lanes: Any) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of each bar, by its name."""
    bars = {bar.get_label(): bar.get_paths() for bar in lanes.collections}
    return {name: [tuple(path.get_extents().intervalx) for path in paths] for name, paths in bars.items()}


@pytest.mark.parametrize("given", [False, True])
def test_links_are_strips_under_the_memory(given: bool) -> None:
    ax = _drawn(plot.memory(SENDS, ax=plt.figure().add_axes((0.1, 0.4, 0.6, 0.5)) if given else None))
    assert ax.get_title().endswith("6.0 s (+20.00% recomputation and waiting)")
    assert "fetched" in _labels(ax)
    lanes, there = ax.child_axes if given else ax.figure.axes[1:]
    assert _bars(lanes) == {"sent": [(1.0, 2.0)], "fetched": [(3.0, 5.0)], "the step waits": [(4.0, 5.0)]}
    (area,) = there.collections
    assert area.get_paths()[0].get_extents().intervaly.tolist() == [0.0, 4.0]
    assert there.get_xlabel() == "time since the step began"


def test_each_link_that_carries_ops_has_a_lane() -> None:
    solution = on_links()
    uses = timeline(solution.plan, solution.problem).lanes["gathers"]
    (lanes,) = _drawn(plot.memory(solution)).figure.axes[1:]
    assert [tick.get_text() for tick in lanes.get_yticklabels()] == ["gathers"]
    stalls = [use.stall for use in uses if use.waited]
    assert _bars(lanes) == {"gathers": [(use.begin, use.end) for use in uses], "the step waits": stalls}


def test_a_plan_beside_the_drawn_one_is_named_in_the_legend_only_and_the_drawn_one_has_an_end() -> None:
    slow = _again()
    fast = keep_all(slow.problem)
    for one, other in ((slow, fast), (fast, slow)):
        ax = _drawn(plot.memory(one, compare=[other]))
        called = (
            f"planned within 9 B (by hand): peak {other.peak} B"
            if other is slow
            else f"plain PyTorch: peak {other.peak} B"
        )
        (line,) = [drawn for drawn in ax.lines if drawn.get_label() == called]
        assert called in [text.get_text() for text in ax.get_legend().get_texts()]
        assert called not in _texts(ax)  # over the curves
        assert line.get_ydata()[:-1].tolist() == list(simulator.simulate(other.plan, other.problem).bytes_at)
        assert line.get_linestyle() != "-"
        assert ax.get_xlim()[1] == slow.cost > fast.cost
        assert [text.xy[0] for text in ax.texts if text.get_text() == "end"] == [fast.cost] * (one is fast)
