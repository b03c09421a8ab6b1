"""Ops that no plan of the whole fits run in parts, with the bits of plain PyTorch and to the byte."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks.networks.unet import UNet
from checkmate.backends import in_parts
from checkmate.capture.splits import table
from checkmate.capture.splits.parts import InParts
from checkmate.capture.ways.batch_norm import normalized
from checkmate.core.problem import Problem
from tests.support.bits import assert_same_bits
from tests.support.sampling import few, long, slow

Step = Callable[..., Tensor]

MANY = int(os.environ.get("CHECKMATE_REGIONS", "6"))  # random steps


class _Attention(nn.Module):
    """By matmul, softmax, matmul: its scores are the largest values."""

    def __init__(self, depth: int, heads: int, dropout: float, *, masked: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.masked = heads, dropout, masked
        self.made, self.norm = nn.Linear(depth, 3 * depth), nn.LayerNorm(depth)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, depth = x.shape
        made = self.made(self.norm(x)).view(batch, length, 3, self.heads, depth // self.heads)
        q, k, v = made.permute(2, 0, 3, 1, 4).unbind()
        scores = q @ k.transpose(-1, -2) * depth**-0.5
        if self.masked:
            scores = scores.masked_fill(torch.ones(length, length, device=x.device).tril() == 0, float("-inf"))
        return x + (F.dropout(scores.softmax(-1), self.dropout) @ v).transpose(1, 2).reshape(x.shape)


def _attention(dropout: float = 0.0) -> tuple[Step, Tensor]:
    layers = nn.Sequential(*(_Attention(16, 4, dropout, masked=True) for _ in range(2)))
    return (lambda x: layers(x).square().mean()), torch.randn(8, 64, 16)


def _attention_with_dropout() -> tuple[Step, Tensor]:
    return _attention(0.1)


def _images() -> tuple[Step, Tensor]:
    """As the first block of MobileNetV2 is: wide between two narrow layers."""
    layers = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6()),
        *(nn.Conv2d(48, 48, 3, 2, 1, groups=48, bias=False), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 8, 1)),
    )
    return (lambda x: layers(x).square().mean()), torch.randn(8, 3, 24, 24)


class _Tied(nn.Module):
    """The matrix that looks words up makes their logits: its gradient is the sum of two of its size."""

    def __init__(self, words: int, depth: int, *, bias: bool = False) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(words, depth), nn.Linear(depth, depth)
        self.bias = nn.Parameter(torch.zeros(words)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.inner(self.words(x)).tanh(), self.words.weight, self.bias), x.roll(1))


def _tied() -> tuple[Step, Tensor]:
    return _Tied(3000, 64), torch.randint(3000, (128,))


Make = Callable[[], tuple[Step, Tensor]]


@functools.cache
def _made(make: Make) -> tuple[Step, Tensor]:
    torch.manual_seed(0)
    return make()


@functools.cache
def _traced(make: Make, **options: str) -> Problem:
    return checkmate.trace(*_made(make), **options)


@functools.cache
def _smallest(make: Make, **options: str) -> Any:
    return checkmate.min_budget(_traced(make, **options), time_limit=1)


def _floor(problem: Problem) -> int:
    return int(problem.unavoidable_bytes.max())


@pytest.mark.parametrize(
    ("make", "share"),
    [
        long(_attention_with_dropout, 0.95),
        slow(_attention, 0.75),
        (_images, 0.85),
    ],
)
def test_below_the_smallest_budget_of_the_whole_regions_are_split(make: Make, share: float) -> None:
    smallest = _smallest(make)
    assert smallest.peak < share * _floor(_traced(make))
    report = checkmate.verify(*_made(make), budget=smallest.peak, time_limit=1)  # bits, and the peak to the byte
    assert report.measured_peak == report.predicted_peak <= smallest.peak
    assert all(" parts: bits equal by " in text for text in smallest.splits)
    assert smallest.splits


@pytest.mark.long
def test_a_region_of_the_gradients_of_two_results_one_of_which_is_not_differentiated() -> None:
    """What it makes of the other's gradient alone is no gradient, and a sum with that is its other term."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(_Attention(16, 4, 0.0, masked=True) for _ in range(2)))
    heads, x = [nn.Parameter(torch.randn(16)) for _ in range(2)], torch.randn(8, 64, 16)
    weights = [*layers.parameters(), *heads]

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (layers(x) * heads[0]).square().mean(), (layers(x.flip(0)) * heads[1]).tanh().mean()

    smallest = checkmate.min_budget(checkmate.trace(step, x), time_limit=1)
    assert smallest.splits
    compiled = checkmate.compile(step, smallest.peak, time_limit=1)
    for used in ((0,), (1,), (0, 1)):
        losses = [torch.stack([run(x)[i] for i in used]).sum() for run in (compiled, step)]
        assert_same_bits(*(torch.autograd.grad(loss, weights, allow_unused=True) for loss in losses))


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "split"), [(131_073, False), (131_072, True)])
def test_elementwise_ops_are_split_where_each_element_keeps_its_code(columns: int, split: bool) -> None:
    """Vectors and the rest of a run round otherwise: with a rest in each part some of 524,292 had other bits."""
    p = torch.randn(4, columns, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return F.elu(F.elu(x * p) + p).square().mean()

    smallest = checkmate.min_budget(checkmate.trace(step, torch.randn(4, columns)), time_limit=1)
    assert any(" parts: bits equal by rounded once, same lanes" in text for text in smallest.splits) is split
    compiled = checkmate.compile(step, smallest.peak, memory="allocator", time_limit=1)
    for seed in range(5):
        x = torch.randn(4, columns, generator=torch.Generator().manual_seed(seed))
        assert_same_bits(*(torch.autograd.grad(run(x), p) for run in (compiled, step)))


@pytest.mark.long
def test_the_sum_of_a_tied_embeddings_gradients_is_written_over_one_of_them_in_parts() -> None:
    torch.manual_seed(0)
    step, x = _tied()
    *_, last = checkmate.trace(step, x).and_smaller()
    matrix = 4 * 3000 * 64
    assert _floor(last) < last.resident + 2.3 * matrix  # one gradient is there, and the other in parts
    loss, added = last.splits  # the loss was split further once the sum was
    assert loss.startswith("loss in ")
    assert added.startswith("add of ")
    report = checkmate.verify(step, x, budget=checkmate.min_budget(last, time_limit=1).peak, time_limit=1)
    assert report.measured_peak == report.predicted_peak < last.resident + 2.3 * matrix


@pytest.mark.slow
def test_layers_that_are_alike_are_split_together() -> None:
    problem = _traced(_attention)
    assert problem.smaller is not None
    split = problem.smaller()
    assert split is not None
    (text,) = split.splits
    assert " and 1 alike in " in text
    assert text.endswith("1 thread" if torch.get_num_threads() == 1 else "threads")
    assert text.count("bits equal by") == 1


def test_where_a_plan_fits_nothing_is_split_nor_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = checkmate.trace(*_attention(0.1))  # what others split is known
    monkeypatch.setattr(in_parts.equal_bits, "same_bits", lambda parts: pytest.fail("tried"))
    assert checkmate.solve(problem, problem.keep_all_peak, time_limit=1).problem.splits == ()


@pytest.mark.slow
def test_a_region_with_other_bits_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = checkmate.trace(*_attention(0.1))
    monkeypatch.setattr(in_parts.equal_bits, "same_bits", lambda parts: False)
    assert [one.splits for one in problem.and_smaller()] == [()]


@pytest.mark.slow
def test_a_refusal_names_the_smallest_budget_with_parts() -> None:
    problem = _traced(_attention)
    solution = checkmate.solve(problem, problem.resident + 10, time_limit=1)
    assert solution.refusal is not None
    assert solution.refusal.min_budget < _floor(problem)
    assert " parts" in solution.message


@pytest.mark.slow
def test_with_data_on_the_meta_device_regions_are_estimated() -> None:
    with torch.device("meta"):
        step, x = _attention(0.1)
    *_, last = checkmate.trace(step, x, profile="roofline:h100").and_smaller()
    assert all(text.endswith(": if the device keeps the bits: not tried here") for text in last.splits)
    assert last.splits


def _random_step(seed: int) -> tuple[Step, tuple[Tensor, ...]]:
    """Some layers of attention or of convolutions, and a loss."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 5 == 4:
        words = draw.choice([300, 700, 2000])
        tied = _Tied(words, draw.choice([12, 16, 40]), bias=draw.random() < 0.5)
        return tied, (torch.randint(words, (draw.choice([8, 33, 96]),)),)
    classes = draw.choice([5, 40, 300])
    if draw.random() < 0.5:
        heads, batch, length = draw.choice([1, 2, 4]), draw.choice([2, 3, 4, 6]), draw.choice([16, 33, 48])
        layers: list[nn.Module] = []
        for _ in range(draw.choice([1, 2])):
            layers.append(_Attention(16, heads, draw.choice([0.0, 0.2]), masked=draw.random() < 0.5))
            if draw.random() < 0.5:
                layers += [nn.Linear(16, 64), draw.choice([nn.GELU, nn.SiLU, nn.ReLU])(), nn.Linear(64, 16)]
        x, y = torch.randn(batch, length, 16), torch.randint(classes, (batch, length))
        model = nn.Sequential(*layers, nn.Linear(16, classes))
        return (lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())), (x, y)
    batch, size, width = draw.choice([2, 4, 5]), draw.choice([12, 16]), 4
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(draw.choice([1, 2, 3])):
        wide = width * draw.choice([1, 2, 6])
        groups = draw.choice([1, 1, width])
        layers.append(nn.Conv2d(width, wide, draw.choice([1, 3]), padding=1, groups=groups, bias=draw.random() < 0.5))
        if draw.random() < 0.5:
            layers.append(nn.BatchNorm2d(wide))
        layers += [draw.choice([nn.ReLU, nn.ReLU6, nn.GELU, nn.Hardswish])()]
        if draw.random() < 0.4:
            layers.append(draw.choice([nn.MaxPool2d, nn.AvgPool2d])(2))
        width = wide
    if draw.random() < 0.3:
        beside = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        deep, head = nn.Sequential(*layers), nn.Conv2d(width + 8, classes, 1)

        def of_pixels(x: Tensor, y: Tensor) -> Tensor:
            seen = F.interpolate(deep(x), size=size)
            return F.cross_entropy(head(torch.cat([seen, beside(x)], 1)), y)

        return of_pixels, (torch.randn(batch, 3, size, size), torch.randint(classes, (batch, size, size)))
    layers += [nn.Conv2d(width, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes)]
    network = nn.Sequential(*layers)
    return (lambda x, y: F.cross_entropy(network(x), y)), (
        torch.randn(batch, 3, size, size),
        torch.randint(classes, (batch,)),
    )


SEEDS = [0, *few(6, [(seed,) for seed in range(1, MANY)])]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps_below_the_floor_of_the_whole_have_the_bits_of_plain_pytorch(seed: int) -> None:
    step, batch = _random_step(seed)
    problem = checkmate.trace(step, *batch)
    *_, last = problem.and_smaller()
    budget = checkmate.min_budget(problem, time_limit=1).peak
    if last is not problem and _floor(last) < budget < _floor(problem):
        budget = random.Random(seed).randint(budget, _floor(problem) - 1)
    report = checkmate.verify(step, *batch, budget=budget, time_limit=1)
    assert report.measured_peak == report.predicted_peak <= budget


@pytest.mark.parametrize("seed", few(3, [(seed,) for seed in range(MANY)]))
def test_random_steps_with_sums_over_parts_are_off_by_rounding_only(seed: int) -> None:
    step, batch = _random_step(seed)
    problem = checkmate.trace(step, *batch, numerics="rounding")
    budget = checkmate.min_budget(problem, time_limit=1).peak
    report = checkmate.verify(step, *batch, budget=budget, time_limit=1, numerics="rounding")
    assert report.measured_peak == report.predicted_peak <= budget


def _wide_images() -> tuple[Step, Tensor]:
    """As in a U-Net: what two layers made is read as one, by a convolution whose weight's gradient needs all of it."""
    down, up = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
    last = nn.Conv2d(32, 4, 3, padding=1)
    return (lambda x: last(torch.cat([down(x).relu(), up(x).relu()], 1)).square().mean()), torch.randn(8, 3, 24, 24)


@pytest.mark.slow
def test_sums_over_parts_fit_where_nothing_with_equal_bits_does() -> None:
    """The forward keeps its bits, gradients are off by no more than the certificate says, the peak is the plan's."""
    splits = _fits_with_rounding_only(_wide_images)
    assert any(" with sums over them: off by " in text for text in splits)


def _fits_with_rounding_only(make: Make) -> tuple[str, ...]:
    """What runs in parts at the smallest budget with rounding, which is far below that with equal bits."""
    rounding = _smallest(make, numerics="rounding")
    assert rounding.peak < 0.85 * _smallest(make).peak
    with pytest.raises(checkmate.InfeasibleBudget):
        checkmate.verify(*_made(make), budget=rounding.peak, time_limit=1)
    report = checkmate.verify(*_made(make), budget=rounding.peak, time_limit=1, numerics="rounding")
    assert report.measured_peak == report.predicted_peak <= rounding.peak
    assert 0 < report.off < 1e-6
    assert "plain PyTorch but for rounding" in str(report)
    return rounding.splits


def _normalized_images() -> tuple[Step, Tensor]:
    """The same with batch norms."""
    down, up = (nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2))
    last = nn.Conv2d(32, 4, 3, padding=1)
    return (lambda x: last(torch.cat([down(x), up(x)], 1)).square().mean()), torch.randn(8, 3, 24, 24)


@pytest.mark.slow
def test_a_batch_norm_is_made_again_image_by_image_with_the_bits_it_had() -> None:
    torch.manual_seed(0)
    step, x = _normalized_images()
    whole, *_, last = checkmate.trace(step, x).and_smaller()
    assert normalized in _inside(last)
    assert _floor(last) < _floor(whole)
    budget = min(checkmate.min_budget(last, time_limit=1).peak, _floor(whole) - 1)
    report = checkmate.verify(step, x, budget=budget, time_limit=1)
    assert report.measured_peak == report.predicted_peak <= budget
    assert report.off == 0


@pytest.mark.long
def test_a_batch_norm_in_halves_fits_where_its_whole_does_not() -> None:
    """The sums of its backward are off by rounding."""
    splits = _fits_with_rounding_only(_images)
    assert any(text.startswith("native_batch_norm_backward_1_input of 2 (BatchNorm2d") for text in splits)
    *_, last = _traced(_images, numerics="rounding").and_smaller()
    regions = in_parts.regions_of(in_parts.joint_of(last).module).values()
    assert last.rounding > max(in_parts.equal_bits.off_in_parts(parts) for _, parts, _ in regions)  # halves add up


@pytest.mark.slow
def test_what_is_off_by_who_knows_how_much_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As halves of a batch norm are where there is no memory to try them."""
    assert len([*_traced(_images).and_smaller()]) > 1
    monkeypatch.setattr(in_parts._Step, "_rounding_of", lambda step, module: inf)
    (whole,) = checkmate.trace(*_images()).and_smaller()
    assert whole.splits == ()


@pytest.mark.slow
def test_a_batch_norm_that_is_made_with_other_bits_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that rounds product and sum each for itself."""
    really = normalized
    monkeypatch.setattr(in_parts.equal_bits, "_tried", {})
    monkeypatch.setattr(in_parts.equal_bits, "normalized", lambda *args: really(*args) * (1 + 1e-6))
    step, x = _normalized_images()
    monkeypatch.setattr(table, "normalized", in_parts.equal_bits.normalized)
    *_, last = checkmate.trace(step, x).and_smaller()
    assert last.splits
    assert in_parts.equal_bits.normalized not in _inside(last)


def _inside(problem: Problem) -> set[Any]:
    """What regions call."""
    regions = in_parts.regions_of(in_parts.joint_of(problem).module).values()
    return {n.target for _, parts, _ in regions for n in parts.part.nodes}


@pytest.mark.slow
def test_an_op_that_regions_about_it_left_whole_is_split_before_them() -> None:
    """A sum of gradients that flow back through a concatenation, which all are made in parts."""
    net = UNet(2, depth=2, base=8)
    x, y = torch.randn(8, 3, 32, 32, device="meta"), torch.zeros(8, 32, 32, dtype=torch.long, device="meta")
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    whole, *_, last = checkmate.trace(step, x, y, profile="roofline:laptop").and_smaller()
    assert any(text.startswith("add_11 of ") for text in last.splits)
    assert _floor(last) < 0.9 * _floor(whole)


def test_a_budget_that_equal_bits_fit_has_these_with_rounding_too() -> None:
    problem, smallest = _traced(_wide_images, numerics="rounding"), _smallest(_wide_images).peak
    assert checkmate.solve(problem, smallest, time_limit=1).problem.rounding == 0
    assert checkmate.verify(*_made(_wide_images), budget=smallest, time_limit=1, numerics="rounding").off == 0


def test_a_sum_that_is_further_off_than_when_it_was_tried_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = _smallest(_wide_images, numerics="rounding").peak
    monkeypatch.setattr(in_parts.equal_bits, "_tried", dict.fromkeys(in_parts.equal_bits._tried, 1e-12))
    with pytest.raises(checkmate.VerificationError, match="16 times what such sums were off by when they were tried"):
        checkmate.verify(*_made(_wide_images), budget=budget, time_limit=1, numerics="rounding")


@pytest.mark.slow
def test_a_region_that_has_other_bits_on_real_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = _smallest(_images).peak
    really = InParts._write

    def off(self: InParts, inputs: Any, results: tuple[Tensor, ...], begin: int) -> None:
        really(self, inputs, results, begin)
        if begin:
            results[0].view(-1)[-1].add_(1.0)

    monkeypatch.setattr(InParts, "_write", off)  # what was tried is known by now
    with pytest.raises(
        checkmate.VerificationError, match=r"in \d+ parts it has other bits than at once on these values"
    ):
        checkmate.verify(*_made(_images), budget=budget, time_limit=1)


@pytest.mark.long
def test_whole_steps_with_sums_over_parts() -> None:
    """The loss has equal bits, and what gradients make is plain PyTorch's but for rounding."""
    torch.manual_seed(0)
    down, up, last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
    model, x = nn.ModuleList([down, up, last]), torch.randn(8, 3, 24, 24)

    def loss_fn(x: Tensor) -> Tensor:
        return last(torch.cat([down(x).relu(), up(x).relu()], 1)).square().mean()

    optimizer = torch.optim.AdamW(model.parameters())
    asked: dict[str, Any] = {"numerics": "rounding", "time_limit": 1, "wait": "best"}
    expected = loss_fn(x).detach()
    step = checkmate.training_step(loss_fn, optimizer, budget="1 GB", **asked)
    budget = checkmate.min_budget(checkmate.trace(step, x, numerics="rounding"), time_limit=1).peak
    step = checkmate.training_step(loss_fn, optimizer, budget=budget, verify=True, **asked)
    assert_same_bits(step(x), expected)
    assert step.plans[0].problem.rounding > 0


@pytest.mark.slow
def test_the_same_op_of_fewer_dimensions_is_not_alike() -> None:
    """What is large is split along its last dimension, which the other one does not have."""
    weight = nn.Parameter(torch.randn(2, 1, 40_000))
    other = nn.Parameter(torch.randn(60_000))

    def step(x: Tensor) -> Tensor:
        return ((weight * x).relu() * x).sum() + ((other * x[0, 0, 0]).relu() * x[0, 0, 1]).sum()

    problem = checkmate.trace(step, torch.randn(1, 1, 40_000))
    *_, last = problem.and_smaller()
    assert last.unavoidable_bytes.max() < problem.unavoidable_bytes.max()
