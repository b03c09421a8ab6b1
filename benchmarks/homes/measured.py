"""Plans of a Llama-3 8B at home in the host's memory, beside the choice of others and what they measured.

    python -m benchmarks.homes.measured [DEVICE ...] [--length 1024 4096 16384] [--host-gib 60 75] [--gib 24 ... 78]
    python -m benchmarks.homes.measured --report     # from the rows: results/homes_measured.md

ml_dataflow trains a Llama-3 8B with AdamW in bfloat16 on one device, with all that is there between calls in the host's
memory. It was measured within many bytes of both memories (`benchmarks/homes/theirs.py`). At each of these rows a call
of 16,384 tokens that adds to the sums of gradients is planned, by the seconds of the device's data sheet; there are 9
to 38 such calls before an update. Beside our plan is their choice for the row, at the same seconds, over the same
links, by the same simulator. Of ours, all is at home in the host's memory, or that of the layers, as theirs is; it is
where the bound of the plans is lower. A trace takes one to two minutes, and a row some 15 seconds. Seconds, those of
the limit too, are the ones that the process computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Column, Row, latest, read
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.homes.planned import STATES, large_values, traced, with_homes
from benchmarks.homes.theirs import Measured, measured, of_layers, plan_of
from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.timing import timing
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.host.kept import keep_homes
from checkmate.solvers.solve import solve

TOKENS = 16384  # of a call
LINKS = {"h100": 55.0, "a100": 25.0}  # GB/s each way
MOST = 78  # GiB of a device: those beside whose speed that within fewer is held
ALL, LAYERS = "all", "layers"  # whose parameters, sums and states are at home in the host's memory
DRAWN = 75  # GiB of the host, in the picture


def rows_of(
    name: str, *, length: int, layers: int, host_gib: Sequence[int], gib: Sequence[int], seconds: float
) -> Iterator[Row]:
    """Plan in this process, in seconds that it computes: a row for each that was measured."""
    step = traced(TOKENS // length, length, layers, name, middle=True)
    count_own_seconds()
    for row in measured():
        if (row.device, row.length) == (name, length) and row.host_gib in host_gib and row.gib in gib:
            yield {**asdict(row), "layers": layers, **planned(step, row, layers, seconds)}


def planned(step: Problem, row: Measured, layers: int, seconds: float) -> Row:
    """Our plan and their choice within the bytes of a row."""
    clock, budget, values = Clock(seconds), row.gib * 2**30, large_values(step)
    whose = {ALL: values, LAYERS: of_layers(step, values)}
    problems = {which: there(step, homes, row) for which, homes in whose.items()}
    chosen = {which: keep_homes(Task(problem, budget, clock)) for which, problem in problems.items()}
    at_home = min(chosen, key=lambda which: chosen[which][1])
    problem, bound = chosen[at_home]
    began = clock.elapsed
    solution = solve(problem, budget, time_limit=clock.left, gap=1e-3, progress=False)
    found: Row = {
        "ops": len(step.graph.ops),
        "link_gb": LINKS[row.device],
        "keep_all_seconds": step.keep_all_cost,
        "keep_all_bytes": step.keep_all_peak,
        "at_home": at_home,
        "kept_bytes": problem.begin_bytes - problem.resident,
        "bound": bound,
        "message": solution.message,
        "cost": None,
    }
    if solution.plan is not None:
        usage = simulator.simulate(solution.plan, problem)
        found |= {"cost": solution.cost, "gap": 1 - bound / solution.cost, "waited": solution.waited}
        found |= {"peak": usage.peak, "host_peak": usage.host_peak, "seconds": clock.elapsed}
        found["first_plan_seconds"] = began + solution.details["trajectory"][0][0]
    # Theirs, for as many layers as there are.
    like = problems[LAYERS]
    theirs = plan_of(like, row if row.here <= layers else replace(row, here=layers))
    usage = simulator.simulate(theirs, like)
    faults = simulator.check_plan(theirs, like, max(budget, usage.peak))
    if faults:
        raise AssertionError(f"{row}: {faults[0]}")
    found |= {"their_cost": simulator.cost(theirs, like), "their_waited": timing(theirs, like).waited}
    return found | {"their_peak": usage.peak, "their_host_peak": usage.host_peak, "they_fit": usage.peak <= budget}


def there(step: Problem, homes: Sequence[int], row: Measured) -> Problem:
    """The step with these values at home in the host's memory, and the states of their parameters beside them."""
    values = step.graph.values
    states = STATES * sum(values[v].size_bytes for v in homes if values[v].role == "parameter")
    kept = step.profile.state_bytes - states
    profile = replace(step.profile, resident_bytes=step.resident - states, state_bytes=kept)
    without = replace(step, profile=profile, codegen=None, next_split=None)
    return with_homes(without, homes, row.host_gib * 2**30 - states, LINKS[row.device])


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """The last row of each case, with the speed beside that of the most bytes of the device: ours, theirs, measured."""
    found = latest(rows, "device", "length", "host_gib", "gib", "layers")
    found.sort(key=lambda row: (row["device"] != "h100", row["length"], row["host_gib"], row["gib"]))
    most = {(row["device"], row["length"], row["host_gib"]): row for row in found if row["gib"] == MOST}
    shown = []
    for row in found:
        of = most.get((row["device"], row["length"], row["host_gib"]))
        shares = {}
        if of is not None:
            shares["share"] = of["cost"] / row["cost"] if of["cost"] and row["cost"] else None
            shares["their_share"] = of["their_cost"] / row["their_cost"]
            shares["measured_share"] = row["tokens_per_second"] / of["tokens_per_second"]
        shown.append({**row, **shares})
    return shown


def sums(rows: Sequence[Row]) -> str:
    """In how many rows ours is faster than their choice, and no slower beside the most bytes than measured."""
    rows = [row for row in with_shares(rows) if row["cost"]]
    faster = [row["their_cost"] / row["cost"] - 1 for row in rows if row["cost"] <= row["their_cost"]]
    lacks = [row["measured_share"] - row["share"] for row in rows if row["gib"] != MOST and row.get("share")]
    behind = [lack for lack in lacks if lack > 0]
    gaps = sorted(row["gap"] for row in rows)
    text = (
        f"Our plan is faster than their choice in {len(faster)} of {len(rows)} rows, by {min(faster):.1%} to "
        f"{max(faster):.1%}. Its share of the speed within {MOST} GiB is at least what was measured in "
        f"{len(lacks) - len(behind)} of {len(lacks)}"
    )
    text += f", and lower by {max(behind):.3f} at most in the others" if behind else ""
    return f"{text}. Gaps are {gaps[len(gaps) // 2]:.1%} for half of the rows, and {gaps[-1]:.1%} at most."


def markdown(rows: Sequence[Row]) -> str:
    """All rows, and where they are from."""
    return document(
        "A model at home in the host's memory, beside measured rows",
        f"Made by `python -m benchmarks.homes.measured` at {where_from(rows)}. {sums(rows)}",
        BENCHMARK.table(with_shares(rows)),
        "![Share of the speed within 78 GiB, against GiB of the device](homes_measured.png)",
    )


def draw(file: Path) -> None:
    """Shares of the speed against GiB of the device: our plans, and as measured; a panel for each device."""
    from matplotlib.figure import Figure

    rows = [row for row in with_shares(read(file)) if row["host_gib"] == DRAWN and row.get("share")]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, len(LINKS), sharey=True, squeeze=False)[0]
    for panel, device in zip(axes, LINKS, strict=True):
        for i, length in enumerate(sorted({row["length"] for row in rows if row["device"] == device})):
            of = [row for row in rows if (row["device"], row["length"]) == (device, length)]
            for key, style, whose in (("share", "o-", "ours"), ("measured_share", "s:", "measured")):
                label = f"{length} tokens, {whose}"
                panel.plot([row["gib"] for row in of], [row[key] for row in of], style, color=f"C{i}", label=label)
        panel.set(title=f"{device.upper()}, host of {DRAWN} GiB", xlabel="GiB of the device")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel(f"share of the speed within {MOST} GiB")
    axes[-1].legend(fontsize=8)
    figure.savefig(file.with_suffix(".png"), dpi=110, metadata={"Software": None})


COLUMNS: dict[str, Column] = {
    "device": "{device}",
    "length": "{length}",
    "host GiB": "{host_gib}",
    "GiB": "{gib}",
    "step": "{cost:.3f} s|none",
    "gap": "{gap:.1%}|",
    "their choice": lambda row: f"{row['their_cost']:.3f} s" + ("" if row["they_fit"] else ", does not fit"),
    "faster by": lambda row: f"{row['their_cost'] / row['cost'] - 1:.1%}" if row["cost"] else "",
    "share": "{share:.3f}|",
    "their share": "{their_share:.3f}|",
    "measured": "{measured_share:.3f}|",
    "tokens/s measured": "{tokens_per_second:.0f}",
    "at home": "{at_home}",
    "waits": "{waited:.3f} s|",
    "first plan": "{first_plan_seconds:.1f} s|",
    "seconds": "{seconds:.1f} s|",
}

BENCHMARK = Benchmark(
    about=__doc__,
    file="homes_measured.jsonl",
    measure=rows_of,
    columns=COLUMNS,
    names=tuple(LINKS),
    options={
        "length": ((1024, 4096, 16384), "tokens of a sequence, of which there are as many as make 16,384"),
        "layers": (32, "layers of the model"),
        "host_gib": ([60, 75], "GiB of the host, of those measured"),
        "gib": ([24, 30, 40, 50, 60, 70, 78], "GiB of the device, of those measured"),
        "seconds": (12.0, "for each plan"),
    },
    quick={"names": ["h100"], "length": (16384,), "layers": 4, "host_gib": [75], "gib": [24, 78], "seconds": 5.0},
    packages=("torch", "transformers"),
    page=markdown,
    report=draw,
)

if __name__ == "__main__":
    BENCHMARK.run()
