"""Ops that others measured, one by one, and what is estimated for them.

Both tables are in a folder of the user's, ``vidur/*_llama2_7b_mlp.csv.gz`` and ``neusight/H100/*.csv``, as
microsoft/vidur and sitar-lab/NeuSight have them (MIT, both):

- Vidur: medians of the kernels of a layer of Llama-2-7B in float16, by number of tokens and ranks that share it. Its
  products and its addition are PyTorch's, and estimated here. Its norms, activations, rotations and lookups are not:
  vLLM has kernels of its own for them. Times are whole microseconds, so that those below 10 are left out.
- NeuSight: forward and backward of the ops of GPT-2 Large in float32, on an H100, between events. What it takes to
  measure nothing, 7 µs, is taken off; what then is below 50 µs is left out, as it is the host's time as much. Its
  dropout's backward is left out, as it is that of another formula, which can be differentiated again.
"""

from __future__ import annotations

import csv
import gzip
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.profiling.data_sheets import DEVICES, Device
from checkmate.profiling.roofline import roofline_seconds

FOLDER = "CHECKMATE_MEASURED_OPS"  # the variable that says where the tables are
TABLES = ("vidur a100", "vidur h100", "neusight h100 1", "neusight h100 4")
TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
WIDTH, INNER = 4096, 11008  # of Llama-2-7B
LEAST_OF_VIDUR, LEAST_OF_NEUSIGHT = 10e-6, 50e-6  # seconds

Case = tuple[str, str, float, float]  # the kind of op, which one, seconds measured and estimated


def cases(table: str) -> Iterator[Case]:
    """What a table has, and what is estimated for it."""
    folder = Path(os.environ[FOLDER])
    source, device, *batch = table.split()
    if source == "vidur":
        yield from _of_vidur(folder / f"vidur/{device}_llama2_7b_mlp.csv.gz", DEVICES[device])
    else:
        path = folder / f"neusight/{device.upper()}/gpt2_large-train-1024-{batch[0]}.csv"
        yield from _of_neusight(path, int(batch[0]), DEVICES[device])


def _of_vidur(path: Path, device: Device) -> Iterator[Case]:
    with gzip.open(path, "rt") as file:
        rows = [*csv.DictReader(file)]
    for row in rows:
        tokens, ranks = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
        if tokens not in TOKENS:
            continue
        products = {
            "attn_pre_proj": (WIDTH, 3 * WIDTH // ranks),
            "attn_post_proj": (WIDTH // ranks, WIDTH),
            "mlp_up_proj": (WIDTH, 2 * INNER // ranks),
            "mlp_down_proj": (INNER // ranks, WIDTH),
        }
        for name, (terms, columns) in products.items():
            seconds = float(row[f"time_stats.{name}.median"]) / 1e3
            if seconds >= LEAST_OF_VIDUR:
                x, w = _empty(tokens, terms, half=True), _empty(terms, columns, half=True)
                yield "product", f"{name}, {tokens} tokens, {ranks} ranks", seconds, _forward(torch.mm, (x, w), device)
        seconds = float(row["time_stats.add.median"]) / 1e3
        if seconds >= LEAST_OF_VIDUR and ranks == 1:
            x = _empty(tokens, WIDTH, half=True)
            yield "pointwise", f"add, {tokens} tokens", seconds, _forward(torch.add, (x, x.clone()), device)


def _of_neusight(path: Path, batch: int, device: Device) -> Iterator[Case]:
    with path.open() as file:
        rows = [*csv.DictReader(file)]
    nothing = statistics.median(float(row["latency"]) for row in rows if "getitem" in row["target"]) / 1e3
    tokens, width, scores = batch * 1024, 1280, (batch, 20, 1024, 1024)
    hidden = (batch, 1024, 4 * width)
    least = _empty()
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool, device="meta")
    ops: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "addmm": ("product", torch.addmm, _linear(tokens, width, 3 * width)),
        "addmm_1": ("product", torch.addmm, _linear(tokens, width, width)),
        "addmm_2": ("product", torch.addmm, _linear(tokens, width, 4 * width)),
        "addmm_3": ("product", torch.addmm, _linear(tokens, 4 * width, width)),
        "lm_head": ("product", lambda x, w: torch.mm(x, w.t()), (_empty(tokens, width), _empty(50257, width))),
        "matmul": ("product", torch.matmul, (_empty(batch, 20, 1024, 64), _empty(batch, 20, 64, 1024))),
        "matmul_1": ("product", torch.matmul, (_empty(*scores), _empty(batch, 20, 1024, 64))),
        "truediv": ("pointwise", lambda x: x / 8.0, (_empty(*scores),)),
        "where": ("pointwise", lambda x: torch.where(mask, x, least), (_empty(*scores),)),
        "softmax": ("pointwise", lambda x: x.softmax(-1), (_empty(*scores),)),
        "transformer_h_0_attn_attn_dropout": (
            "pointwise",
            lambda x: torch.ops.aten.native_dropout(x, 0.1, True)[0],
            (_empty(*scores),),
        ),
        "mul": ("pointwise", lambda x: x * 0.5, (_empty(*hidden),)),
        "pow_2": ("pointwise", lambda x: x**3.0, (_empty(*hidden),)),
        "add_12": ("pointwise", torch.add, (_empty(*hidden), _empty(*hidden))),
        "tanh": ("pointwise", torch.tanh, (_empty(*hidden),)),
        "mul_3": ("pointwise", torch.mul, (_empty(*hidden), _empty(*hidden))),
        "transformer_h_0_ln_1": (
            "norm",
            lambda x, w, b: F.layer_norm(x, (width,), w, b),
            (_empty(batch, 1024, width), _empty(width), _empty(width)),
        ),
    }
    by_name = {row["Name"]: row for row in rows}
    for name, (kind, op, inputs) in ops.items():
        estimates = {"fw": _forward(op, inputs, device)}
        if "dropout" not in name:
            estimates["bw"] = _backward(op, inputs, device)
        for phase, estimated in estimates.items():
            seconds = float(by_name[name][f"{phase}_latency"]) / 1e3 - nothing
            if seconds >= LEAST_OF_NEUSIGHT:
                yield kind, f"{name} {phase}, batch {batch}", seconds, estimated


def _empty(*shape: int, half: bool = False) -> Tensor:
    dtype = torch.float16 if half else torch.float32
    return torch.empty(shape, dtype=dtype, device="meta")


def _linear(tokens: int, terms: int, columns: int) -> tuple[Tensor, ...]:
    return _empty(columns), _empty(tokens, terms), _empty(terms, columns)


def _forward(op: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: Device) -> float:
    return _seconds(make_fx(op)(*inputs), device)


def _backward(op: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: Device) -> float:
    def both(*inputs: Tensor) -> Any:
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        result = op(*inputs)
        return torch.autograd.grad(result, inputs, torch.empty_like(result))

    return _seconds(make_fx(both)(*inputs), device) - _forward(op, inputs, device)


def _seconds(graph: fx.GraphModule, device: Device) -> float:
    aten = torch.ops.aten
    made = (aten.empty_like.default, aten._unsafe_view.default)  # which run nothing, as views do
    nodes = [n for n in graph.graph.nodes if isinstance(n.target, OpOverload) and n.target not in made]
    runs = [n for n in nodes if not any(result.alias_info for result in n.target._schema.returns)]
    return sum(roofline_seconds(n, device) for n in runs)
