"""Steps are traced as a GPU runs them, where there is none."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends import compilation
from checkmate.backends.passes import JointGraph
from checkmate.backends.step_problem import joint_of
from checkmate.capture.sizes import open_sizes, put_in
from checkmate.capture.without_device import cuda
from checkmate.capture.without_device.cuda import CUDNN, EFFICIENT, FLASH, MATH, Attention, choose
from checkmate.errors import Unsupported
from checkmate.memory.native import Unbuildable
from checkmate.torch_internals.capturing import maybe_mark_dynamic

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")

CALL = Attention(
    *(15, 1, 4, 12, 12, 12, 512, 512, 64, 64, 64),  # bfloat16, (batch, 12 heads, 512, 64)
    *(0, 0, 0, 0, 1, 1),
)
H100, A100, L4, T4 = (9, 0), (8, 0), (8, 9), (7, 5)
FLOAT, DOUBLE = 6, 7  # c10::ScalarType


def _dims(width: int) -> dict[str, int]:
    return dict.fromkeys(("head_dim", "key_dim", "value_dim"), width)


@pytest.mark.parametrize(
    ("changed", "capability", "kernel"),
    [
        ({}, H100, CUDNN),
        ({}, (10, 0), CUDNN),
        ({}, (12, 0), FLASH),
        ({}, A100, FLASH),
        ({}, T4, MATH),  # no bfloat16 there
        ({"scalar": 5}, T4, EFFICIENT),
        ({"scalar": FLOAT}, H100, EFFICIENT),
        ({"scalar": DOUBLE}, H100, MATH),
        ({"one_type": 0}, H100, MATH),
        ({"masked": 1}, H100, CUDNN),
        ({"masked": 1}, A100, EFFICIENT),
        ({"causal": 1, "keys": 600}, A100, EFFICIENT),
        (_dims(256), H100, CUDNN),
        (_dims(256), (10, 0), FLASH),
        ({"head_dim": 192, "key_dim": 192, "value_dim": 128}, (10, 0), CUDNN),
        (_dims(216), L4, EFFICIENT),
        ({**_dims(216), "trains": 0}, L4, FLASH),
        (_dims(60), A100, FLASH),
        ({**_dims(60), "masked": 1}, A100, MATH),  # rows of 120 bytes
        ({"value_dim": 32}, A100, EFFICIENT),
        ({"key_heads": 4, "value_heads": 4}, A100, MATH),  # as heads that are not grouped they do not match
        ({"key_heads": 4, "value_heads": 4, "grouped": 1}, A100, FLASH),
        ({"key_heads": 4, "value_heads": 4, "grouped": 1, "masked": 1}, A100, MATH),
        ({"in_line": 0}, H100, MATH),
        ({"keys": 1}, H100, FLASH),
        ({"queries": 1, "dropout": 1}, H100, FLASH),
        ({"queries": 0}, H100, MATH),
        ({"dims": 2}, H100, MATH),
    ],
)
def test_the_kernel_of_an_attention(changed: dict[str, int], capability: tuple[int, int], kernel: int) -> None:
    assert choose(CALL._replace(**changed), capability, cuda.CUDNN_VERSION) == kernel


def test_what_is_switched_off_is_not_chosen() -> None:
    with nn.attention.sdpa_kernel([nn.attention.SDPBackend.FLASH_ATTENTION, nn.attention.SDPBackend.MATH]):
        assert choose(CALL, H100, cuda.CUDNN_VERSION) == FLASH
        assert choose(CALL._replace(scalar=FLOAT), H100, cuda.CUDNN_VERSION) == MATH
    assert choose(CALL, H100, 91000) == FLASH  # an older cuDNN


def _traced(device: str, **settings: Any) -> checkmate.Problem:
    """A step with attention, dropout and both norms, on a device and under autocast with these settings."""
    with torch.device("meta"):
        stem = nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), nn.BatchNorm2d(64), nn.Flatten(2))
        attention = nn.MultiheadAttention(64, 4, batch_first=True, dropout=0.1)
        head = nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 10))
        batch = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", **settings):
            x = stem(x).transpose(1, 2)
            return F.cross_entropy(head(x + attention(x, x, x, need_weights=False)[0]).mean(1), y)

    return checkmate.trace(step, *batch, profile=f"roofline:{device}")


def _ops(problem: checkmate.Problem) -> Counter[str]:
    """How many ops of each name there are."""
    return Counter(re.sub(r"^(aten|checkmate)\.", "", op.target).partition(".")[0] for op in problem.graph.ops)


@contextmanager
def _deterministic(wanted: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "half"), [("h100", "cudnn"), ("a100", "flash")])
def test_the_ops_are_those_of_a_gpu(device: str, half: str) -> None:
    for kind, settings in ((half, {"dtype": torch.bfloat16}), ("efficient", {"enabled": False})):
        ops = _ops(_traced(device, **settings))
        attention = f"_scaled_dot_product_{kind}_attention"
        assert ops[attention] == ops[f"{attention}_backward"] == 1
        assert ops["native_dropout"] == ops["native_dropout_backward"] == 1
        assert ops["save_device_state"] == 2  # of dropout, and of the attention's
        of_cudnn = kind == "efficient"  # which PyTorch does not give batch norms in bfloat16
        assert ops["batch_norm"] == ops["batch_norm_backward"] == of_cudnn
        assert not any(name.startswith(("bernoulli", "bmm")) for name in ops)


def test_the_backward_of_attention_with_dropout_draws_nothing() -> None:
    """The backward reads the forward's seed and offset, and may run again where its sums have an order."""
    for device, half in (("a100", True), ("h100", False)):
        for strict, pinned in ((False, "adds in no fixed order on a GPU"), (True, None)):
            with _deterministic(strict):
                ops = _traced(device, enabled=half, dtype=torch.bfloat16).graph.ops
            (backward,) = (op for op in ops if "attention_backward" in op.target)
            assert backward.pinned == pinned, (device, backward.target)


def test_what_adds_in_no_order_runs_once() -> None:
    """The loss has seen the sums of one run; those of another may have other bits."""
    with torch.device("meta"):
        weight, x, index = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16), torch.zeros(4, dtype=torch.long)

    def step(x: Tensor, index: Tensor) -> Tensor:
        places = index.cumsum(0)  # of whole numbers: the same in any order
        rows = weight.sin()[places].cumsum(1)
        return torch.zeros_like(weight).index_add(0, index, rows * x).exp().sum()

    def pinned(device: str) -> set[str]:
        problem = checkmate.trace(step, x, index, profile=f"roofline:{device}")
        return {op.target.split(".")[1] for op in problem.graph.ops if op.pinned == "adds in no fixed order on a GPU"}

    assert pinned("h100") == {"cumsum", "index_add"}
    assert pinned("laptop") == set()
    with _deterministic():
        assert pinned("h100") == set()


def test_ops_are_those_of_where_the_step_is_planned_to_run() -> None:
    """A model with data goes where its batch is planned to be; a number may stay on the CPU."""
    net, half, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.tensor(0.5), torch.ones(2, 4)
    with torch.device("meta"):
        layer, on_meta = nn.Linear(4, 4), torch.ones(2, 4)

    def asking(x: Tensor) -> Tensor:
        y = layer(x) + torch.arange(4, device=x.device)
        if (torch.arange(3, device="cuda") > 1).any():  # of constants, which have values
            y = y.sin()
        return (y.exp() if x.is_cuda and y.device == torch.device("cuda", 0) else y).sum()

    def scaled(x: Tensor, by: Any = 1) -> Tensor:
        return net(x * by).sum()

    of_block = _ops(_traced("laptop", enabled=False))
    assert (of_block["_native_batch_norm_legit_functional"], of_block["native_dropout"]) == (1, 0)
    for step, given, device, ops in (
        (asking, (on_meta,), "a100", {"exp": 1, "sin": 1}),
        (scaled, (on_meta, half), "l4", {"native_dropout": 1}),
        (scaled, (on_meta, half.to("meta")), "l4", {"native_dropout": 1}),
        (scaled, (x,), "h100", {"native_dropout": 0}),
    ):
        found = _ops(checkmate.trace(step, *given, profile=f"roofline:{device}"))
        assert {name: found[name] for name in ops} == ops, (step, device)
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_a_cache_begins_with_no_elements_wherever_they_are() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.ones(4, 8)

    def step(x: Tensor) -> Tensor:
        cache = torch.tensor([], dtype=x.dtype, device=x.device)
        return torch.cat([cache, model(x).flatten()]).square().sum()

    problem = checkmate.trace(step, x, profile="roofline:h100")
    assert sum(value.size_bytes > 0 for value in problem.graph.values if value.producer is None) == 3
    assert problem.resident == 3 * 512  # weight, bias and batch, a block each


def test_a_question_of_random_numbers_is_refused() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(10, 10), torch.ones(4, 10)

    def step(x: Tensor) -> Tensor:
        return layer(x if torch.rand((), device=x.device) < 0.5 else 2 * x).sum()

    with pytest.raises(Unsupported, match="depends on random numbers that the step draws"):
        checkmate.trace(step, x, profile="roofline:a100")


def test_two_threads_plan_for_two_devices_and_nothing_of_it_is_left() -> None:
    with ThreadPoolExecutor(2) as pool:
        h100, a100 = pool.map(partial(_traced, dtype=torch.bfloat16), ("h100", "a100"))
    assert _ops(h100)["_scaled_dot_product_cudnn_attention"] == 1
    assert _ops(a100)["_scaled_dot_product_flash_attention"] == 1
    assert all(value.size_bytes % 512 == 0 for value in h100.graph.values)  # blocks
    assert checkmate.solve(h100, int(0.9 * h100.keep_all_peak), method="next-use").plan is not None
    with pytest.raises(ZeroDivisionError), cuda.as_on_cuda(H100):
        _ = 1 / torch.cuda.is_bf16_supported() - 1 / 0
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.ones(3, device="cuda")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        torch.autocast("cuda")
    x = torch.ones(3, requires_grad=True)
    x.square().sum().backward()
    assert x.grad is not None


def test_without_a_compiler_a_line_of_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unbuildable("no C++ compiler was found")

    monkeypatch.setattr(cuda.Source, "load", refuse)
    with caplog.at_level(logging.WARNING, "checkmate.capture"):
        ops = _ops(_traced("h100", enabled=False))
    assert ops["_native_batch_norm_legit_functional"] == 1
    assert "planned with the ops that run on the CPU" in caplog.text
    assert "no C++ compiler was found" in caplog.text


@pytest.mark.parametrize(
    ("device", "causal", "kernel"), [("h100", True, "cudnn"), ("a100", True, "flash"), ("a100", False, "flash")]
)
def test_a_length_stays_open_and_each_has_the_kernel_that_is_chosen_for_it(
    device: str, causal: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        embed, attend = nn.Embedding(50, 32).bfloat16(), nn.Linear(32, 96).bfloat16()

    def step(tokens: Tensor) -> Tensor:
        q, k, v = attend(embed(tokens)).unflatten(-1, (3, 2, 16)).movedim(2, 0).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        return F.cross_entropy((mixed @ embed.weight.T).flatten(0, 1).float(), tokens.flatten())

    def ops(tokens: Tensor) -> list[str]:
        """The ops of a step that is traced for this length."""
        problem = checkmate.trace(step, tokens, profile=f"roofline:{device}")
        return [node.name for node in joint_of(problem).step.module.graph.nodes if "attention" in str(node.target)]

    lengths = {n: torch.zeros(4, n, dtype=torch.long, device="meta") for n in (30, 24, 17, 2)}
    expected = {n: ops(tokens) for n, tokens in lengths.items()}
    assert all(any(kernel in op for op in found) for found in expected.values())
    # A trace for open sizes stands for all of these.
    put_in_place = list[dict[int, list[str]]]()

    def note(joint: JointGraph) -> None:
        assert len(open_sizes(joint.module.graph)) == 1
        graphs = {n: put_in(joint.module, (n,)).graph for n in lengths}
        put_in_place.append(
            {n: [node.name for node in graph.nodes if "attention" in str(node.target)] for n, graph in graphs.items()}
        )

    monkeypatch.setattr(compilation, "GRADIENT_REWRITES", [*compilation.GRADIENT_REWRITES, note])
    maybe_mark_dynamic(lengths[30], 1)
    with pytest.raises(Unsupported):  # a plan is for fixed sizes
        ops(lengths[30])
    assert put_in_place[0] == expected
