"""Train all of a model whose parameters and states are at home in the host's memory: a Llama-3 8B, on paper.

A step of AdamW in bfloat16 that updates after each call is traced on meta, with the seconds of a device's data sheet.
Its parameters and the two states of each are at home in a second memory beside the device. Of each budget a row says
what the plan takes, beside a step that keeps all at hand, and beside the bound of all choices of what stays here from
call to call. Names are batch x tokens. A trace takes two to four minutes, a plan as long as ``--seconds`` says.
Rows go to benchmarks/results/homes.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.core.graph import Graph, Value
from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.host.kept import keep_homes
from checkmate.solvers.solve import solve
from checkmate.training import TrainingStep
from checkmate.updates.insert import Insert

NAMES = ("1x8192", "2x8192")
SMALL = 2**20  # bytes: what is smaller stays here
STATES = 2  # that AdamW keeps of each parameter, as large as it
LATENCY = 10e-6  # seconds of a transfer beyond its bytes


def measure(
    name: str, *, layers: int, device: str, rate: float, host: float, gib: list[float], seconds: float
) -> Iterator[Row]:
    """Yield a row for each budget of a step."""
    batch, tokens = map(int, name.split("x"))
    began = time.perf_counter()
    step = with_states(traced(batch, tokens, layers, device))
    step = with_homes(step, large_values(step), int(host * 1e9), rate)
    about = {
        "network": f"Llama-3 8B, {layers} layers",
        "call": name,
        "device": device,
        "link_gb": rate,
        "host_gb": host,
        "ops": len(step.graph.ops),
        "homes_bytes": step.homes_bytes,
        "keep_all_seconds": step.keep_all_cost,
        "keep_all_bytes": step.keep_all_peak,
        "trace_seconds": time.perf_counter() - began,
    }
    for budget in gib:
        clock, limit = Clock(seconds), int(budget * 2**30)
        problem, bound = keep_homes(Task(step, limit, clock))
        chosen = clock.elapsed
        solution = solve(problem, limit, time_limit=clock.left, gap=1e-3, progress=False)
        row = {"gib": budget, "kept_bytes": problem.begin_bytes - problem.resident}
        if solution.plan is None or solution.second_memory is None:
            yield {**about, **row, "message": solution.message}
            continue
        yield {
            **about,
            **row,
            "cost": solution.cost,
            "bound": bound,
            "gap": 1 - bound / solution.cost,
            "share": step.keep_all_cost / solution.cost,
            "waited": solution.waited,
            "peak": solution.peak,
            "host_peak": solution.second_memory.peak,
            "first_plan_seconds": chosen + solution.details["trajectory"][0][0],
            "seconds": clock.elapsed,
        }


class Middle(TrainingStep):
    """A training step that is traced as a call of an accumulation before the last one."""

    @property
    def inserts(self) -> Insert:
        """Add each gradient to its sum."""
        return replace(super().inserts, last=False)


def traced(batch: int, tokens: int, layers: int, device: str, *, middle: bool = False) -> Problem:
    """The step, with its loss in as few parts as the first further split has.

    Args:
        middle: it is a call of an accumulation before the last one: it adds to the sums of gradients.
    """
    model, ids = llama(batch, tokens, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    step = checkmate.training_step(
        lambda ids: model(input_ids=ids, labels=ids).loss, optimizer, accumulate=2 if middle else 1
    )
    step.__class__ = Middle if middle else TrainingStep
    splits = checkmate.trace(step, ids, profile=f"roofline:{device}").splits_in_turn()
    whole = next(splits)
    return next(splits, whole)


def llama(batch: int, tokens: int, layers: int) -> tuple[Any, torch.Tensor]:
    """A Llama-3 8B in bfloat16, of so many layers, and a batch for it, on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=131072, use_cache=False, attn_implementation="sdpa")
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16), torch.zeros(batch, tokens, dtype=torch.long)


def with_states(problem: Problem) -> Problem:
    """The step in which each update also reads and overwrites states, where these are no values of its graph yet."""
    graph = problem.graph
    values, ops, added = [*graph.values], [], 0
    for op in graph.ops:
        states = tuple(range(len(values), len(values) + STATES)) if len(op.overwrites) == 1 else ()
        if states:
            parameter = values[op.overwrites[0]]
            values += [Value(f"{parameter.name}.{i}", parameter.size_bytes, None, "buffer") for i in range(STATES)]
            added += STATES * parameter.size_bytes
        ops.append(replace(op, inputs=(*op.inputs, *states), overwrites=(*op.overwrites, *states)))
    resident = problem.resident - problem.profile.state_bytes + added if added else problem.resident
    profile = replace(problem.profile, resident_bytes=resident, state_bytes=0 if added else problem.profile.state_bytes)
    graph = Graph(tuple(ops), tuple(values), graph.outputs)
    return replace(problem, graph=graph, profile=profile, codegen=None, next_split=None)


def large_values(problem: Problem) -> list[int]:
    """The values that are there before the step begins, large enough to be at home elsewhere, and read by an op."""
    return [
        v
        for v, value in enumerate(problem.graph.values)
        if value.producer is None and value.size_bytes >= SMALL and problem.graph.users[v]
    ]


def with_homes(problem: Problem, homes: Sequence[int], host_bytes: int, rate: float) -> Problem:
    """The step with these values at home in a second memory, with links of ``rate`` GB/s."""
    host = Host(host_bytes, rate * 1e9, rate * 1e9, latency=LATENCY)
    return problem.with_host(host).with_homes(homes)


BENCHMARK = Benchmark(
    about=__doc__,
    file="homes.jsonl",
    measure=measure,
    columns={
        "call": lambda row: row["call"],
        "GiB": lambda row: f"{row['gib']:g}",
        "kept GB": lambda row: f"{row['kept_bytes'] / 1e9:.1f}",
        "step s": lambda row: f"{row['cost']:.3f}" if "cost" in row else "none",
        "bound s": lambda row: f"{row['bound']:.3f}" if "cost" in row else "",
        "gap": lambda row: f"{row['gap']:.1%}" if "cost" in row else "",
        "of keeping all": lambda row: f"{row['share']:.3f}" if "cost" in row else "",
        "waits s": lambda row: f"{row['waited']:.3f}" if "cost" in row else "",
        "first plan s": lambda row: f"{row['first_plan_seconds']:.1f}" if "cost" in row else "",
    },
    names=NAMES,
    options={
        "layers": (32, "layers of the model"),
        "device": ("h100", "whose data sheet gives seconds"),
        "rate": (55.0, "GB/s of the link, each way"),
        "host": (128.0, "GB of the second memory"),
        "gib": ([24.0, 40.0, 78.0], "budgets"),
        "seconds": (60.0, "for each plan"),
    },
    quick={"names": ["1x8192"], "layers": 2, "gib": [8.0, 16.0], "seconds": 5.0},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
