"""The problem of a step at a size that is put in: what a capture at that size gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from transformers import GPT2Config, GPT2LMHeadModel

import checkmate
from benchmarks.networks.convolutional import resnet50
from checkmate import Problem
from checkmate.backends.planner import Options
from checkmate.core.fingerprint import fingerprints
from checkmate.tracing import OpenTrace, traced
from tests.support.sampling import long

Case = tuple[Callable[..., Any], Callable[[int], tuple[Any, Any]]]
SIZES = (1, 2, 7, 8, 12, 31, 600)
FEW = (7, 31)  # of what takes long to capture


def _named(*tensors: Tensor, **named: Any) -> tuple[Any, Any]:
    return tensors, named


def _rows(n: int, *shape: int) -> Tensor:
    return torch.ones(n, *shape)


def _classes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _dropouts() -> Case:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    return lambda x, y: F.cross_entropy(model(x), y), lambda n: _named(_rows(n, 32), y=_classes(n))


def _images() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    return lambda x: model(x).square().mean(), lambda n: _named(
        _rows(n, 3, 16, 16).to(memory_format=torch.channels_last)
    )


def _side_of_images() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
    return lambda x: model(x).mean(), lambda n: _named(torch.ones(2, 3, 3 + n % 100, 3 + n % 100))


def _attention() -> Case:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32))

    def step(tokens: Tensor) -> Tensor:
        h = model(tokens).view(*tokens.shape, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h, is_causal=True).square().mean()

    return step, lambda n: _named(_classes(2, n + 1))


def _question() -> Case:
    """A condition on positions, which takes no data: they are as many as an embedding has rows."""
    model = nn.Embedding(50, 32)

    def step(tokens: Tensor) -> Tensor:
        h = model(tokens)
        in_order = (torch.arange(h.shape[1], device=h.device).expand(len(h), -1).diff() == 1).all()
        return h.sum() if in_order else h.mean()

    return step, lambda n: _named(_classes(2, n + 1))


def _text(length: bool) -> Case:
    config = GPT2Config(vocab_size=50, n_positions=2048, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    shape = (lambda n: (2, n + 1)) if length else lambda n: (n, 17)
    return lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss, lambda n: _named(
        _classes(*shape(n))
    )


def _slices() -> Case:
    """Tokens and labels that are views of one text."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    def make_batch(n: int) -> tuple[Any, Any]:
        text = _classes(n, 17)
        return _named(text[:, :-1], text[:, 1:])

    return lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), make_batch


def _loss_in_parts() -> Case:
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 2000))
    return lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), lambda n: _named(_classes(n, 16))


def _whole_step() -> Case:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = optim.AdamW(model.parameters())
    step = checkmate.training_step(lambda x: model(x).square().mean(), optimizer, budget="1 GB", clip_norm=1.0)
    return step, lambda n: _named(_rows(n, 32))


def _beside() -> Case:
    """A tensor that no op reads grows with the batch, and counts."""
    model = nn.Linear(32, 4)
    return lambda x, mask: model(x).square().mean(), lambda n: _named(_rows(n, 32), mask=_rows(n, n))


def _number_in_batch() -> Case:
    model = nn.Linear(32, 4)
    return lambda x, n: (model(x) / n).sum() + (x * n).sum(), lambda n: ((_rows(n, 32), n), {})


def _attribute() -> Case:
    """The function that makes a batch tells the model its size."""
    model = nn.Linear(32, 4)

    def make_batch(n: int) -> tuple[Any, Any]:
        model.rows = n
        return _named(_rows(n, 32))

    return lambda x: (model(x) * model.rows).sum(), make_batch


def _branch() -> Case:
    model = nn.Linear(32, 4)
    return lambda x: (model(x).tanh() if len(x) > 10 else model(x)).sum(), lambda n: _named(_rows(n, 32))


def _root() -> Case:
    model = nn.Linear(32, 4)
    return lambda x: (model(x) / len(x) ** 0.5).sum(), lambda n: _named(_rows(n, 32))


def _padded() -> Case:
    model = nn.Linear(32, 4)
    return lambda x: model(F.pad(x, (0, 0, 0, -len(x) % 8))).square().mean(), lambda n: _named(_rows(n, 32))


def _two_sizes() -> Case:
    """Half as many of the one as of the other."""
    model = nn.Linear(32, 4)
    return lambda x, y: model(x).sum() + model(y).sum(), lambda n: _named(_rows(n, 32), _rows(n // 2 + 1, 32))


ZOO = {
    "dropout": (_dropouts, 6),
    "images": (_images, 6),
    "the side of images": (_side_of_images, 5),
    "attention": (_attention, 6),
    "a question": (_question, 6),
    "sequences": (lambda: _text(False), 2),
    "lengths": (lambda: _text(True), 2),
    "slices": (_slices, 6),
    "a loss in parts": (_loss_in_parts, 6),
    "a whole step": (_whole_step, 6),
    "a tensor beside": (_beside, 6),
    "a number in the batch": (_number_in_batch, 1),
    "a number of the model": (_attribute, 1),
    "a branch": (_branch, 3),
    "a root": (_root, 6),
    "padding": (_padded, 6),
    "two sizes": (_two_sizes, 5),
}


def _parts(problem: Problem) -> tuple[Any, ...]:
    return fingerprints(problem), problem.resident, problem.profile.state_bytes, problem.name, problem.splits


@pytest.mark.parametrize("net", [long(net) if net in ("sequences", "lengths") else net for net in ZOO])
def test_a_size_put_in_is_the_problem_of_its_own_capture(net: str) -> None:
    make, least = ZOO[net]
    options = Options(profile="roofline:h100")
    with torch.device("meta"):
        step, make_batch = make()
        other = make_batch(6)
        open_trace = OpenTrace(step, make_batch(12), other, options)
        served = 0
        for n in FEW if net in ("sequences", "lengths") else SIZES:
            put_in = open_trace.problem(make_batch(n))
            if put_in is None:
                continue
            served += 1
            problem = traced(step, *make_batch(n), options)
            while problem is not None and put_in is not None:
                assert _parts(put_in) == _parts(problem), n
                problem, put_in = (p.next_split and p.next_split() for p in (problem, put_in))
            assert problem is put_in is None
    assert served >= least, served


@pytest.mark.long
def test_resnet_at_sizes_put_in() -> None:
    options = Options(profile="roofline:h100")
    with torch.device("meta"):
        model = resnet50(1000)
        batches = [_named(_rows(n, 3, 64, 64)) for n in (6, 3, 20)]
        step = lambda x: model(x).square().mean()  # noqa: E731
        put_in = OpenTrace(step, *batches[:2], options).problem(batches[2])
        assert put_in is not None
        assert _parts(put_in) == _parts(traced(step, *batches[2], options))
