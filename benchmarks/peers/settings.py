"""The ways to save memory that are compared: each makes of a network a step that trains it.

What is PyTorch's is called as its documentation says: `torch.utils.checkpoint` around blocks, `checkpoint_sequential`,
selective checkpointing by a policy, the `activation_memory_budget` of `torch.compile`, and `torch.compile` over
checkpointed blocks. Ours are `checkmate.compile` by its default and by the heuristics of the literature.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint_sequential, create_selective_checkpoint_contexts

import checkmate
from benchmarks.networks.batches import Step
from benchmarks.peers.subjects import Subject
from checkmate.capture.fusion.kernels import Kernels

aten = torch.ops.aten
OURS = "checkmate"
BLOCKS = {1: "each block", 2: "each second block"}  # that a checkpoint is around
SEGMENTS = (2, 3, 4, 6, 8)  # of checkpoint_sequential
TENTHS = tuple(i / 10 for i in range(11))  # of activation_memory_budget
SOLVERS = ("dp", "greedy", "ilp")  # of activation_memory_budget_solver
INDUCTOR_BUDGETS = (1.0, 0.5, 0.0)
HEURISTICS = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "griewank", "dtr")

_MATMULS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_attention_math.default,
}  # fmt: skip
_NORMS_WITH_STATE = {  # and what counts their batches
    aten.add_.Tensor,
    aten.native_batch_norm.default,
    aten._batch_norm_with_update.default,
    aten.cudnn_batch_norm.default,
}


@dataclass(frozen=True)
class Setting:
    """A way to train, with the value of its knob. ``config`` is in force while the step is compiled."""

    family: str
    knob: str
    build: Callable[[Subject], Step]
    config: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, repr=False)
    budget: int | None = None  # bytes, where they were named
    exact: bool = True  # False where other kernels run: equal within a tolerance at best

    @property
    def name(self) -> str:
        """The family and the value of its knob."""
        return f"{self.family} {self.knob}".strip()


def _plain(subject: Subject) -> Step:
    return subject.plain


EAGER = Setting("eager", "", _plain)


def peers(subject: Subject) -> Iterator[Setting]:
    """All ways of PyTorch itself that fit the network, at every value of their knobs."""
    for every, knob in BLOCKS.items():
        yield Setting("checkpoint", knob, partial(checkpointed, every=every))
    for segments in SEGMENTS:
        if any(len(chain) > segments for chain in subject.network.chain(subject.module)):
            yield Setting("checkpoint_sequential", f"{segments} segments", partial(_segments, segments=segments))
    for kept, ops in (("keeps matmuls", _MATMULS), ("keeps matmuls and norms", _MATMULS | _NORMS_WITH_STATE)):
        if ops == _MATMULS or any(isinstance(part, _BatchNorm) for part in subject.module.modules()):
            yield Setting("selective", kept, partial(checkpointed, context_fn=partial(_keeping, ops, 1)))
    yield Setting(
        "selective", "keeps each second matmul", partial(checkpointed, context_fn=partial(_keeping, _MATMULS, 2))
    )
    for every, knob in BLOCKS.items():
        yield Setting("compile + checkpoint", knob, _compiled(partial(checkpointed, every=every), "aot_eager"))
    for solver in SOLVERS:
        for share in TENTHS:
            config = partial(_memory_budget, share, solver)
            yield Setting("compile budget", f"{solver} {share:g}", _compiled(_plain, "aot_eager"), config)


def named(subject: Subject, family: str, knob: str, budget: int | None, time_limit: float) -> Setting:
    """The way to train that a row names."""
    if family == OURS:
        assert budget is not None
        return ours(budget, time_limit)
    known = [EAGER, *peers(subject)]
    return next(setting for setting in known if (setting.family, setting.knob) == (family, knob))


def inductor(share: float = 1.0, build: Callable[[Subject], Step] = _plain) -> Setting:
    """`torch.compile` by its default, which runs kernels of its own, with this share of activations."""
    config = partial(_memory_budget, share, "dp")
    return Setting("inductor", f"dp {share:g}", _compiled(build, "inductor"), config, exact=False)


def inductor_peers() -> Iterator[Setting]:
    """`torch.compile` by its default at some budgets."""
    return map(inductor, INDUCTOR_BUDGETS)


def ours(budget: int, time_limit: float, method: str = "auto", kernels: Kernels = "eager") -> Setting:
    """`checkmate.compile` within a budget of bytes, in an arena."""
    family = OURS if method == "auto" else "heuristics"
    knob = f"{budget / 1e6:.2f} MB" if method == "auto" else f"{method} {budget / 1e6:.2f} MB"
    options: Any = {"time_limit": time_limit, "method": method, "memory": "arena", "wait": "best"}
    options["kernels"] = kernels
    return Setting(
        family, knob, lambda subject: checkmate.compile(subject.plain, budget=budget, **options), budget=budget
    )


def checkpointed(subject: Subject, *, every: int = 1, **options: Any) -> Step:
    """Checkpoints around blocks, by the wrapper that PyTorch has for it."""
    module = subject.twin()
    wrapped = {id(block) for block in subject.network.blocks(module)[::every]}
    plain = checkpoints.CheckpointImpl.NO_REENTRANT
    wrap = partial(checkpoints.checkpoint_wrapper, checkpoint_impl=plain, **options)
    checkpoints.apply_activation_checkpointing(module, wrap, check_fn=lambda part: id(part) in wrapped)
    return subject.network.loss(module)


def _segments(subject: Subject, *, segments: int) -> Step:
    module: Any = subject.twin()
    for chain in subject.network.chain(module):
        layers = nn.Sequential(*chain)
        run: Any = partial(checkpoint_sequential, layers, segments, use_reentrant=False)
        chain.forward = run  # type: ignore[method-assign]
    return subject.network.loss(module)


def _keeping(ops: set[Any], every: int) -> tuple[Any, Any]:
    """Contexts of a block whose results of every so-maniest of ``ops`` are kept, and of no other."""
    seen = {False: 0, True: 0}  # by whether it runs again

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in ops:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        kept = op in _NORMS_WITH_STATE or seen[context.is_recompute] % every == 0
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    # an activation in place changes what is kept, and running it again on that changes nothing: the bits are compared
    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)


def _compiled(build: Callable[[Subject], Step], backend: str) -> Callable[[Subject], Step]:
    def build_compiled(subject: Subject) -> Step:
        step: Any = build(subject)
        code = step.__code__.replace()  # Dynamo keeps what it compiled with the code, whatever the configuration was
        own = types.FunctionType(code, step.__globals__, closure=step.__closure__)
        return torch.compile(own, backend=backend, dynamic=False)

    return build_compiled


@contextmanager
def _memory_budget(share: float, solver: str) -> Iterator[None]:
    options = {"activation_memory_budget": share, "activation_memory_budget_solver": solver}
    with torch._inductor.config.patch(fallback_random=True), torch._functorch.config.patch(options):
        yield  # without the fallback Inductor draws other numbers


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of some points (peak, time) no other is below or at in both: what there is to be better than.

    >>> front([(3, 1.0), (1, 2.0), (2, 2.5), (2, 1.5), (2, 1.5)])
    [1, 3, 0]
    """
    chosen: list[int] = []
    least = float("inf")
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < least:
            chosen.append(i)
            least = points[i][1]
    return chosen
