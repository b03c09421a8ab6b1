"""A whole training step within a budget: forward, backward, and each parameter's update as soon as it can be.

    optimizer.zero_grad();  loss = loss_fn(*batch);  loss.backward();  clip_grad_norm_(...);  optimizer.step()

is one graph here and one plan. A gradient is free once its parameter is updated, so that they are never all there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim
from torch.utils._pytree import tree_map_only

from checkmate.backends import ranks
from checkmate.backends.plan_on import Planning
from checkmate.backends.planner import MOST_PLANS, Memory, Options, Wait
from checkmate.compiler import CompiledStep, new_backend
from checkmate.core.rules import Rules
from checkmate.core.solution import Solution
from checkmate.errors import Unsupported
from checkmate.memory.report import ArenaReport
from checkmate.profiling.profilers import Choice
from checkmate.updates.insert import Updates
from checkmate.updates.supported import checked
from checkmate.verification.whole_steps import compare_whole


def training_step(
    loss_fn: Callable[..., Any],
    optimizer: optim.Optimizer | Iterable[optim.Optimizer],
    *,
    budget: int | float | str,
    clip_norm: float | None = None,
    norm_type: float = 2.0,
    gradients: bool = False,
    verify: bool = False,
    method: str = "auto",
    time_limit: float = 60.0,
    reserve: int | float | str = 0,
    profile: Choice = "measure",
    cache: bool = True,
    max_plans: int = MOST_PLANS,
    memory: Memory | None = None,
    wait: Wait = "first",
    rules: Rules | None = None,
) -> TrainingStep:
    """Make a whole training step that stays within a budget of bytes, with the numbers of plain PyTorch, bit for bit.

    The step does what this does, with the same bits in parameters, buffers and the optimizer's state::

        optimizer.zero_grad()
        loss = loss_fn(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)  # those of the optimizer, in its order
        optimizer.step()

    The budget is for all of it: parameters, buffers, the batch, the optimizer's state, activations and gradients. Each
    parameter is updated as soon as its gradient is there and nothing of the step reads it any more; its gradient is
    free then. With ``clip_norm`` no update can begin before all gradients were there: the plan keeps them until then,
    or lets go of some and runs their part of the backward a second time, whichever costs less within the budget.

    Learning rates and other settings hold from the next call on, whoever sets them; `state_dict` and `load_state_dict`
    of model and optimizer are those of plain training. If a step fails in its backward, on Ctrl-C for instance, some
    parameters may be updated and others not: load a checkpoint.

    Args:
        loss_fn: gives a loss, or a tuple of a loss and whatever else; that has no gradient.
        optimizer: updates parameters that ``loss_fn`` uses; or several, each with parameters of its own. Optimizers of
            `torch.optim` but for LBFGS and SparseAdam.
        budget: bytes at any moment of the step; "8 GB", or "8G", is 8e9.
        clip_norm: scale all gradients so that the norm of all together is this at most.
        norm_type: the order of that norm.
        gradients: leave the gradients in ``.grad`` after the step, clipped if they are: all of them are there then.
        verify: run the first call plainly as well, from the same state, and compare what it gives, parameters, buffers,
            gradients that are kept, the optimizer's state, the norm and the random state bitwise, and the measured peak
            with the planned one. Needs the memory of a plain step, once.
        method, time_limit, reserve, profile, cache, max_plans, memory, wait, rules: as for `checkmate.compile`.

    Returns:
        A function of a batch. It gives what ``loss_fn`` gives, detached, after the parameters were updated. Its
        ``.norm`` is the norm of all gradients before clipping; ``.plans``, ``.planning``, ``.wait()`` and ``.memory()``
        are those of a compiled step.

    Raises:
        BudgetError, RuleError, InfeasibleBudget: as for `checkmate.compile`.
        Unsupported: at once, for other optimizers, or hooks on their `step`; at the first call, if the step cannot be
            captured as one graph. At once, too, if ``loss_fn`` holds a module that is wrapped or sharded for several
            ranks: their gradients are not exchanged within a plan.
        ValueError: at once, if ``clip_norm`` is no positive number.
        VerificationError: at the first call, with ``verify``, if anything differs.

    >>> import torch
    >>> class Loss(torch.nn.Linear):
    ...     def forward(self, x, y):
    ...         return torch.nn.functional.mse_loss(super().forward(x), y)
    >>> loss_fn = Loss(64, 8)
    >>> optimizer = torch.optim.AdamW(loss_fn.parameters())
    >>> step = training_step(loss_fn, optimizer, budget="1 MB", clip_norm=1.0)
    >>> loss = step(torch.ones(16, 64), torch.ones(16, 8))
    >>> print(step.plans[0].status, loss_fn.weight.grad)
    Status.OPTIMAL None
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is a positive number, not {clip_norm!r}.")
    about: dict[str, Any] = {"profile": profile, "cache": cache, "max_plans": max_plans, "memory": memory}
    options = Options(budget, method, time_limit, reserve, wait=wait, rules=rules, **about)
    _refuse_ranks(loss_fn)
    updates = Updates(checked(optimizer), clip_norm, norm_type, keep=gradients)
    return TrainingStep(loss_fn, updates, options, verify=verify)


class TrainingStep:
    """Forward, backward and update for a batch. Made by `training_step`."""

    def __init__(
        self, loss_fn: Callable[..., Any], updates: Updates, options: Options, *, verify: bool = False
    ) -> None:
        self.loss_fn, self._updates, self._options = _with_one_gradient(loss_fn), updates, options
        self._planned_for = updates.signature
        self._step: CompiledStep[..., Any] = self._new_step()
        self._verify = verify
        functools.update_wrapper(self, loss_fn, updated=())

    def _new_step(self) -> CompiledStep[..., Any]:
        return CompiledStep(self.loss_fn, self._options, new_backend(self._options, self._updates))

    @property
    def updates(self) -> Updates:
        """What is done with the gradients, for a backend that captures ``loss_fn``."""
        return self._updates

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step before they were clipped; None: none were."""
        return self._updates.norm

    @property
    def plans(self) -> list[Solution]:
        """The `Solution` of each captured graph that is kept, in the order of capture."""
        return self._step.plans

    @property
    def planning(self) -> list[Planning]:
        """What is known of each plan in ``plans``: its cost and bound, and whether a better one may still come."""
        return self._step.planning

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until planning has ended, so many seconds at most, and tell whether it has."""
        return self._step.wait(timeout)

    def memory(self) -> ArenaReport:
        """What the arenas of this step did when it last ran; it prints as a table."""
        return self._step.memory()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``loss_fn`` gives, detached, after the parameters were updated."""
        if not torch.is_grad_enabled():
            raise Unsupported("A training step needs gradients: call it outside of torch.no_grad().")
        if self._verify:
            self._verify = False
            self._compare(args, kwargs)
        updates = self._updates
        if updates.signature != self._planned_for:
            checked(updates.optimizers)
            self._planned_for, self._step = updates.signature, self._new_step()
        for optimizer in updates.optimizers:
            optimizer.zero_grad(set_to_none=True)
        done, result = updates.done, self._step(*args, **kwargs)
        loss, *others = result if isinstance(result, tuple) else (result,)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise Unsupported(
                f"loss_fn gave {_described(loss)}; it gives a loss that depends on parameters, or a tuple that begins "
                "with one."
            )
        loss.backward()
        if updates.done == done:  # none of the parameters was in the step, or torch.compile is turned off
            updates.all_at_once()
        for optimizer in updates.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        return (loss.detach(), *others) if isinstance(result, tuple) else loss.detach()

    def _compare(self, args: Any, kwargs: Any) -> None:
        """Run the step plainly and as it is planned, and leave everything as it was."""
        updates, norm = self._updates, self._updates.norm

        def plain() -> tuple[Any, torch.Tensor | None]:
            for optimizer in updates.optimizers:
                optimizer.zero_grad(set_to_none=True)
            result = self.loss_fn(*args, **kwargs)
            (result[0] if isinstance(result, tuple) else result).backward()
            updates.all_at_once()
            return result, updates.norm

        def planned() -> tuple[Any, torch.Tensor | None]:
            return self(*args, **kwargs), updates.norm

        def plan_now() -> Solution | None:
            return self.plans[-1] if self.plans else None

        compare_whole(plain, planned, plan_now, updates.optimizers, (self.loss_fn, args, kwargs))
        updates.norm = norm


def _refuse_ranks(loss_fn: Callable[..., Any]) -> None:
    """Refuse modules that exchange their gradients with other ranks, outside of what is captured."""
    try:
        ranks.refuse_wrapped(loss_fn)
        ranks.refuse_inner(loss_fn, ())
    except Unsupported as error:
        raise Unsupported(
            f"{error} The updates stay outside of the plan then: loss.backward(), optimizer.step(), with the bytes of "
            "the gradients and of the optimizer's state as reserve=."
        ) from None


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)} without a gradient"
    return f"a {type(result).__name__}"


def _with_one_gradient(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function; of a tuple that it gives only the first has a gradient."""

    @functools.wraps(loss_fn, updated=())
    def loss_of(*args: Any, **kwargs: Any) -> Any:
        result = loss_fn(*args, **kwargs)
        if not isinstance(result, tuple):
            return result
        return result[0], *tree_map_only(torch.Tensor, torch.Tensor.detach, result[1:])

    return loss_of
