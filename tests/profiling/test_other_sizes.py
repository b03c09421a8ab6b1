"""Bytes that ops are said to need at other sizes, most by rules of their kernels, are those that they take there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import checkmate
from checkmate.backends.step_problem import joint_of
from checkmate.profiling.other_sizes import profile_at
from tests.support.sampling import in_turn, long

SIZES = (3, 12, 150)
STEPS: dict[str, Callable[[Tensor], Any]] = {
    "products": lambda x: (x @ x.mT) @ x,
    "a linear": lambda x: F.linear(x, torch.ones(5, x.shape[-1], dtype=x.dtype), torch.ones(5, dtype=x.dtype)),
    "every other column": lambda x: x[..., ::2] @ x[..., ::2].mT,
    "expanded": lambda x: x[:1].expand_as(x) @ x.mT,
    "softmax": lambda x: F.softmax(x @ x.mT, -1),
    "softmax of columns": lambda x: F.softmax(x, 1),
    "log-softmax": lambda x: F.log_softmax(x.mT, -1),
    "a loss": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % x.shape[2]),
    "numbers": lambda x: (x * 3 + 1).clamp(min=0.5).pow(2) / 7,
    "other types": lambda x: (x * torch.ones(x.shape[1], 1, dtype=torch.float16)).double() + x,
    "a norm": lambda x: F.layer_norm(x, x.shape[-1:]).sum((0, 1)),
}
HALF = {"products", "softmax", "a norm"}  # those whose kernels may take other bytes then
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
CASES = [
    (name, dtype) if dtype is torch.float32 or (dtype is torch.bfloat16 and name in HALF) else long((name, dtype))
    for dtype in DTYPES
    for name in STEPS
]


@pytest.mark.usefixtures("one_thread")
@in_turn(case=CASES)
def test_bytes_and_ways_are_those_that_are_measured(case: tuple[str, torch.dtype]) -> None:
    name, dtype = case
    problems = []
    for n in SIZES:
        x = torch.rand(4, n, 16, dtype=dtype, requires_grad=True)
        problems.append(checkmate.trace(lambda x=x: STEPS[name](x).sum()))
    for known in problems:
        for there in problems:
            here = profile_at(joint_of(there), joint_of(known), known.profile, cache=False)
            assert here.workspace_bytes.tolist() == there.profile.workspace_bytes.tolist()
            ways = ({(way.op, way.over, way.workspace) for way in of.ways} for of in (here, there.profile))
            assert next(ways) == next(ways)
