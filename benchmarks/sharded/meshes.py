"""Which mesh of eight H100s, and which batch, trains a language model of 1.4 billion parameters fastest: no rank runs.

    python -m benchmarks.sharded.meshes [MESH ...]       # by default all: rows in results/meshes.jsonl
    python -m benchmarks.sharded.meshes --report         # from the rows: results/meshes.md

The model is made as on each rank: its matrices are split over the dimension "tensor", with a sum over its ranks after
each pair (Shoeybi et al., Megatron-LM, 2019), and all parameters are shards over the dimension "data", gathered where
they are read. Text of 2,048 tokens in bfloat16; costs and links are estimates of data sheets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from checkmate import sweep_meshes
from checkmate.core.answer import Table
from checkmate.units import format_bytes, format_seconds
from examples.ranks import shard

WIDTH, HEAD, LAYERS, WORDS, TOKENS = 2048, 128, 24, 32000, 2048
MESHES = {"8": (8,), "4 x 2": (4, 2), "2 x 4": (2, 4), "1 x 8": (1, 8)}
SAMPLES, BUDGETS = 16, ("6 GB", "12 GB", "24 GB")  # samples of the batch of all ranks; bytes of each
HEADER = ("mesh", "batch", "budget", "samples/s", "step", "waits", "peak", "gap", "seconds")


class Block(nn.Module):
    """A rank's part of a layer of a transformer, of which so many ranks have one each."""

    def __init__(self, mesh: Any, parts: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH // parts), nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH // parts), nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """The same on all ranks, whose gradient is the sum of theirs."""
        if self.mesh is None:
            return x
        whole: Tensor = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return whole

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        if self.mesh is None:
            return x
        part = DTensor.from_local(x, self.mesh, [Partial()])
        whole: Tensor = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return whole

    def forward(self, x: Tensor) -> Tensor:
        """Attention and two matrices, each around a residual connection."""
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in self.qkv(self.split(self.norms[0](x))).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.summed(self.out(attended))
        return x + self.summed(self.down(F.gelu(self.up(self.split(self.norms[1](x))))))


class LanguageModel(nn.Module):
    """The loss of the next words."""

    def __init__(self, mesh: Any, parts: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh, parts) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """Cross entropy."""
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def make_step(mesh: Any, size: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The step of a rank, and its batch."""
    split = mesh["tensor"] if mesh.ndim == 2 else None
    model = LanguageModel(split, 1 if split is None else split.size()).bfloat16()
    text = torch.zeros(size, TOKENS, dtype=torch.long)
    return shard(model, mesh["data"]), (text, text)


def rows_of(name: str) -> Iterator[Row]:
    """The rows of a mesh, for each budget."""
    mesh = MESHES[name]
    for budget in BUDGETS:
        sizes = [SAMPLES // mesh[0]]
        (point,) = sweep_meshes(make_step, [mesh], sizes, budget, profile="roofline:h100", time_limit=60, jobs=1)
        found = point.solution
        yield {
            "mesh": name,
            "batch": point.size,
            "budget": found.budget,
            "ops": len(found.problem.graph.ops),
            "throughput": point.throughput,
            "step": point.seconds,
            "waited": found.waited,
            "peak": point.peak,
            "gap": point.gap,
            "seconds": found.seconds,
            "refused": point.message,
        }


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The last row of each mesh and budget."""
    return sorted(latest(rows, "mesh", "budget"), key=lambda row: (-row["budget"], [*MESHES].index(row["mesh"])))


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    rows = in_order(rows)
    return document(
        "Meshes of eight GPUs",
        f"Made by `python -m benchmarks.sharded.meshes` at {where_from(rows)}: a language model of {LAYERS} layers of "
        f"{WIDTH}, {SAMPLES} texts of {TOKENS} tokens to a step of all ranks. A mesh is (data) or (data x tensor) "
        "ranks. Bytes and seconds are estimates for an H100 with links of NVLink's data sheet; no GPU ran any of this. "
        "*Waits* is the share of the step in which the processor runs nothing.",
        Table(HEADER, [_cells(row) for row in rows], HEADER[1:]),
    )


def _cells(row: Row) -> list[str]:
    where = [row["mesh"], str(row["batch"]), format_bytes(row["budget"])]
    if row["peak"] is None:
        return [*where, "no plan", "", "", "", "", f"{row['seconds']:.1f}"]
    figures = [f"{row['throughput']:.1f}", format_seconds(row["step"]), f"{row['waited'] / row['step']:.1%}"]
    return [*where, *figures, format_bytes(row["peak"]), f"{row['gap']:.2%}", f"{row['seconds']:.1f}"]


BENCHMARK = Benchmark(
    __doc__, "meshes.jsonl", rows_of, HEADER, _cells, names=(*MESHES,), packages=("torch",), page=markdown
)

if __name__ == "__main__":
    BENCHMARK.run()
