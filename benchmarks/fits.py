"""Say whether all of a Llama-3 8B trains on one GPU, with how much RAM, and how fast: the verdicts of `checkmate.fits`.

    python -m benchmarks.fits [BATCHxTOKENS ...] [--device rtx4090 h100] [--layers 32] [--host GB]

The model is in bfloat16, its optimizer AdamW, and each call updates; the model is on meta, and nothing runs here. A row
has the RAM that the plan takes, its speed beside a device that holds the step, and the share of it that no plan is
above, after the seconds that `fits` takes by itself. Names are batch x tokens. A row takes two to four minutes, most
of which is the trace. Rows go to benchmarks/results/fits.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.homes.planned import llama

NAMES = ("1x2048", "4x2048", "8x2048")


def measure(name: str, *, device: str, layers: int, host: float) -> Iterator[Row]:
    """Yield the row of a step on a device."""
    batch, tokens = map(int, name.split("x"))
    model, ids = llama(batch, tokens, layers)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    found = checkmate.fits(loss_of, ids, device=device, host_budget=f"{host:g} GB" if host else None)
    way = found.ways[-1]
    yield {
        "network": f"Llama-3 8B, {layers} layers",
        "call": name,
        "tokens": batch * tokens,
        "device": device,
        "host_gb": host,
        "fits": found.fits,
        "way": None if found.best is None else found.best.name,
        "verdict": found.verdict,
        "room": found.room,
        "peak": way.peak,
        "homes_bytes": None if way.solution is None else way.solution.problem.homes_bytes,
        "host_bytes": way.host_bytes,
        "speed": way.speed,
        "speed_bound": way.speed_bound,
        "step_seconds": way.seconds,
        "trace_seconds": found.trace_seconds,
        "seconds": found.seconds,
    }


BENCHMARK = Benchmark(
    about=__doc__,
    file="fits.jsonl",
    measure=measure,
    columns={
        "device": lambda row: row["device"],
        "call": lambda row: row["call"],
        "fits": lambda row: row["way"] or ("as it is" if row["fits"] else "no"),
        "RAM GB": lambda row: "" if row["host_bytes"] is None else f"{row['host_bytes'] / 1e9:.1f}",
        "speed": lambda row: "" if row["speed"] is None else f"{row['speed']:.2f}",
        "no plan above": lambda row: "" if row["speed_bound"] is None else f"{row['speed_bound']:.2f}",
        "after the trace s": lambda row: f"{row['seconds'] - row['trace_seconds']:.0f}",
    },
    names=NAMES,
    options={
        "device": (("rtx4090", "h100"), "whose data sheet gives seconds"),
        "layers": (32, "layers of the model"),
        "host": (0.0, "GB of RAM; 0: as much as what is at home takes, and 64"),
    },
    quick={"names": ["1x2048"], "device": ["rtx4090"], "layers": 16},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
