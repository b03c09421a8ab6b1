"""Optimizers as people write them, outside of `torch.optim`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, optim


class Renamed(optim.AdamW):
    """Changes nothing that a step runs."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=(0.8, 0.95), weight_decay=weight_decay)
        self.made_for = "a test"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({"name": f"group {len(self.param_groups)}", **param_group})


class WarmsUp(optim.AdamW):
    """Counts its steps, sets the rate of each, and then steps as its parent does."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group.setdefault("full", group["lr"])
            group["lr"] = group["full"] * min(1.0, self.steps / 4)
        return super().step(closure)


class Written(optim.Optimizer):
    """Base of optimizers of one's own: one parameter is updated after the other."""

    def __init__(self, params: Any, lr: float = 0.01, **settings: Any) -> None:
        defaults = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0, **settings}
        super().__init__(params, {"lr": lr, **defaults})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad.data, self.state[p], group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        """Prepare a group before its parameters are updated."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def moments(p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Iterable[Tensor]:
    """Update Adam's two moments, without its corrections."""
    if "step" not in state:
        state["step"] = 0
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
    state["step"] += 1
    first, second = group["betas"]
    state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    return state["exp_avg"], state["exp_avg_sq"]


class OwnAdamW(Written):
    """Adam with decoupled decay by ``p.data``, its corrections in Python."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = moments(p, gradient, state, group)
        corrections = [1 - beta ** state["step"] for beta in group["betas"]]
        size = group["lr"] * math.sqrt(corrections[1]) / corrections[0]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.data.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-size)


class DecaysInGradients(Written):
    """Momentum whose decay is written into the gradient."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient.add_(p.data, alpha=group["weight_decay"] + 0.1)
        state["parts"] = [state["parts"][0] * 0.9 + gradient] if state else [gradient.clone()]  # a new one each time
        p.data.add_(state["parts"][0], alpha=-group["lr"])


class Lion(Written):
    """Evolved sign momentum (Chen et al. 2023)."""

    @torch.no_grad()
    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        first, second = group["betas"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(torch.sign(state["exp_avg"] * first + gradient * (1 - first)), alpha=-group["lr"])
        state["exp_avg"].mul_(second).add_(gradient, alpha=1 - second)


class Lamb(Written):
    """Layers' rates by norms of each parameter (You et al. 2020), with its trust ratio in the state."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = moments(p, gradient, state, group)
        step = first / second.sqrt().add(group["eps"])
        if group["weight_decay"] != 0:
            step.add_(p.data, alpha=group["weight_decay"])
        norms = p.data.pow(2).sum().sqrt(), step.pow(2).sum().sqrt()
        ratio = 1.0 if norms[0] == 0 or norms[1] == 0 else (norms[0] / norms[1]).clamp(max=10).item()
        state["trust_ratio"] = ratio
        p.data.add_(step, alpha=-group["lr"] * ratio)


class LambByGroups(Lamb):
    """Counts in its groups, as Lamb of timm does, and corrects by that."""

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(p, gradient / (1 - 0.5 ** group["step"]), state, group)


class BeginsHeavily(OwnAdamW):
    """Its first update takes more than the state that it makes and what later ones take."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["size"] = (p.data.double() + gradient.double().exp() + p.data.double().exp()).sum()
        super().update(p, gradient, state, group)


class Lookahead(optim.Optimizer):
    """Steps by another optimizer."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Wrapper(optim.Optimizer):
    """Shows another's groups as its own, as `accelerate` does."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state
