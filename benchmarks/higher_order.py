"""A TinyLlama with `flex_attention`, with norms by Triton, and with both: what it is worth that these run again.

    python -m benchmarks.higher_order [NETWORK ...] [--quick]

Planned for an H100 on the meta device, in bfloat16: no GPU runs anything. Each step twice: as it is, and with these ops
pinned, so that they run once and all that the backward reads of them stays. Smallest budgets are with ops whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.networks.llama import Llama
from checkmate.core.problem import Problem
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import solve

DEVICE, BATCH, HALF = "h100", 4, 0.5  # of keeping everything
NETWORKS = ("llama, flex", "llama, triton", "llama, both")
FORMS = ("pinned", "free")


def step_of(name: str, length: int, layers: int) -> Problem:
    """The step of a network, as estimated."""
    from benchmarks.networks.triton_norm import TritonRMSNorm  # with Triton

    flex, triton = ("flex" in name or "both" in name), ("triton" in name or "both" in name)
    with torch.device("meta"):
        make = partial(Llama, TritonRMSNorm) if triton else Llama
        net = make(flex=flex, length=length, layers=layers).bfloat16()
        words = torch.zeros(BATCH, length, dtype=torch.long)
    return replace(checkmate.trace(net, words, words, profile=f"roofline:{DEVICE}"), next_split=None)


def pinned(problem: Problem) -> Problem:
    """Pin ops that run a graph or a kernel of Triton's, so that they run once."""
    ops = [replace(op, pinned="as it was") if is_higher(op.target) else op for op in problem.graph.ops]
    return replace(problem, graph=replace(problem.graph, ops=tuple(ops)))


def is_higher(target: str) -> bool:
    """Whether an op runs a graph or a kernel that it is given."""
    return target.startswith(("triton.", "flex_attention"))


def planned(name: str, length: int, layers: int, time_limit: float) -> Iterator[Row]:
    """The smallest budget of both forms, and the plan within half of keeping everything."""
    torch._dynamo.reset()
    problem = step_of(name, length, layers)
    budget = int(HALF * problem.keep_all_peak)
    for form, one in zip(FORMS, (pinned(problem), problem), strict=True):
        ends, plan = min_budget(one, time_limit=time_limit), solve(one, budget, time_limit=time_limit, progress=False)
        row: Row = {"network": name, "form": form, "device": DEVICE, "source": one.profile.source}
        row |= {"batch": BATCH, "length": length, "layers": layers, "time_limit": time_limit}
        row |= {"ops": len(one.graph.ops), "higher": sum(is_higher(op.target) for op in one.graph.ops)}
        row |= {"keep_all": one.keep_all_peak, "resident": one.resident, "seconds": one.keep_all_cost}
        row |= {"smallest": ends.peak, "bound": ends.bound, "budget": budget}
        row |= {"overhead": plan.overhead, "gap": plan.gap} if plan.plan else {"overhead": None, "gap": None}
        yield row


BENCHMARK = Benchmark(
    __doc__,
    "higher_order.jsonl",
    planned,
    {
        "network": "{network}",
        "form": "{form}",
        "keep all": "{keep_all:bytes}",
        "smallest": "{smallest:bytes}",
        "no plan below": "{bound:bytes}",
        "step": "{seconds:seconds}",
        "at half": "+{overhead:.2%}|does not fit",
    },
    names=NETWORKS,
    options={
        "length": (2048, "words of a sequence"),
        "layers": (22, "of the network"),
        "time_limit": (20.0, "seconds for each smallest budget and each plan"),
    },
    quick={"length": 256, "layers": 2, "time_limit": 1.0},
    packages=("torch", "triton", "highspy"),
)

if __name__ == "__main__":
    BENCHMARK.run()
