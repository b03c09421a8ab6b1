"""A compiled step hands over its gradients in plain PyTorch's order, to whoever listens to single ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from checkmate.codegen.contributions import Arrival, places_of
from tests.support.bits import assert_same_bits
from tests.support.plainly import compiled
from tests.support.sampling import in_turn, long

Step = Callable[..., Any]
Listen = Callable[[str, Tensor, list[Any]], Any]


def _noise(name: str, p: Tensor, heard: list[Any]) -> Any:
    def hook(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # the backward does not reach it (docs/supported.md)
            return None
        heard.append(name)
        return grad + 0.01 * torch.randn_like(grad)

    return p.register_hook(hook)


def _noise_afterwards(name: str, p: Tensor, heard: list[Any]) -> Any:
    def hook(p: Tensor) -> None:
        if p.grad is not None:
            heard.append(name)
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)

    return p.register_post_accumulate_grad_hook(hook)


def _update(name: str, p: Tensor, heard: list[Any]) -> Any:
    """An optimizer in the backward, whose rate falls from one parameter to the next."""

    def hook(p: Tensor) -> None:
        heard.append(name)
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1 / len(heard))  # type: ignore[arg-type]

    return p.register_post_accumulate_grad_hook(hook)


def _of_a_node(name: str, p: Tensor, heard: list[Any]) -> Any:
    edge = get_gradient_edge(p)
    p.edge = edge  # type: ignore[attr-defined]  # nothing else keeps the node
    return edge.node.register_prehook(lambda grads: heard.append(name))


def _of_two(name: str, p: Tensor, heard: list[Any]) -> Any:
    return register_multi_grad_hook([p], lambda grad: heard.append(name), mode="any")


LISTENERS: dict[str, Listen] = {
    "hook": _noise,
    "post-accumulate hook": _noise_afterwards,
    "optimizer in the backward": _update,
    "hook of a node": _of_a_node,
    "hook of several": _of_two,
}


@pytest.mark.parametrize("listen", LISTENERS.values(), ids=LISTENERS)
def test_who_listens_to_single_gradients_hears_them_in_order(listen: Listen) -> None:
    """Also a layer norm, whose two gradients come at once, a parameter that is frozen, and one that is not used."""

    def train(wrap: Callable[[Step], Step]) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        model.unused = nn.Parameter(torch.ones(3))  # type: ignore[assignment]
        model[3].bias.requires_grad_(False)
        heard: list[Any] = []
        handles = [listen(n, p, heard) for n, p in model.named_parameters() if p.requires_grad]
        step = wrap(lambda x: model[5](model[4](model[3](model[2](model[1](model[0](x)))))).square().mean())
        for _ in range(2):
            step(torch.randn(4, 9)).backward()
        assert handles
        return heard, [p.grad for p in model.parameters() if p.grad is not None] + [*model.parameters()]

    expected, state = train(lambda step: step)
    heard, left = train(compiled)
    assert heard == expected
    assert_same_bits(left, state)


def test_eight_gradients_at_once() -> None:
    """Autograd's heap decides on their order, and is asked while the step is traced."""
    ps = {str(i): nn.Parameter(torch.ones(3) * i) for i in range(8)}

    def order(step: Step) -> list[Any]:
        heard: list[Any] = []
        handles = [_noise(name, p, heard) for name, p in ps.items()]
        step().backward()
        for handle in handles:
            handle.remove()
        return heard

    def step() -> Tensor:
        return torch.stack([*ps.values()]).exp().sum()

    assert order(compiled(step)) == order(step) != sorted(ps)


def _program(r: random.Random) -> tuple[Step, list[Tensor]]:
    """A step with up to three results, and its parameters, some used several times, some not, and one frozen."""
    count, frozen = r.randint(3, 9), r.randrange(12)
    parameters = [torch.randn(4, 4, requires_grad=i != frozen) for i in range(count)]
    kinds = ["mm", "mul", "addcmul", "norm", "tanh", "cat", "linear"]
    ops = [
        (r.choice(kinds), [r.randrange(100) for _ in range(2)], [r.randrange(count) for _ in range(2)])
        for _ in range(r.randint(3, 12))
    ]
    results = r.randint(1, 3)

    def step(x: Tensor, *ps: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for kind, (a, b), (i, j) in ops:
            h, g, p, q = values[a % len(values)], values[b % len(values)], ps[i], ps[j]
            of_kind: dict[str, Callable[[], Tensor]] = {
                "mm": lambda h=h, p=p: h @ p,
                "mul": lambda h=h, g=g, p=p: h + g * p,
                "addcmul": lambda h=h, p=p, q=q: torch.addcmul(p, q, h),
                "norm": lambda h=h, p=p, q=q: F.layer_norm(h, (4,), p[0], q[1]),
                "tanh": lambda h=h, g=g: torch.tanh(h * g),
                "cat": lambda h=h, p=p, q=q: torch.cat([p, h, q])[2:10:2],
                "linear": lambda h=h, p=p, q=q: F.linear(h, p, q[2]),
            }
            values.append(of_kind[kind]())
        return tuple(value.square().mean() for value in values[-results:])

    return step, parameters


BACKWARDS: dict[str, Callable[[Step, Tensor, Sequence[Tensor]], Tensor]] = {
    "of all results": lambda f, x, ps: sum(f(x, *ps)),
    "of the first result": lambda f, x, ps: f(x, *ps)[0],
    "of the last result": lambda f, x, ps: f(x, *ps)[-1],
    "of two calls": lambda f, x, ps: sum(f(x, *ps)) - sum(f(2 * x, *ps)),
    "with another use afterwards": lambda f, x, ps: sum(f(x, *ps)) + sum(p.sum() for p in ps[::2]),
    "with another use before": lambda f, x, ps: sum(f(x + ps[1], *ps)),
}


@in_turn(seed=[*range(6), *map(long, range(6, 60))])
def test_random_programs_call_hooks_in_order(seed: int) -> None:
    """By backwards of all results or one, of several calls, with other uses, and twice."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    step, parameters = _program(r)

    def left_by(run: Step, loss_of: Callable[..., Tensor]) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(seed)
        x = torch.randn(4, 4).requires_grad_(seed % 2 == 1)
        heard: list[Any] = []
        given = [*parameters, x]
        for p in given:
            p.grad = None
        loss = loss_of(run, x, parameters)
        hear = [(str(i), p) for i, p in enumerate(given) if p.requires_grad]
        handles = [listen(n, p, heard) for n, p in hear for listen in (_noise, _noise_afterwards)]
        if loss.requires_grad:
            loss.backward(retain_graph=True)
            loss.backward()
        for handle in handles:
            handle.remove()
        return heard, [p.grad for p in given]

    run = compiled(step)
    for name, loss_of in BACKWARDS.items():
        expected, gradients = left_by(step, loss_of)
        heard, left = left_by(run, loss_of)
        assert heard == expected, name
        assert [g is None for g in left] == [g is None for g in gradients]
        assert_same_bits([g for g in left if g is not None], [g for g in gradients if g is not None])


def test_places_where_some_results_are_differentiated() -> None:
    """The first gradient is complete at node 5 by the first result, and at node 9, with the second's, by the other."""
    twice, at_nine, at_seven = ((5, 0, 1), (9, 1, 2)), ((9, 0, 3),), ((7, 0, 1),)
    both = [Arrival(2, 2, twice), Arrival(1, 0, at_nine), Arrival(0, None), Arrival(1, 1, at_seven)]
    assert places_of(both, 1) == [2, 0, None, 1]
    assert places_of(both, 2) == [1, 0, None, None]


def test_a_gradient_that_takes_the_place_of_a_sum_is_not_written_over() -> None:
    """Of the sum of two gradients only one is defined, which is another parameter's: a reader may not write there."""
    torch.manual_seed(62)
    p, q, s, t = (torch.randn(4, 4, requires_grad=True) for _ in range(4))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addcmul(s, t, p) + torch.stack([q, q, p, x]).sum(0)
        return h.square().mean(), F.layer_norm(h, (4,), t[0], s[1]).square().mean()

    x = torch.randn(4, 4)
    run = compiled(step)
    for i in range(2):
        expected = torch.autograd.grad(step(x)[i], [p, q, s, t])
        assert_same_bits(torch.autograd.grad(run(x)[i], [p, q, s, t]), expected)
