"""A whole training step within a budget: forward, backward, and each parameter's update as soon as it can be.

    optimizer.zero_grad();  loss = loss_fn(*batch);  loss.backward();  clip_grad_norm_(...);  optimizer.step()

is one graph here and one plan. A gradient is free once its parameter is updated, so that they are never all there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel
from typing_extensions import Unpack

from checkmate.backends import ranks
from checkmate.backends.planner import Bytes, CompileOptions, Options, Planner
from checkmate.backends.tensor_state import modules_within
from checkmate.capture.sharded.shards import is_shard
from checkmate.compiler import CompiledStep, Planned, new_backend, refuse_what_is_no_step
from checkmate.errors import Unsupported
from checkmate.host import is_stand_in
from checkmate.torch_internals.running import tree_leaves, tree_map_only
from checkmate.torch_internals.versions import is_tried
from checkmate.updates import averaging
from checkmate.updates.all_reduce import as_their_modules, exchange_of, refuse_special, stand_aside, wrapped_in
from checkmate.updates.gradients import Clipping, Sums, checked_scaler
from checkmate.updates.insert import Insert
from checkmate.updates.optimizers import checked, parameters_of, refuse_hooks
from checkmate.updates.placement import Placement, checked_device
from checkmate.updates.updates import Updates
from checkmate.verification.compare import compare_whole


def training_step(
    loss_fn: Callable[..., Any],
    optimizer: optim.Optimizer | Iterable[optim.Optimizer],
    budget: Bytes = "fit",
    *,
    clip_norm: float | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    clip_value: float | None = None,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    ema: tuple[AveragedModel, nn.Module] | None = None,
    process_group: Any = False,
    gradients: bool = False,
    alone: bool = False,
    device: torch.device | str | None = None,
    **options: Unpack[CompileOptions],
) -> TrainingStep:
    """Make a whole training step that stays within a budget of bytes, with the numbers of plain PyTorch, bit for bit.

    A call does what ``optimizer.zero_grad()``, ``loss.backward()``, clipping and ``optimizer.step()`` do. The budget is
    for all of it, the optimizer's state included: nothing has to be reserved. Each parameter is updated as soon as its
    gradient is there and nothing of the step reads it any more; its gradient is free then. Settings of the optimizer
    hold from the next call on, whoever sets them; `state_dict` and `load_state_dict` are those of plain training.

    With ``device`` the model and the optimizer's state are at home on the CPU, and the step runs on that device. Within
    a call they are there as far as its plan needs them, and between calls ordinary tensors on the CPU.

    The page docs/train.md says how gradients are clipped, accumulated, scaled and averaged, docs/options.md what each
    option means, and docs/ecosystem.md how ranks train together.

    Args:
        loss_fn: gives a loss, or a tuple of a loss and whatever else; that has no gradient.
        optimizer: updates parameters that ``loss_fn`` uses; or several, each with parameters of its own.
        budget: bytes at any moment of the step, such as ``"8 GB"``; as for `checkmate.compile`.
        options: those of `checkmate.compile`, too; ``verify`` compares parameters, buffers, the optimizer's state and
            the norm as well.

    Returns:
        A `TrainingStep`, a function of a batch: it gives what ``loss_fn`` gives, detached, after the update.

    Raises:
        BudgetError, RuleError, InfeasibleBudget, VerificationError: as for `checkmate.compile`.
        Unsupported: at once or at a call, for what whole steps cannot have, such as hooks, an optimizer that is not
            known to update each parameter alone, and modules of ``fully_shard``; docs/refusals.md lists the messages.
        TypeError, ValueError: at once, for an argument that makes no sense, or does not go with another.

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
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate is a whole number of calls, 1 at least, not {accumulate!r}.")
    refuse_what_is_no_step(loss_fn, "checkmate.training_step")
    optimizers = checked(optimizer, keep=gradients, alone=alone)
    modules = modules_within(loss_fn)
    try:
        with as_their_modules(wrapped_in(modules)):
            ranks.refuse_wrapped(loss_fn)
            ranks.refuse_inner(loss_fn, ())
    except Unsupported as error:
        raise Unsupported(
            f"{error} The updates stay outside of the plan then: loss.backward(), optimizer.step(), with the bytes of "
            "the gradients and of the optimizer's state as reserve=."
        ) from None
    updates = Updates(
        optimizers,
        Clipping(clip_norm, norm_type, error_if_nonfinite, clip_value),
        keep=gradients,
        alone=alone,
        sums=None if accumulate == 1 else Sums(),
        scaling=None if scaler is None else checked_scaler(scaler, optimizers),
        average=None if ema is None else averaging.checked(ema),
        exchange=exchange_of(modules, process_group, optimizers),
    )
    # Refuse work on sharded gradients that takes all shards.
    whole = [
        ("clip_norm=", updates.clipping.most, "clip_value= clips each element"),
        ("scaler=", updates.scaling, "bfloat16 needs none"),
        ("accumulate=", updates.sums, "a larger batch in one call is summed within the step"),
        ("ema=", updates.average, "average between two steps"),
        ("process_group=", updates.exchange, 'the step itself averages what it reduces, Partial("avg")'),
    ]
    has_shards = any(map(is_shard, parameters_of(updates.optimizers)))
    for name, value, instead in whole:
        if has_shards and value is not None:
            raise Unsupported(
                f"{name} looks at whole gradients, and of parameters that are a DTensor each rank has a shard. Without "
                f"it: {instead}. Or update outside of the plan, as plainly: loss.backward(), optimizer.step(), with "
                "checkmate.compile(model, budget=..., reserve=the bytes of gradients and states)."
            )
    settings = Options.of(training_step, CompileOptions.__optional_keys__, options, budget)
    is_one_call = accumulate == 1 and updates.scaling is None and updates.average is None
    if settings.verify and not is_one_call:
        raise ValueError("verify=True compares one call and its update, without accumulate, scaler or ema.")
    if device is not None:
        settings = _placed(device, updates, loss_fn, settings, has_shards=has_shards)
    if settings.verify and settings.kernels == "fused":
        raise ValueError('verify=True compares with plain PyTorch, whose bits kernels="fused" does not promise.')
    can_compare = is_one_call and settings.kernels != "fused"
    verify = not is_tried() and can_compare if settings.verify is None else settings.verify
    return TrainingStep(loss_fn, updates, accumulate, replace(settings, verify=verify))


def _placed(
    device: torch.device | str, updates: Updates, loss_fn: Callable[..., Any], settings: Options, *, has_shards: bool
) -> Options:
    """Have a model on the CPU run on a device, or say why it cannot; give the options that hold then."""
    device = checked_device(device)
    conflicts = [
        ("ranks that train together", has_shards or updates.exchange or wrapped_in(modules_within(loss_fn))),
        ("ema=", updates.average),
        ("overlap=True", settings.overlap),
        ("verify=True, for which a plain step would have to fit there,", settings.verify),
    ]
    for option, value in conflicts:
        if value:
            raise Unsupported(f"device={str(device)!r} is not planned with {option}: leave out one of them.")
    updates.place = Placement(device, functools.partial(modules_within, loss_fn), updates.optimizers, updates.sums)
    return replace(settings, verify=False, host=settings.host or "pinned")


class TrainingStep(Planned):
    """Forward, backward and update for a batch. Made by `training_step`."""

    def __init__(self, loss_fn: Callable[..., Any], updates: Updates, accumulate: int, options: Options) -> None:
        self.loss_fn, self._updates = _with_one_gradient(loss_fn), updates
        self._options = replace(options, verify=False)  # of its parts: here the whole step is verified
        self._accumulate, self._summed = accumulate, 0  # calls of an update, and those that there were
        self._versions: int | None = None  # versions of the gradients in ``.grad`` behind them; None: not known
        self._torn = ""  # what an update that failed has updated, in words; empty: all of it or nothing
        self._running: dict[str, tuple[int, object]] = {}  # the call that goes on: its thread, and what tells it apart
        self._verify, self._wrapped = options.verify, wrapped_in(modules_within(loss_fn))
        self._second_memories, self._planner = options.second_memories, Planner(options)  # of both kinds of calls
        self._plan_anew()
        functools.update_wrapper(self, loss_fn, updated=())
        reference = weakref.ref(self)

        def forget(optimizer: optim.Optimizer) -> None:
            if (step := reference()) is not None:
                step._versions, step._torn = None if accumulate > 1 else step._versions, ""

        for optimizer in updates.optimizers:
            optimizer.register_load_state_dict_post_hook(forget)

    def _plan_anew(self) -> None:
        """Drop all plans and start again with the present updates."""
        self._planned_for = self._updates.signature
        inserts = [self.inserts]
        if self._accumulate > 1:
            inserts.insert(0, Insert(self._updates, last=False))  # of all calls of an update but the last
        backends = [new_backend(self._planner, self._second_memories, insert) for insert in inserts]
        self._steps = [CompiledStep(self.loss_fn, self._options, backend) for backend in backends]
        self._caches = [step._run for step in self._steps]

    @property
    def inserts(self) -> Insert:
        """Insert the updates into a captured ``loss_fn`` for the backend that captures it."""
        return Insert(self._updates)

    def on_device(self) -> AbstractContextManager[None]:
        """Have a model that is at home on the CPU where its step runs, within the block."""
        return nullcontext() if self._updates.place is None else self._updates.place.on_device()

    def batch(self, arguments: Any) -> Any:
        """The arguments of a call, where the step runs."""
        return arguments if self._updates.place is None else self._updates.place.batch(arguments)

    def as_captured(self) -> AbstractContextManager[None]:
        """Keep a ``loss_fn`` wrapped for several ranks to its captured graph, within the block."""
        return as_their_modules(self._wrapped)

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm of all gradients before clipping in the last update; None without clipping."""
        return self._updates.clipping.norm

    @property
    def calls(self) -> int:
        """The calls since the last update, whose gradients ``.grad`` holds the sum of; save it with them.

        To go on from a checkpoint of the middle of an accumulation, load all state, put the gradients into ``.grad``,
        and set this. To begin an update anew, set it to 0, or call `zero_grad` of the optimizers or of the model.
        """
        return self._count()

    @calls.setter
    def calls(self, count: int) -> None:
        if type(count) is not int or count not in range(self._accumulate):
            raise ValueError(
                f"An update takes {self._accumulate} calls: step.calls is an int from 0 to {self._accumulate - 1}, not "
                f"{count!r}."
            )
        if count and not self._gradients():
            raise ValueError("No parameter has a gradient in .grad: put the saved gradients there before step.calls.")
        self._summed, self._versions, self._torn = count, self._versions_now(), ""

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in parameters_of(self._updates.optimizers) if p.grad is not None]

    def _versions_now(self) -> int:
        return sum(gradient._version for gradient in self._gradients())

    def _count(self) -> int:
        """The calls that ``.grad`` holds the sum of; none where that is gone, or was replaced by zeros."""
        if self._accumulate == 1 or (self._versions is not None and not self._summed):
            return 0
        gradients = self._gradients()
        is_as_left = bool(gradients) and self._versions == self._versions_now()
        if not is_as_left and not any(bool(gradient.any()) for gradient in gradients):
            self._summed, self._versions = 0, 0
        if self._versions is None:
            raise Unsupported(
                "Parameters have gradients in .grad, and the training step is new, its optimizer's state was loaded "
                "since, or its last call failed: it does not know of how many calls they are the sum. To go on with "
                "saved ones, step.calls = the number of calls since the last update; to begin the update anew, "
                "step.calls = 0, or optimizer.zero_grad()."
            )
        return self._summed

    def update(self) -> None:
        """Update by the gradients accumulated since the last update, as the last call of an accumulation does.

        For the end of an epoch whose number of batches is no multiple of ``accumulate``; without any it does nothing.
        """
        if self._count():
            self._summed = 0
            with self.on_device():
                self._updates.begin()
                self._updates.finish()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: update parameters, or accumulate gradients, and give ``loss_fn``'s result, detached."""
        if not torch.is_grad_enabled():
            raise Unsupported("A training step needs gradients: call it outside of torch.no_grad().")
        if self._torn:
            raise Unsupported(
                f"The last update failed when {self._torn} were updated; others, perhaps not the next, are as they "
                "were. Load the states of model and optimizer from before (load_state_dict); or go on: step.calls = 0."
            )
        with self._alone():
            if self._verify:
                self._verify = False
                self._compare(args, kwargs)
            # Plan anew if optimizers, schedules or wrappers changed since the last plan.
            updates = self._updates
            refuse_hooks(updates.optimizers)
            if updates.signature != self._planned_for:
                checked(updates.optimizers, keep=updates.keep, alone=updates.alone)
                self._plan_anew()
            refuse_special(self._wrapped)
            stand_aside(self._wrapped)
            if self._count() == 0:
                self._begin()
            last = self._summed == self._accumulate - 1
            args, kwargs = self.batch((args, kwargs))
            with self.on_device():
                result = self._run(args, kwargs, last=last)
            loss, *extras = result if isinstance(result, tuple) else (result,)
            self._summed = 0 if last else self._summed + 1
            self._versions = self._versions_now() if self._summed else 0
            return (loss.detach(), *extras) if isinstance(result, tuple) else loss.detach()

    def _run(self, args: Any, kwargs: Any, *, last: bool) -> Any:
        """Run forward and backward, and with the last call of an update that; give ``loss_fn``'s result."""
        updates = self._updates
        # Forward, with the updates inside the backward of an accumulation's last call.
        with self.as_captured():
            result = self._steps[-1 if last else 0](*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            is_tensor = isinstance(loss, torch.Tensor)
            kind = f"tensor of shape {tuple(loss.shape)} without a gradient" if is_tensor else type(loss).__name__
            raise Unsupported(
                f"loss_fn gave a {kind}; it gives a loss that depends on parameters, or a tuple that begins with one."
            )
        if any(map(is_stand_in, tree_leaves(result))):
            raise Unsupported(
                "loss_fn returns a parameter that is at home on the CPU, and on the device in parts of the step only. "
                "Have it return a copy (.clone()), or read the parameter after the call."
            )
        # Backward: it updates parameters as their gradients are complete.
        refuse_hooks(updates.optimizers)  # loss_fn may have registered some
        scaled_loss = loss if updates.scaling is None else updates.scaling.scaler.scale(loss)
        if updates.sums is not None:
            updates.sums.make_rooms()
        if last:
            updates.begin()
        try:
            scaled_loss.backward()
            if last:
                updates.finish()
        except BaseException:
            self._torn = updates.done if last else ""
            if updates.sums is not None and updates.sums.adds:
                self._versions = None  # sums of calls and of a part of one
            raise
        return result

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse calls from other threads within the block: two updates of the same parameters would mix."""
        call = threading.get_ident(), object()
        running = self._running.setdefault("call", call)  # at once, whatever other threads do
        if running[0] != call[0]:
            raise Unsupported(
                "Another thread is in a call of this training step, which runs one call at a time: each updates the "
                "parameters that the next one reads. Call it from one thread, or within a threading.Lock. For threads "
                "that compute gradients side by side, compile the loss, checkmate.compile(loss_fn, ...), and call "
                "optimizer.step() in one of them."
            )
        try:
            yield
        finally:
            if running is call:  # and not a call within one, as verify makes it
                self._running.clear()

    def _begin(self) -> None:
        """Prepare the first call of an update."""
        for optimizer in self._updates.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._updates.exchange is not None:
            self._updates.exchange.share(self._updates.exchange.buffers())

    def _compare(self, args: Any, kwargs: Any) -> None:
        """Run the step plainly and as planned, and leave everything as it was."""
        updates, clipping = self._updates, self._updates.clipping
        norm = clipping.norm

        def plain() -> tuple[Any, torch.Tensor | None]:
            self._begin()
            with self.as_captured():
                result = self.loss_fn(*args, **kwargs)
            (result[0] if isinstance(result, tuple) else result).backward()
            updates.as_plain()
            return result, clipping.norm

        compare_whole(
            plain,
            lambda: (self(*args, **kwargs), clipping.norm),
            lambda: self.plans[-1] if self.plans else None,
            updates.optimizers,
            (self.loss_fn, args, kwargs),
        )
        clipping.norm = norm


def _with_one_gradient(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Detach all but the first tensor of a tuple that the function returns."""

    @functools.wraps(loss_fn, updated=())
    def loss_of(*args: Any, **kwargs: Any) -> Any:
        result = loss_fn(*args, **kwargs)
        if not isinstance(result, tuple):
            return result
        return result[0], *tree_map_only(torch.Tensor, torch.Tensor.detach, result[1:])

    return loss_of
