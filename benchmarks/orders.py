"""How often another order of summation leaves the same bits, in per cent of a product's elements.

    python -m benchmarks.orders

A row has, for a type and a number of terms, the share of the elements that keep their bits when the terms come in
another order: of numbers drawn at random, and of numbers that cancel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.capture.loss.rounding_probes import cancel, made_up

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
TERMS = 8, 16, 32, 64, 256
PRODUCT = 256, 192  # rows and columns


def rows() -> Iterator[Row]:
    """A row for each type and number of terms."""
    torch.set_num_threads(1)
    for dtype in DTYPES:
        for terms in TERMS:
            shares = {}
            for kind in ("cancelling", "random"):
                draw = torch.Generator().manual_seed(terms)
                shapes = (PRODUCT[0], terms), (terms, PRODUCT[1])
                a, b = (made_up(torch.empty(shape, dtype=dtype), draw, 0) for shape in shapes)
                if kind == "cancelling":
                    cancel(torch.ops.aten.mm.default, (a, b), draw)
                order = torch.randperm(terms, generator=draw)
                same = a.mm(b) == a[:, order].contiguous().mm(b[order].contiguous())
                shares[kind] = float(same.float().mean())
            about = {"capability": torch.backends.cpu.get_cpu_capability(), "case": "orders"}
            yield {**about, "dtype": str(dtype).removeprefix("torch."), "terms": terms, **shares}


BENCHMARK = Benchmark(
    __doc__,
    "orders.jsonl",
    rows,
    {"type": "{dtype}", "terms": "{terms}", "cancelling": "{cancelling:.4f}", "random": "{random:.4f}"},
)

if __name__ == "__main__":
    BENCHMARK.run()
