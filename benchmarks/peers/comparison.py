"""Ours beside what people use today: peak, time of a step, time to plan and equality of bits, in one run.

    python -m benchmarks.peers [NETWORK ...] [--minutes 6] [--only peers ours]
    python -m benchmarks.peers --report     # from the rows: results/peers.md, and a picture of each network

For each network every way of `benchmarks.peers.settings` trains the same parameters on the same batch. Peaks are the
running sum of the profiler's memory events over a forward and a backward from no gradients, with parameters, buffers
and batch added; ``beyond`` leaves out those and all gradients. Times are relative to plain steps that run in between:
each round runs every way once, in an order drawn anew, with a plain step before and after every few of them; the time
of a step is divided by the mean of the two plain ones next to it. Each runs twice in a row, and the second is timed.
Ours plan for the peaks of the peers that are best in peak and time, and for budgets from the smallest that works to
keeping everything.

`benchmarks.peers.resident` then trains each way in a process of its own, for how far that grows.
"""

from __future__ import annotations

import gc
import hashlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import budget_at, distance, nothing_on_disk, seconds_in_turn, step_and_back
from benchmarks.networks.batches import Step
from benchmarks.peers import report as peers_report
from benchmarks.peers.settings import EAGER, HEURISTICS, Setting, front, inductor_peers, ours, peers
from benchmarks.peers.subjects import NETWORKS, Network, Subject
from checkmate.backends.tensor_state import differing
from checkmate.errors import CheckmateError
from checkmate.memory import CPU, measure_peak, record_allocations

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # from the smallest budget to keeping everything
HEURISTIC_SHARES = (0.2, 0.5)
BETWEEN = 3  # steps of others between two plain ones
KINDS = ("peers", "ours", "heuristics", "inductor")
ROUNDS = (7, 25)  # the fewest, the most
LOOK = 3  # rounds that find the best peers
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, CheckmateError)
Outcome = dict[str, list[Tensor]]  # what a step leaves behind: loss, gradients, buffers, random_state
TOLERANCE = 1e-3  # relative to the largest element of a tensor, where kernels differ


@dataclass(frozen=True)
class Options:
    """Choice of what is compared, and for how long."""

    device: torch.device = CPU
    only: Sequence[str] = KINDS
    shares: Sequence[float] = SHARES
    time_limit: float = 20.0  # seconds to plan for one budget
    minutes: float = 6.0  # of timed rounds
    rounds: Sequence[int] = ROUNDS
    deadline: float = float("inf")  # of time.monotonic: what is not compiled by then is left out
    takes: Callable[[Setting], bool] = lambda setting: True  # which of the peers


@dataclass
class Entry:
    """A setting at work: its step, what is known of it so far, and the ratios to plain steps, one for each round."""

    setting: Setting
    step: Step
    facts: Row
    timed_with: Entry | None = None  # another one that does the very same, which is timed for both
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def row(self) -> Row:
        """The row of all that is known, with the quartiles of the ratios."""
        timed = self.timed_with or self
        low, middle, high = map(float, np.quantile(timed.ratios, (0.25, 0.5, 0.75)))
        found = {"timed_with": timed.setting.name, "ratio": middle, "ratio_low": low, "ratio_high": high}
        found |= {"seconds": statistics.median(timed.seconds), "ratios": [round(ratio, 4) for ratio in timed.ratios]}
        return self.facts | found


class Comparison:
    """All ways to train one network, on one device."""

    def __init__(self, network: Network, options: Options, report: Callable[[str], None]) -> None:
        self.subject = Subject.of(network, options.device)
        self.device, self.options, self.report = options.device, options, report
        self.plain = self.subject.plain
        self.expected = self.outcome(self.plain)
        self.waver = _off(self.expected, self.outcome(self.plain))  # of plain steps among themselves
        self.problem = checkmate.trace(self.plain, *self.subject.batch)
        self.smallest = checkmate.min_budget(self.problem).peak
        self.failed: list[Row] = []
        eager = self.entry(EAGER)
        assert eager is not None
        self.entries = [eager]

    def budget(self, share: float) -> int:
        """Bytes at a share of the way from the smallest budget to keeping everything."""
        return budget_at(share, self.smallest, self.problem.keep_all_peak)

    def add(self, settings: Iterable[Setting]) -> None:
        """Compile and measure them; what fails stays behind as a row with its error."""
        for setting in settings:
            if time.monotonic() > self.options.deadline:
                self.report(f"no time left for {setting.name}")
            elif (entry := self.entry(setting)) is not None:
                self.entries.append(entry)

    def outcome(self, step: Step) -> Outcome:
        """Run one step from the state that all start with, and leave that state."""
        module = self.subject.module
        self.subject.restore()
        torch.manual_seed(1)
        loss = step(*self.subject.batch)
        loss.backward()
        found = {
            "loss": _on_host([loss]),
            "gradients": _on_host(p.grad for p in module.parameters() if p.grad is not None),
            "buffers": _on_host(module.buffers()),
            "random_state": [torch.get_rng_state()],
        }
        self.subject.restore()
        return found

    def entry(self, setting: Setting) -> Entry | None:
        """Compile a setting, measure its peak, compare its numbers with the plain step's; None if it fails."""
        about: Row = {"family": setting.family, "knob": setting.knob, "budget": setting.budget}
        try:
            began = time.perf_counter()
            with setting.config(), nothing_on_disk():
                step = setting.build(self.subject)
                found = self.outcome(step)
                first = {"first_step_seconds": time.perf_counter() - began}
                off = _off(self.expected, found)
                same = {f"same_{kind}": not differing(self.expected[kind], left) for kind, left in found.items()}
                numbers = {**same, "off": off, "within_tolerance": off <= TOLERANCE, "exact": setting.exact}
                facts = {**about, **numbers, **self.measured(step), **first}
        except FAILURES as error:  # a peer that fails is a result
            self.subject.restore()
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
            self.failed.append({**about, "error": reason})
            self.report(f"{setting.name}: {reason}")
            return None
        if plans := getattr(step, "plans", None):
            plan = plans[-1]
            facts |= {"plan_seconds": plan.seconds, "predicted_peak": plan.peak}
            facts |= {"overhead": plan.overhead, "gap": plan.gap}
        return Entry(setting, step, facts)

    def measured(self, step: Step) -> Row:
        """The peak of a step, from no gradients; on the CPU with a fingerprint of its allocations."""
        run = partial(step_and_back, self.subject.module, step, self.subject.batch)
        run()
        self.subject.module.zero_grad(set_to_none=True)
        if self.device.type == "cpu":
            with record_allocations() as recording:
                run()
            levels = np.concatenate([[0], np.cumsum(recording.bytes)])
            peak = int(levels.max()) + self.problem.resident
            prints = hashlib.sha1(recording.bytes.tobytes()).hexdigest()
        else:
            use = measure_peak(run, self.device)
            peak, prints = use.peak + (use.before or 0), ""
        self.subject.restore()
        beyond = peak - self.problem.resident - self.subject.gradient_bytes
        return {"peak": peak, "beyond": beyond, "fingerprint": prints}

    def different(self) -> list[Entry]:
        """Choose an entry for each sequence of allocations in a family: others of it do the very same."""
        first: dict[tuple[str, str], Entry] = {}
        for i, entry in enumerate(self.entries):
            key = entry.setting.family, entry.facts["fingerprint"] or str(i)
            entry.timed_with = first.setdefault(key, entry)
        return list(first.values())

    def time(self, entries: Sequence[Entry], minutes: float, rounds: Sequence[int]) -> None:
        """Rounds of all entries, each in a new order, until the time is over."""
        order, rng = list(entries), random.Random(0)
        deadline = time.monotonic() + 60 * minutes
        for entry in order:
            self._seconds(entry.step)  # all are warm when the first round begins
        done, longest = 0, 0.0
        while done < rounds[0] or (done < rounds[1] and time.monotonic() + longest < deadline):
            began = time.monotonic()
            rng.shuffle(order)
            gc.collect()
            before = self._seconds(self.plain)
            for i in range(0, len(order), BETWEEN):
                some = order[i : i + BETWEEN]
                times = [self._seconds(entry.step) for entry in some]
                after = self._seconds(self.plain)
                for entry, seconds in zip(some, times, strict=True):
                    entry.ratios.append(2 * seconds / (before + after))
                    entry.seconds.append(seconds)
                before = after
            done, longest = done + 1, max(longest, time.monotonic() - began)
        self.subject.restore()

    def _seconds(self, step: Step) -> float:
        """Time the second of two steps, which finds what one of its kind has left, as in training."""
        steps = {"it": lambda: step(*self.subject.batch).backward()}
        return seconds_in_turn(steps, 1, self.subject.module.zero_grad, self.device)["it"][0]

    def rows(self) -> list[Row]:
        """A row for each setting, timed, timed with another one, or failed."""
        about: Row = {"model": self.subject.network.name, "device": str(self.device)}
        about |= {"threads": torch.get_num_threads(), "ops": len(self.problem.graph.ops)}
        about |= {"resident": self.problem.resident, "gradients": self.subject.gradient_bytes}
        about |= {"min_budget": self.smallest, "keep_all_peak": self.problem.keep_all_peak}
        about |= {"time_limit": self.options.time_limit, "plain_off": self.waver}
        return [about | facts for facts in (*(entry.row() for entry in self.entries), *self.failed)]


def _on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _off(expected: Outcome, found: Outcome) -> float:
    return max(distance(found[kind], expected[kind]) for kind in ("loss", "gradients", "buffers"))


def plans_worth_running(comparison: Comparison) -> list[Setting]:
    """The heuristics at a few budgets, each plan once."""
    found: dict[tuple[int, float], Setting] = {}
    for method in HEURISTICS:
        for share in (*HEURISTIC_SHARES, 1.0):
            budget = comparison.budget(share)
            limit = comparison.options.time_limit
            solution = checkmate.solve(comparison.problem, budget, method=method, time_limit=limit)
            if solution.peak is not None and solution.overhead:
                found.setdefault((solution.peak, solution.cost), ours(budget, limit, method))
    return list(found.values())


def compare(network: Network, options: Options, report: Callable[[str], None]) -> list[Row]:
    """Every way to train one network: its rows."""
    torch._dynamo.reset()
    comparison = Comparison(network, options, report)
    budgets = {comparison.budget(share) for share in options.shares}
    if "peers" in options.only:
        comparison.add(filter(options.takes, peers(comparison.subject)))
        report(f"{len(comparison.entries)} ways of PyTorch")
        comparison.time(comparison.different(), options.minutes, (min(LOOK, options.rounds[0]), LOOK))
        exact = [entry for entry in comparison.different() if peers_report.same_bits(entry.facts)]
        best = front([(entry.facts["peak"], statistics.median(entry.ratios)) for entry in exact])
        budgets |= {exact[i].facts["peak"] for i in best if exact[i].facts["peak"] >= comparison.smallest}
    if "ours" in options.only:
        comparison.add(ours(budget, options.time_limit) for budget in sorted(budgets))
    if "heuristics" in options.only:
        comparison.add(plans_worth_running(comparison))
    if "inductor" in options.only:
        comparison.add(filter(options.takes, inductor_peers()))
    entries = comparison.different()
    report(f"{len(comparison.entries)} ways, {len(entries)} of them different")
    for entry in entries:
        entry.ratios.clear()
        entry.seconds.clear()
    comparison.time(entries, options.minutes, options.rounds)
    return comparison.rows()


def rows_of(name: str, **options: Any) -> list[Row]:
    """Compare all ways to train one network, on one thread of the CPU."""
    torch.set_num_threads(1)
    return compare(NETWORKS[name], Options(**options), partial(print, f"{name}:", file=sys.stderr, flush=True))


BENCHMARK = Benchmark(
    __doc__,
    "peers.jsonl",
    rows_of,
    {
        "network": "{model}",
        "way": "{family}",
        "knob": "{knob}",
        "peak": "{peak:_}",
        "step / plain": "{ratio:.3f}",
        "numbers": lambda row: row["error"] if "error" in row else peers_report.numbers(row),
    },
    names=NETWORKS,
    options={
        "minutes": (Options.minutes, "for the timed rounds of a network"),
        "time_limit": (Options.time_limit, "seconds to plan for one budget"),
        "only": ([*KINDS], "of these kinds"),
    },
    report=peers_report.render,
)
