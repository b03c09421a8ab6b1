"""Selections by masks, and integers that a step reads: a plan for each number, in the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, assert_each_as_plain, assert_refused, compiled
from tests.support.sampling import long, slow

pytestmark = pytest.mark.usefixtures("forgotten", "one_thread")
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def _adapters(x: Tensor, kinds: Tensor) -> Tensor:
    """Each row is transformed by what its kind says; there may be none of a kind."""
    x = x @ WEIGHT
    out = torch.zeros_like(x)
    for kind in range(2):
        mask = kinds == kind
        out[mask] = (x[mask] @ WEIGHT).tanh()
    return (out + x).square().sum()


def _edges(x: Tensor, kinds: Tensor) -> Tensor:
    """Pairs of different kinds, as columns of places, and what `masked_select`, `nonzero` and `where` say of them.

    Edges of graph networks are such pairs, to which one of each node with itself is added.
    """
    pairs = torch.stack([kinds, kinds.roll(1)])
    kept = torch.cat([pairs[:, pairs[0] != pairs[1]], torch.arange(5).expand(2, -1)], 1)
    degree = torch.zeros(5).scatter_add_(0, kept[1], torch.ones(kept.shape[1]))
    (places,) = torch.where(kinds > 0)
    chosen = kinds.masked_select(kinds > 0)
    y = torch.zeros(5, 4).index_add_(0, kept[1], (x @ WEIGHT)[kept[0]] * degree[kept[0]][:, None]) * x
    return y.square().sum() + (x @ WEIGHT)[places].sin().sum() * chosen.sum() + x[kinds.nonzero()[:, 0]].mean()


def _written(x: Tensor, kinds: Tensor) -> Tensor:
    """A mask of any number is one plan where it can be."""
    y = x @ WEIGHT
    y[kinds > 0] = WEIGHT[0]
    return y.square().sum()


@pytest.mark.parametrize(("step", "plans"), [(_adapters, 2), (_edges, 3), (_written, 1)])
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor, Tensor], Tensor], plans: int) -> None:
    kinds = [0, 1, 1, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 1]
    batches = [(torch.randn(5, 4, requires_grad=True), torch.tensor(each)) for each in kinds]
    assert_each_as_plain(step, *batches, plans=plans, leaves=[WEIGHT])


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


class _Resized(nn.Conv2d):
    """A detector: a size is chosen from a list by the batch, and images are scaled to it."""

    def forward(self, x: Tensor) -> Tensor:
        size = [6.0, 8.0][int((2 * x[0, 0, 0, 0].sigmoid()).item())]
        scale = torch.min(size / torch.tensor(x.shape[-2:]).min().to(torch.float32), torch.tensor(2.0)).item()
        x = F.interpolate(x, scale_factor=scale, mode="bilinear", recompute_scale_factor=True, align_corners=False)
        return (super().forward(x) * [0.5, 2.0][int(x[0, 0, 0, 1].sigmoid().item() * 2)]).sin().sum()


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


class _Split(nn.Linear):
    """Sequences of lengths that a tensor holds, one after the other."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = super().forward(x).tanh().split(lengths.tolist())
        return torch.stack([part.max(0).values for part in parts]).sum()


BOXES = torch.tensor([[0.0, 0, 2, 2.5], [1, 1, 4, 4]]), torch.tensor([[0.5, 0, 3, 3.0]])
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], int | None]] = {
    "queue": (_Queue, lambda i: (torch.randn(4, 8),), 2),
    "resized": (lambda: _Resized(3, 3, 3, padding=1), lambda i: (torch.randn(2, 3, 8, 8),), None),
    "detector": (_Detector, lambda i: (torch.randn(1, 3, 4, 4), BOXES[i % 2], torch.arange(len(BOXES[i % 2]))), 2),
    "split": (lambda: _Split(8, 8), lambda i: (torch.randn(6, 8), torch.tensor(([1, 5], [2, 4])[i % 2])), 2),
}


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


@pytest.mark.parametrize("name", [slow("queue"), long("resized"), long("detector"), slow("split")])
def test_models_train_to_the_bits_of_plain_pytorch(name: str) -> None:
    """Within a large budget, and within the smallest."""
    make, batch, plans = MODELS[name]
    model, batches, budget = make(), [batch(i) for i in range(3)], 10**6

    def step(module: nn.Module, *batch: Tensor) -> Tensor:
        return module(*batch)

    expected = [*_trained(model, batches, step)]
    for _ in range(2):
        run = compiled(step, budget=budget, time_limit=0.3)
        assert_same_bits(_trained(model, batches, run), expected)
        assert len(run.plans) == (plans or len(run.plans)) >= 1
        budget = max(checkmate.min_budget(plan.problem).peak for plan in run.plans)


def test_a_question_without_gradients_does_not_leave_the_step_unplanned() -> None:
    """The grad mode in which it was asked is not that in which the step is compiled."""

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            if x.sum() > 0:
                x = x + 1
        return (WEIGHT * x).sin().sum()

    assert len(assert_as_plain(step, torch.ones(4), leaves=[WEIGHT]).plans) == 1


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (lambda h: (h * [1.0, 2.0][int(h.sigmoid().mean().item() * 1.5)]).sum(), r"\* \[1.0, 2.0\]"),
        (lambda h: h.flatten()[: int(h.argmax())].sum(), "test_boolean_indexing.py"),
    ],
    ids=["indexed", "cut"],
)
def test_a_number_of_activations_is_refused_with_its_line(step: Callable[[Tensor], Tensor], line: str) -> None:
    said = assert_refused(lambda x: step(x @ WEIGHT), torch.ones(2, 4), words=line)
    assert "data-dependent expression" not in said


def test_a_nested_tensor_is_refused_as_one() -> None:
    linear = nn.Linear(4, 4)
    parts = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert_refused(lambda x: linear(x).values().sum(), parts, words="is a nested tensor")
