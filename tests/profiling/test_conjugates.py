"""Lazy conjugates: kernels write them out in memory of their own, which is measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.plainly import verify_to_the_byte
from tests.support.sampling import in_turn

N = 48
STEPS = {
    "product of matrices": lambda h, t: h @ (h.mH @ t),
    "product": lambda h, t: h.conj() * t,
    "imaginary parts of a conjugate": lambda h, t: (h.conj().imag * t.real) @ t.imag,  # a lazy negative
    "solve": lambda h, t: torch.linalg.solve(h @ h.mH + torch.eye(N), t),
    "cholesky": lambda h, t: torch.cholesky_solve(t, torch.linalg.cholesky(h @ h.mH + torch.eye(N))),
}


@pytest.mark.usefixtures("one_thread")
@in_turn(name=STEPS)
def test_the_peak_with_conjugates_is_the_foretold_one(name: str) -> None:
    h, t = (torch.randn(N, N, dtype=torch.cfloat, requires_grad=True) for _ in range(2))

    def step(x: Tensor) -> Tensor:
        return STEPS[name](h * x, t * x).abs().square().sum()

    verify_to_the_byte(step, torch.ones(()), budget="1 MB")
