"""What a trial can tell: how often another order of summation leaves the same bits, and vectors other ones than tails.

    python -m benchmarks.orders

The first kind of row has, for a type and a number of terms, the share of a product's elements that keep their bits when
the terms come in another order: of numbers drawn at random, and of numbers that cancel. The second has, for an op and a
type, the share of elements that have other bits when an array is computed seven elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.capture.rounding_probes import cancel, made_up

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
TERMS = 8, 16, 32, 64, 256
PRODUCT = 256, 192  # rows and columns
SHARES = ("cancelling", "random", "other")
ELEMENTS, AT_A_TIME = 40_960, 7
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    **{op.__name__: op for op in (F.elu, F.silu, F.softplus, F.mish, torch.sigmoid, torch.exp, torch.tanh, torch.sinh)},
    **{op.__name__: op for op in (F.relu, torch.sqrt, torch.rsqrt)},
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "pow(0.3)": lambda x: x.abs().pow(0.3),
    "pow(1.5)": lambda x: x.abs().pow(1.5),
    "complex product": lambda x: torch.view_as_real(torch.complex(x, -x) * torch.complex(x, x)),
}


def orders() -> Iterator[Row]:
    """A row for each type and number of terms."""
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
            yield {"case": "orders", "dtype": _name(dtype), "terms": terms, **shares}


def tails() -> Iterator[Row]:
    """A row for each op and type."""
    for name, op in OPS.items():
        for dtype in DTYPES[: 2 if "complex" in name else None]:
            x = (torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
            whole, parts = op(x), torch.cat([op(part) for part in x.split(AT_A_TIME)])
            other = (whole != parts) & ~(whole.isnan() & parts.isnan())
            yield {"case": "tails", "op": name, "dtype": _name(dtype), "other": float(other.float().mean())}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows(name: str) -> Iterator[Row]:
    """Those of one kind."""
    torch.set_num_threads(1)
    for row in {"orders": orders, "tails": tails}[name]():
        yield row | {"capability": torch.backends.cpu.get_cpu_capability()}


def _cells(row: Row) -> list[str]:
    shares = [f"{row[key]:.4f}" if key in row else "" for key in SHARES]
    return [row.get("op", row["case"]), row["dtype"], str(row.get("terms", "")), *shares]


BENCHMARK = Benchmark(
    __doc__, "orders.jsonl", rows, ("op", "type", "terms", *SHARES), _cells, names=("orders", "tails")
)

if __name__ == "__main__":
    BENCHMARK.run()
