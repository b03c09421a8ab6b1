"""The updates of a training step, one parameter after the other: unscale, clip, update, average.

gradient -> (added to the sum of several) -> (mean of ranks) -> (without the scale) -> (clipped) -> update -> (average)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn, optim

from checkmate.capture.nodes import Held
from checkmate.updates.all_reduce import Exchange
from checkmate.updates.averaging import Average
from checkmate.updates.gradients import HELD_BYTES, Clipping, Scaling, Sums, largest_of, norm_of, order_of
from checkmate.updates.optimizers import Update, about, parameters_of
from checkmate.updates.per_parameter import update_once
from checkmate.updates.placement import Placement

NORM_BYTES = 8  # of the last step's norm, which is kept until there is another


@dataclass(eq=False)
class Updates:
    """The updates of a training step."""

    optimizers: Sequence[optim.Optimizer]  # whose parameters are updated, as `optimizers.checked` gives them
    clipping: Clipping = field(default_factory=Clipping)  # of gradients
    keep: bool = False  # gradients are results of the step as well
    alone: bool = False  # it is promised that optimizers which are not known update each parameter alone
    sums: Sums | None = None  # of gradients of several micro-batches; None: each step updates
    scaling: Scaling | None = None  # of the loss
    average: Average | None = None  # of the parameters
    exchange: Exchange | None = None  # with other ranks
    place: Placement | None = None  # the model is on the CPU between calls; None: it is where the step runs
    _updated: set[torch.Tensor] = field(default_factory=set, init=False)  # in the update that goes on
    _exchanged: set[torch.Tensor] = field(default_factory=set, init=False)  # sums, in the same
    # By parameter of which this backward computes no gradient, and an earlier one did.
    _norms_elsewhere: dict[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def of_parameters(self) -> dict[int, Update]:
        """The update of each parameter that the optimizers have now, by id."""
        groups = ((o, i, group) for o in self.optimizers for i, group in enumerate(o.param_groups))
        return {id(p): Update(o, i, p) for o, i, group in groups for p in group["params"]}

    @property
    def signature(self) -> list[tuple[str, list[int]]]:
        """The key of plans: the updated parameters, their groups, and the kind of update."""
        groups = ((o, group) for o in self.optimizers for group in o.param_groups)
        return [(about(o, group), [id(p) for p in group["params"]]) for o, group in groups]

    @property
    def together(self) -> bool:
        """Tell whether each gradient must be matched with its parameter, updated or not."""
        return self.clipping.most is not None or self.scaling is not None or self.exchange is not None

    @property
    def reach(self) -> list[nn.Module]:
        """The modules held beside a step and its batch."""
        return [] if self.average is None else [self.average.averaged]

    @property
    def held_bytes(self) -> int:
        """Bytes held beside a step: all states, from the first step on, sums, and the scaler's."""
        held = sum(update.state_bytes for update in self.of_parameters().values())
        held += 0 if self.sums is None else self.sums.held_bytes
        held += 0 if self.average is None else self.average.rest_bytes
        held += 0 if self.exchange is None else self.exchange.held_bytes
        held += 0 if self.clipping.most is None else NORM_BYTES
        return held + (0 if self.scaling is None else HELD_BYTES)

    @property
    def held(self) -> list[Held]:
        """All states and sums, from the first step on."""
        states = [u.held(name, size) for u in self.of_parameters().values() for name, size in u.states.items()]
        return states if self.sums is None else [*states, *self.sums.held]

    @property
    def done(self) -> str:
        """How many parameters the update that goes on has updated, in words; empty: none."""
        total = len(parameters_of(self.optimizers))
        return f"{len(self._updated)} of {total} parameters" if self._updated else ""

    def begin(self) -> None:
        """Prepare for an update, before its backward."""
        self._updated, self._exchanged = set(), set()
        self._norms_elsewhere, self.clipping.factor = None, None
        if self.scaling is not None:
            self.scaling.begin()
        if self.average is not None:
            self.average.begin()

    def agree(self, order: Sequence[torch.Tensor]) -> None:
        """Check that all ranks are about to send the same gradients: in this order, then existing ones."""
        if self.exchange is not None:
            places = {p: n for n, p in enumerate(parameters_of(self.optimizers))}
            sent = [*order, *(p for p in self._unsent() if p not in {*order})]
            device = next(iter(places)).device
            self.exchange.agree([(places[p], tuple(p.shape), str(p.dtype)) for p in sent], device)

    def exchange_sum(self, parameter: torch.Tensor) -> None:
        """Average a parameter's gradient over all ranks."""
        assert self.exchange is not None
        assert parameter.grad is not None
        self._exchanged.add(parameter)
        self.exchange.mean(parameter.grad, out=parameter.grad)

    def at_hand(self, parameter: torch.Tensor) -> AbstractContextManager[None]:
        """Within the block, have a parameter where it is updated, with its sum and its state."""
        return nullcontext() if self.place is None else self.place.at_hand(parameter)

    def take_others(self, parameters: Collection[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Average and unscale, once and in place, the gradients of others than these parameters; give their norms.

        An earlier micro-batch used such a parameter, and the last one does not.
        """
        if self._norms_elsewhere is None:
            self._exchange_rest()
            self._norms_elsewhere = {}
            for update in self.of_parameters().values():
                if update.parameter in parameters:
                    continue
                with self.at_hand(update.parameter):
                    if (gradient := update.parameter.grad) is None:
                        continue
                    if self.scaling is not None:
                        self.scaling.decide(update.optimizer, [largest_of(gradient)])
                        self.scaling.unscale(gradient)
                    is_clipped = self.clipping.most is not None
                    norm = norm_of(gradient, self.clipping.order) if is_clipped else gradient.new_empty(0)
                    self._norms_elsewhere[update.parameter] = norm
        return self._norms_elsewhere

    def coefficient(self, norms: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The factor that clips all gradients, from the norms of parameters' gradients and of those elsewhere."""
        both = {**norms, **self.take_others(norms.keys())}
        in_order = [both[p] for p in parameters_of(self.optimizers) if p in both]
        return self.clipping.coefficient([in_order[i] for i in order_of(in_order)])

    def update(self, update: Update, gradient: torch.Tensor, device_copy: torch.Tensor | None = None) -> None:
        """Update a parameter, or its copy that is here, by its gradient as it is; free its sum, unless that is kept."""
        if not self._skips(update.optimizer):
            update(gradient, device_copy)
        if self.average is not None:
            self.average.follow(update.parameter)
        self._updated.add(update.parameter)
        if not self.keep:
            update.parameter.grad = None

    def finish(self) -> None:
        """Do what the backward left; all of it if no captured step has run."""
        if not self._updated:
            self.agree(())
        if self.take_others(self._updated) and not self._updated and self.clipping.most is not None:
            self.coefficient({})
        # Unscale and clip sums that are kept as they were for the update, and update by others.
        for update in self.of_parameters().values():
            is_updated = update.parameter in self._updated
            with self.at_hand(update.parameter):
                gradient = update.parameter.grad
                if gradient is None or (is_updated and self.sums is None):
                    continue
                if is_updated and self.scaling is not None:
                    self.scaling.unscale(gradient)
                self.clipping.in_place(update.parameter)
                if not is_updated:
                    self.update(update, gradient)
        self.clipping.factor = None
        for optimizer in self.optimizers:
            if not self._skips(optimizer):
                update_once(optimizer)
                optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
            if not self.keep:
                optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.finish()
        if self.scaling is not None:
            self.scaling.finish()

    def as_plain(self) -> None:
        """Clip and update as plain PyTorch does, all together, by the gradients of a plain backward."""
        self._updated, self._exchanged = set(), set()
        self._exchange_rest()
        parameters, clip = parameters_of(self.optimizers), self.clipping
        if clip.most is not None:
            clip.norm = nn.utils.clip_grad_norm_(parameters, clip.most, clip.order, error_if_nonfinite=clip.finite)
        for parameter in parameters:
            clip.in_place(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
            if not self.keep:
                optimizer.zero_grad(set_to_none=True)

    def _unsent(self) -> list[torch.Tensor]:
        """Parameters with gradients that are not yet averaged over all ranks."""
        if self.exchange is None:
            return []
        done = self._updated | self._exchanged
        parameters = [p for p in parameters_of(self.optimizers) if p.grad is not None and p not in done]
        averaged = {*self.exchange.parameters()} if parameters else set()
        return [p for p in parameters if p in averaged]

    def _exchange_rest(self) -> None:
        for parameter in self._unsent():
            self.exchange_sum(parameter)

    def _skips(self, optimizer: optim.Optimizer) -> bool:
        return self.scaling is not None and self.scaling.skips(optimizer)
