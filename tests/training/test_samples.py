"""PyTorch's own samples of its ops, in several layouts of their input: the bits of plain PyTorch, or a refusal.

``CHECKMATE_OPS=1000`` with ``-m slow`` tries all ops in place of a few, and ``CHECKMATE_SEED=1`` draws others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.sampling import few

COUNT = int(os.environ.get("CHECKMATE_OPS", "8"))
SEED = int(os.environ.get("CHECKMATE_SEED", "0"))
SAMPLES = 2  # of each op: the first and the last
TYPES = (torch.float32, torch.bfloat16)
OPS = {
    f"{op.name} {op.variant_test_name}".strip() + (" in place" if in_place else ""): (op, in_place)
    for op in op_db
    if op.supports_autograd and torch.float32 in op.dtypes
    for in_place in ([False, True] if op.inplace_variant is not None else [False])
}
DRAWN = random.Random(SEED).sample(sorted(OPS), min(COUNT, len(OPS)))


def _reversed(x: Tensor) -> Tensor:
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of a new tensor, written in place or not
    "contiguous": lambda x: x * 1.25,
    "reversed": lambda x: _reversed(x * 1.25),
    "window": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]] if x.dim() else x * 1.25,
}


def _samples(op: Any, dtype: torch.dtype) -> list[Any]:
    drawn = [s for s in op.sample_inputs("cpu", dtype) if isinstance(s.input, Tensor)]
    usable = [s for s in drawn if s.input.numel() > 3 and s.input.dtype is dtype]
    return [usable[i] for i in sorted({0, len(usable) - 1})][:SAMPLES] if usable else []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(4, [(name,) for name in DRAWN]))
def test_same_bits_as_eager_or_refused(name: str) -> None:
    op, in_place = OPS[name]
    call = op.inplace_variant if in_place else op.op
    for dtype in TYPES:
        for sample in _samples(op, dtype) if dtype in op.dtypes else []:
            for layout in LAYOUTS.values():
                _compare(call, layout, sample, in_place=in_place)


def _compare(call: Callable[..., Any], layout: Callable[[Tensor], Tensor], sample: Any, *, in_place: bool) -> None:
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), (sample.args, sample.kwargs))

    def step(x: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, Any]:
        y = layout(x)
        made = call(y, *args, **kwargs)
        loss = torch.zeros(())
        for t in [*tree_leaves(made), *([y] if in_place else [])]:
            if isinstance(t, Tensor) and t.is_floating_point():
                loss = loss + (t * 0.7 + 0.1).square().sum() + (t.sum(0).square().sum() if t.dim() else 0.0)
            if isinstance(t, Tensor) and t.is_complex():
                loss = loss + torch.view_as_real(t.resolve_conj()).square().sum()
        return loss, made

    def run(step: Callable[..., Any]) -> list[Any]:
        x = sample.input.detach().clone().requires_grad_()
        torch.manual_seed(0)
        loss, made = step(x, args, kwargs)
        gradients = torch.autograd.grad(loss, x, allow_unused=True) if loss.requires_grad else ()
        return [loss, made, gradients, torch.get_rng_state()]

    try:
        expected = run(step)
    except (RuntimeError, NotImplementedError, IndexError, ValueError):  # plain PyTorch cannot do it either
        return
    torch._dynamo.reset()
    try:
        found = run(checkmate.compile(step, budget="1 GB", method="checkpoint-all", cache=False))
    except Unsupported:
        return
    assert_same_bits(found, expected)
