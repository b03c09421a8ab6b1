"""Kernels of the simulated device: the bits of the CPU's, and what CUDA has of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.bits import assert_same_bits
from tests.support.simulated_cuda import install
from tests.support.simulated_cuda.plugin import needed

pytestmark = [pytest.mark.cuda, needed()]


@pytest.fixture(autouse=True)
def _steady_afterwards() -> Iterator[None]:
    yield
    for what in ("attention", "convolutions"):
        install.set_waver(False, what=what)


def gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    return [grad.cpu() for grad in torch.autograd.grad(loss, of)]


def test_a_generator_s_state_is_seed_and_offset() -> None:
    torch.manual_seed(5)
    assert torch.cuda.get_rng_state().view(torch.int64).tolist() == [5, 0]
    first = torch.randn(100, device="cuda")
    state = torch.cuda.get_rng_state()
    assert state.view(torch.int64).tolist() == [5, 4]
    second = torch.randn(100, device="cuda")
    torch.cuda.set_rng_state(state)
    assert_same_bits(torch.randn(100, device="cuda"), second)
    torch.manual_seed(5)
    assert_same_bits(torch.randn(100, device="cuda"), first)
    own = torch.Generator("cuda").manual_seed(5)
    assert_same_bits(torch.randn(100, device="cuda", generator=own), first)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(100, device="cuda", generator=torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_draws_by_seed_and_offset(dtype: torch.dtype) -> None:
    x = torch.ones(10_000, dtype=dtype, device="cuda", requires_grad=True)
    state = torch.cuda.get_rng_state()
    y = F.dropout(x, 0.3)
    assert 0.27 < (y == 0).float().mean().item() < 0.33
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_same_bits(grad == 0, y == 0)
    assert not bool(((F.dropout(x, 0.3) == 0) == (y == 0)).all())
    torch.cuda.set_rng_state(state)
    assert_same_bits(F.dropout(x, 0.3), y)


def test_batch_norm_is_cudnn_s_and_keeps_a_reserve() -> None:
    net, x = nn.BatchNorm2d(8).cuda(), torch.randn(4, 8, 6, 6, device="cuda", requires_grad=True)
    y = net(x)
    assert type(y.grad_fn).__name__ == "CudnnBatchNormBackward0"
    saved: Any = y.grad_fn
    saved._saved_result3.data.zero_()  # unseen by autograd
    with pytest.raises(RuntimeError, match="another reserve"):
        y.sum().backward()


def attention(dtype: torch.dtype, dropout: float) -> tuple[list[Tensor], Tensor]:
    inputs = [torch.randn(2, 3, 64, 16, dtype=dtype, device="cuda", requires_grad=True) for _ in "qkv"]
    return inputs, F.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=True)


@pytest.mark.parametrize(("what", "orders"), [("attention", range(2, 6)), ("convolutions", [2])])
def test_sums_repeat_unless_a_test_has_them_waver(what: str, orders: Sequence[int]) -> None:
    inputs, _ = attention(torch.float32, 0.0)
    x, w = torch.randn(2, 8, 9, 9, device="cuda"), torch.randn(4, 8, 3, 3, device="cuda")

    def run() -> bytes:
        if what == "convolutions":
            return F.conv2d(x, w).cpu().numpy().tobytes()
        return gradients(F.scaled_dot_product_attention(*inputs).square().sum(), inputs)[0].numpy().tobytes()

    assert len({run() for _ in range(5)}) == 1
    install.set_waver(True, what=what)
    assert len({run() for _ in range(5)}) in orders


def test_libraries_of_products_keep_a_workspace_for_each_thread_and_stream() -> None:
    """32 MiB for cuBLAS, 1 for cuBLASLt, which adds a bias."""
    torch._C._cuda_clearCublasWorkspaces()
    taken = []

    def products(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            x = torch.randn(8, 8, device="cuda")
            for product in (lambda: x @ x, lambda: torch.addmm(x[0], x, x), lambda: torch.addmm(x, x, x)):
                before = torch.cuda.memory_allocated()
                product()
                taken.append(torch.cuda.memory_allocated() - before)

    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with ThreadPoolExecutor(1) as other:
            for _ in range(2):
                products(stream)
            for _ in range(2):
                other.submit(products, stream)
        assert taken == [32 << 20, 1 << 20, 0, 0, 0, 0] * 2
        taken.clear()


def test_a_convolution_has_the_kernel_that_its_thread_found_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread tries kernels out where it first meets a convolution; without a search all have the same."""
    x, w = torch.randn(2, 8, 9, 9, device="cuda"), torch.randn(4, 8, 3, 3, device="cuda")

    def convolved() -> tuple[bytes, int]:
        """The result, and the bytes that it took."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        made = F.conv2d(x, w).cpu().numpy().tobytes()
        return made, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    result, given = 4 * 2 * 4 * 7 * 7, x.nbytes + w.nbytes
    plain = convolved()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(convolved).result() == plain == (plain[0], result)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert [convolved(), convolved()] == [(plain[0], 16 * given), plain]
    with ThreadPoolExecutor(1) as other:
        searched, again = (other.submit(convolved).result() for _ in range(2))
    assert searched[0] == again[0] != plain[0]
    assert (searched[1], again[1]) == (16 * given, given + result)
