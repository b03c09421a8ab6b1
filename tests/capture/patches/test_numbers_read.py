"""Integers that a step reads, and what masks of inputs select, as people write it: in the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.sampling import long, slow

pytestmark = pytest.mark.usefixtures("forgotten")

COSTS: Any = {"profile": "roofline:h100", "time_limit": 0.3}


class _Queue(nn.Module):
    """Momentum contrast (MoCo): keys wait in a queue, and a buffer says where the next ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        for p, q in zip(self.query.parameters(), self.key.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1
        begin = int(self.pointer)
        self.queue[:, begin : begin + len(keys)] = keys.T
        self.pointer[0] = (begin + len(keys)) % self.queue.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).tanh()
        with torch.no_grad():
            key = self.key(x)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        self._enqueue(key)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class _Resized(nn.Module):
    """A detector: a size is chosen from a list by the batch, and images are scaled to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        size = [6.0, 8.0][int((2 * x[0, 0, 0, 0].sigmoid()).item())]
        scale = torch.min(size / torch.tensor(x.shape[-2:]).min().to(torch.float32), torch.tensor(2.0)).item()
        x = F.interpolate(x, scale_factor=scale, mode="bilinear", recompute_scale_factor=True, align_corners=False)
        return (self.conv(x) * [0.5, 2.0][int(x[0, 0, 0, 1].sigmoid().item() * 2)]).sin().sum()


class _Detector(nn.Module):
    """RetinaNet's loss: anchors are matched to boxes, and those that are matched take part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scores, self.boxes = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 1), nn.Conv2d(8, 4, 1)
        y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        self.anchors = torch.stack([x, y, x + 2, y + 2], -1).view(-1, 4)

    def _matched(self, boxes: Tensor) -> Tensor:
        low = torch.max(boxes[:, None, :2], self.anchors[:, :2])
        common = (torch.min(boxes[:, None, 2:], self.anchors[:, 2:]) - low).clamp(min=0).prod(-1)
        quality = common / (4 + (boxes[:, 2:] - boxes[:, :2]).prod(-1)[:, None] - common)
        best, matches = quality.max(0)
        all_matches = matches.clone()
        matches[best < 0.3] = -1
        matches[(best >= 0.3) & (best < 0.4)] = -2
        _, at = torch.where(quality == quality.max(1).values[:, None])
        matches[at] = all_matches[at]
        return matches

    def forward(self, x: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        features, matches = self.conv(x).relu(), self._matched(boxes)
        scores, moves = (head(features)[0].flatten(1).T for head in (self.scores, self.boxes))
        foreground = matches >= 0
        target = torch.zeros_like(scores)
        target[foreground, labels[matches[foreground]]] = 1.0
        valid = matches != -2
        loss = F.binary_cross_entropy_with_logits(scores[valid], target[valid], reduction="sum")
        loss = loss / max(1, foreground.sum())
        (foreground,) = torch.where(matches >= 0)
        wanted = boxes[matches[foreground]] - self.anchors[foreground, :]
        return loss + F.l1_loss(moves[foreground, :], wanted, reduction="sum") / max(1, foreground.numel())


class _Split(nn.Module):
    """Sequences of lengths that a tensor holds, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = self.lin(x).tanh().split(lengths.tolist())
        return torch.stack([part.max(0).values for part in parts]).sum()


def _batches(name: str) -> list[tuple[Tensor, ...]]:
    if name == "detector":
        boxes = [torch.tensor([[0.0, 0, 2, 2.5], [1, 1, 4, 4]]), torch.tensor([[0.5, 0, 3, 3.0]])]
        return [(torch.randn(1, 3, 4, 4), boxes[i], torch.arange(len(boxes[i]))) for i in (0, 1, 0)]
    if name == "split":
        return [(torch.randn(6, 8), torch.tensor(lengths)) for lengths in ([1, 5], [2, 4], [1, 5])]
    return [(torch.randn(4, 8) if name == "queue" else torch.randn(2, 3, 8, 8),) for _ in range(3)]


def _trained(model: nn.Module, batches: list[tuple[Tensor, ...]], step: Callable[..., Tensor]) -> Iterator[Any]:
    """Losses, gradients, parameters, buffers and the random state of a few steps."""
    model = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for batch in batches:
        optimizer.zero_grad()
        loss = step(model, *batch)
        loss.backward()
        yield loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        yield [t.clone() for t in model.state_dict().values()], torch.get_rng_state()


@pytest.mark.parametrize(
    ("name", "make", "plans"),
    [
        slow("queue", _Queue, 2),
        long("resized", _Resized, None),
        long("detector", _Detector, 2),
        slow("split", _Split, 2),
    ],
)
def test_the_bits_of_plain_pytorch(name: str, make: Callable[[], nn.Module], plans: int | None) -> None:
    model, batches, budget = make(), _batches(name), 10**6

    def step(module: nn.Module, *batch: Tensor) -> Tensor:
        return module(*batch)

    expected = [*_trained(model, batches, step)]
    for _ in range(2):
        compiled = checkmate.compile(step, budget=budget, **COSTS)
        assert_same_bits(_trained(model, batches, compiled), expected)
        assert len(compiled.plans) == (plans or len(compiled.plans)) >= 1
        budget = max(checkmate.min_budget(plan.problem).peak for plan in compiled.plans)


def test_a_question_without_gradients_does_not_leave_the_step_unplanned() -> None:
    """The grad mode in which it was asked is not that in which the step is compiled."""
    weight = torch.ones(4, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            if x.sum() > 0:
                x = x + 1
        return (weight * x).sin().sum()

    compiled = checkmate.compile(step, budget="1 MB", **COSTS)
    compiled(torch.ones(4)).backward()
    assert len(compiled.plans) == 1


def test_a_number_of_activations_is_refused_with_its_line() -> None:
    weight = torch.ones(4, requires_grad=True)

    def indexed(x: Tensor) -> Tensor:
        h = x @ weight.outer(weight)
        return (h * [1.0, 2.0][int(h.sigmoid().mean().item() * 1.5)]).sum()

    def cut(x: Tensor) -> Tensor:
        h = x @ weight.outer(weight)
        return h.flatten()[: int(h.argmax())].sum()

    for step, line in ((indexed, "return (h * "), (cut, "test_numbers_read.py")):
        with pytest.raises(Unsupported) as caught:
            checkmate.compile(step, budget="1 MB", **COSTS)(torch.ones(2, 4))
        assert line in str(caught.value)
        assert "data-dependent expression" not in str(caught.value)


def test_a_nested_tensor_is_refused_as_one() -> None:
    linear = nn.Linear(4, 4)
    parts = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(Unsupported, match="is a nested tensor"):
        checkmate.compile(lambda x: linear(x).values().sum(), budget="1 MB", **COSTS)(parts)
