"""Ours beside what people use today: peak, time of a step, time to plan and equality of bits, in one run.

    python -m benchmarks.peers [NETWORK ...] [--minutes 6]
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
from benchmarks.common import timing as measuring
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.networks.batches import Step
from benchmarks.peers import report as peers_report
from benchmarks.peers.settings import EAGER, HEURISTICS, Setting, front, inductor_peers, ours, peers
from benchmarks.peers.subjects import NETWORKS, Network, Subject
from checkmate.backends.tensor_state import differing
from checkmate.memory import CPU, measure_peak, record_allocations

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # from the smallest budget to keeping everything
HEURISTIC_SHARES = (0.2, 0.5)
BETWEEN = 3  # steps of others between two plain ones
KINDS = ("peers", "ours", "heuristics", "inductor")
ROUNDS = (7, 25)  # the fewest, the most
LOOK = 3  # rounds that find the best peers
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, checkmate.CheckmateError)
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

    @property
    def exact(self) -> bool:
        """Whether loss, gradients and buffers are those of the plain step, bit for bit."""
        return peers_report.same_bits(self.facts)

    def row(self) -> Row:
        """All that is known, with the quartiles of the ratios."""
        timed = self.timed_with or self
        low, middle, high = np.quantile(timed.ratios, (0.25, 0.5, 0.75))
        return {
            **self.facts,
            "timed_with": timed.setting.name,
            "ratio": float(middle),
            "ratio_low": float(low),
            "ratio_high": float(high),
            "seconds": statistics.median(timed.seconds),
            "ratios": [round(ratio, 4) for ratio in timed.ratios],
        }


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

    @property
    def about(self) -> Row:
        """Facts that all rows of the network have in common."""
        return {
            "model": self.subject.network.name,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "ops": len(self.problem.graph.ops),
            "resident": self.problem.resident,
            "gradients": self.subject.gradient_bytes,
            "min_budget": self.smallest,
            "keep_all_peak": self.problem.keep_all_peak,
            "time_limit": self.options.time_limit,
            "plain_off": self.waver,
        }

    def budget(self, share: float) -> int:
        """Bytes at a share of the way from the smallest budget to keeping everything."""
        return measuring.budget_at(share, self.smallest, self.problem.keep_all_peak)

    def add(self, settings: Iterable[Setting]) -> None:
        """Compile and measure them; what fails stays behind as a row with its error."""
        for setting in settings:
            if time.monotonic() > self.options.deadline:
                self.report(f"no time left for {setting.name}")
                continue
            entry = self.entry(setting)
            if entry is not None:
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
        """The setting compiled, its peak measured, its numbers compared; None if it fails."""
        about = {"family": setting.family, "knob": setting.knob, "budget": setting.budget}
        try:
            began = time.perf_counter()
            with setting.config(), measuring.nothing_on_disk():
                step = setting.build(self.subject)
                found = self.outcome(step)
                first = time.perf_counter() - began
                facts = {**about, **self.compared(found, setting), **self.measured(step), "first_step_seconds": first}
        except FAILURES as error:  # a peer that fails is a result
            self.subject.restore()
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
            self.failed.append({**about, "error": reason})
            self.report(f"{setting.name}: {reason}")
            return None
        if plans := getattr(step, "plans", None):
            facts |= {
                "plan_seconds": plans[-1].seconds,
                "predicted_peak": plans[-1].peak,
                "overhead": plans[-1].overhead,
                "gap": plans[-1].gap,
            }
        return Entry(setting, step, facts)

    def compared(self, found: Outcome, setting: Setting) -> Row:
        """Whether loss, gradients, buffers and random state are those of the plain step, and how far they are off."""
        off = _off(self.expected, found)
        same = {f"same_{kind}": not differing(self.expected[kind], left) for kind, left in found.items()}
        return {**same, "off": off, "within_tolerance": off <= TOLERANCE, "exact": setting.exact}

    def measured(self, step: Step) -> Row:
        """The peak of a step, from no gradients; on the CPU with a fingerprint of its allocations."""
        run = partial(measuring.step_and_back, self.subject.module, step, self.subject.batch)
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
        """One entry for each sequence of allocations in a family: the others of it do the very same."""
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
        """Of the second of two steps, as in training: one finds what another of its kind has left."""
        seconds = 0.0
        for _ in range(2):
            self.subject.module.zero_grad(set_to_none=True)
            measuring.finish(self.device)
            began = time.perf_counter()
            step(*self.subject.batch).backward()
            measuring.finish(self.device)
            seconds = time.perf_counter() - began
        return seconds

    def rows(self) -> list[Row]:
        """A row for each setting, timed, timed with another one, or failed."""
        done = [entry.row() for entry in self.entries]
        return [{**self.about, **facts} for facts in (*done, *self.failed)]


def _on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _off(expected: Outcome, found: Outcome) -> float:
    return max(measuring.distance(found[kind], expected[kind]) for kind in ("loss", "gradients", "buffers"))


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
        exact = [entry for entry in comparison.different() if entry.exact]
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


def rows_of(name: str, device: str, threads: int, knobs: Sequence[str], **options: Any) -> list[Row]:
    """Compare all ways to train one network; ``options``: others of `Options`."""
    torch.set_num_threads(threads)
    wanted = Options(torch.device(device), **options, takes=lambda setting: not knobs or setting.knob in knobs)
    return compare(NETWORKS[name], wanted, partial(print, f"{name}:", file=sys.stderr, flush=True))


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
        "device": ("cpu", "of PyTorch"),
        "threads": (1, "of PyTorch"),
        "minutes": (Options.minutes, "for the timed rounds of a network"),
        "rounds": ([*ROUNDS], "the fewest and the most"),
        "time_limit": (Options.time_limit, "seconds to plan for one budget"),
        "shares": ([*SHARES], "budgets of ours"),
        "only": ([*KINDS], "of these kinds"),
        "knobs": ([], 'of the peers, for example "each block" "dp 0.5"'),
    },
    report=peers_report.render,
)
