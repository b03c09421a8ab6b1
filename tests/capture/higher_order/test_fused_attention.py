"""`flex_attention` that the user compiles: the kernel of plain PyTorch, its bits and its bytes, far from all scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import checkmate
from checkmate.capture.higher_order import fused_attention
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from checkmate.torch_internals.capturing import inductor_config
from tests.support.plainly import train_as_plain
from tests.support.simulated_cuda.install import is_installed

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, LENGTH, EACH = 2, 512, 16
SCORES = HEADS * LENGTH * LENGTH * 4  # bytes of all scores

compiled = torch.compile(flex_attention)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + 0.01 * head * (query - key)


class Block(nn.Module):
    """Attention and a layer. On the CPU what it is computed of is frozen: PyTorch has no backward of it there."""

    def __init__(self, attention: Any, *, frozen: bool) -> None:
        super().__init__()
        self.attention = attention
        self.mask: BlockMask = create_block_mask(_causal, None, None, LENGTH, LENGTH, device="cpu")
        self.qkv = nn.Linear(HEADS * EACH, 3 * HEADS * EACH).requires_grad_(not frozen)
        self.linear = nn.Linear(HEADS * EACH, HEADS * EACH)

    def forward(self, x: Tensor) -> Tensor:
        """(LENGTH, width) to a loss."""
        q, k, v = self.qkv(x).view(1, LENGTH, 3 * HEADS, EACH).transpose(1, 2).chunk(3, dim=1)
        mixed = self.attention(q, k, v, score_mod=_bias, block_mask=self.mask)
        return self.linear(mixed.transpose(1, 2).flatten(2)).tanh().sum()


def _model(attention: Any, device: str = "cpu") -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    model, x = Block(attention, frozen=device == "cpu"), torch.randn(LENGTH, HEADS * EACH, device=device)
    model.mask = model.mask.to(device)
    return model.to(device), x


def test_compiled_attention_is_the_kernel_of_plain_pytorch_and_holds_no_scores() -> None:
    dense = checkmate.trace(*_model(flex_attention))
    model, x = _model(compiled)
    fused = checkmate.trace(model, x)
    assert fused.keep_all_peak < dense.keep_all_peak - SCORES
    budget = checkmate.min_budget(fused, time_limit=1).peak
    assert budget < checkmate.min_budget(dense, time_limit=1).bound

    plan, peaks = train_as_plain(model, lambda model, x: model(x), x, budget=budget)
    assert peaks == [plan.peak] * len(peaks)


def test_attention_that_is_called_plainly_stays_dense_as_in_plain_pytorch() -> None:
    model, x = _model(flex_attention)
    plan, _ = train_as_plain(model, lambda model, x: model(x), x, budget=checkmate.trace(model, x).keep_all_peak)
    assert max(plan.problem.profile.workspace_bytes) >= SCORES


def test_without_a_compiler_it_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "_kernels", {})
    model, x = _model(compiled)
    step = checkmate.compile(model, budget="1 GB")

    def refused() -> None:
        no_compiler = inductor_config.patch({"cpp.cxx": ("nowhere++",)})
        with no_compiler, pytest.raises(Unsupported, match=r"(?s)fused_attention\.py:.* It takes g\+\+") as caught:
            step(x)
        assert "flex_attention is called by a function of torch.compile" in str(caught.value)

    assert measure_peak(refused).peak < x.nbytes
    assert model.linear.weight.grad is None


@pytest.mark.long
def test_estimated_for_a_gpu_it_takes_bytes_in_proportion_to_the_length() -> None:
    def step_of(attention: Any, length: int) -> Problem:
        with torch.device("meta"):
            q = torch.randn(1, HEADS, length, 64, requires_grad=True)
        return checkmate.trace(lambda q: attention(q, q, q).sum(), q, profile="roofline:h100")

    short, long, dense = step_of(compiled, 1024), step_of(compiled, 4096), step_of(flex_attention, 4096)
    assert {op.target for op in short.graph.ops} >= {"flex_attention", "flex_attention_backward"}
    assert long.keep_all_peak <= 4 * short.keep_all_peak
    for name in ("flex_attention", "flex_attention_backward"):
        k = [op.target for op in dense.graph.ops].index(name)
        assert dense.profile.workspace_bytes[k] > HEADS * 4096 * 4096 * 4 > long.keep_all_peak


if not is_installed():  # the simulated device runs no kernels of Triton's

    @pytest.mark.cuda
    def test_on_a_gpu_its_backward_is_the_kernel_of_plain_pytorch_too() -> None:
        model, x = _model(compiled, "cuda")
        problem = checkmate.trace(model, x)
        assert {op.target for op in problem.graph.ops} >= {"flex_attention", "flex_attention_backward"}
        assert max(problem.profile.workspace_bytes) < SCORES

        smallest = checkmate.min_budget(problem, time_limit=1).peak
        plan, peaks = train_as_plain(model, lambda model, x: model(x), x, budget=smallest)
        assert max(peaks) <= plan.peak
