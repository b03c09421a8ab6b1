"""Values of a matrix are computed without its vectors where plain PyTorch does so: they round otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, linalg

from tests.support.plainly import assert_as_plain

MATRICES = [torch.randn(n, n, generator=torch.Generator().manual_seed(n)) for n in (3, 4, 7)]
OF: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": linalg.svdvals,
    "eigvals": linalg.eigvals,
    "eigvalsh": lambda x: linalg.eigvalsh(x @ x.mT),
    "spectral norm": lambda x: linalg.matrix_norm(x, 2),
    "nuclear norm": lambda x: torch.norm(x, "nuc"),
    "condition": linalg.cond,
    "svd": lambda x: linalg.svd(x)[1],
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", OF)
def test_the_bits_of_plain_pytorch(name: str) -> None:
    """Of an input, of a parameter within ``no_grad``, and, but for eigenvalues of any matrix, of a parameter."""
    weight = MATRICES[1].clone().requires_grad_()

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            shown = OF[name](weight)
        trained = weight if name == "eigvals" else OF[name](weight).abs()
        return trained.sum(), shown, *(OF[name](x.mT) for x in inputs)

    assert_as_plain(step, *MATRICES, leaves=[weight])
