"""Try, before a plan uses it, whether an op in place gives the bits that it gives otherwise.

An op of the table of candidates (`checkmate.capture.inplace.rules`) runs plainly and over each of its arguments, in the
shapes, strides and types of the trace, on sets of numbers:

    finite     of both signs and many sizes, with zeros of both signs and denormal numbers among them
    special    the same, and in the first elements of each tensor infinities, NaNs and the largest numbers
    usual      between 0.1 and 0.9, as for its seconds
    cancelling  finite, the terms of its sums opposite in pairs, so that another order of summation shows in half
               precision too (`checkmate.capture.loss.rounding_probes`)

Pointwise ops run on the special set only: nothing special spreads to other elements there. What runs block by block
runs on the cancelling set only: it takes long, and what is special in its weights would spread to all results. A way
counts if all results are the same each time, bit by bit, and the first lies where the argument lay. On the CPU a trial
takes the memory of the op, its arguments and results, and of a few thousand numbers.

Why so few inputs are enough: what is written over an argument is computed by the op's own kernel, of tensors of the
same shapes and strides, so in the same lanes and order; only what is read after it has been written could differ,
and that shows in each such element. In blocks a kernel has other shapes, and may sum in another order: which one does
not depend on the numbers, and on those that cancel it shows in most elements.

Which kernel runs depends on the size of a block, the processor and the number of threads. By an estimate, a file of
another machine or a profile that is handed in nothing has been tried here: what is to run block by block by such costs
is tried first. So are, on a GPU, the two gradients of a convolution, which a rewrite takes apart, since a library
chooses the kernels there. On the CPU they have the same bits, in thousands of random cases
(`checkmate.capture.rewrite.split_convolutions`). And so is whether a convolution there repeats its bits.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.fx as fx

from checkmate.capture.device import in_autograds_thread, same_random_state
from checkmate.capture.fusion import open_sizes
from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.inplace.aliasing import position_of
from checkmate.capture.inplace.rules import call_over, positions_to_try, written_of
from checkmate.capture.joint import Joint
from checkmate.capture.loss.rounding_probes import cancel, flat, made_up, repeat, same_bytes
from checkmate.capture.nodes import rehearsed, tensors
from checkmate.capture.provenance import named
from checkmate.capture.random_draws import DEVICE_STATE_BYTES, Drawn, drawn_again, save_device_state
from checkmate.core.problem import Profile
from checkmate.memory.available import within_memory
from checkmate.profiling.cost_cache import OpKey, conditions_on
from checkmate.profiling.one_op import attempt, call_of, device_of_op, key_of
from checkmate.torch_internals.running import outside_tracing

log = logging.getLogger("checkmate.profiling")
SETS = ("special", "finite", "usual")
POINTWISE_SETS = ("special",)
BLOCK_SETS = ("cancelling",)
SETS_AGAIN = ("special", "drawn")  # of a kernel that was tried at other sizes
LENGTH = 2**14  # of the numbers of a set, which repeat
SPECIAL = 2**12  # special numbers at the begin of a tensor
AGAIN = 3  # times that an op runs again in a thread, to see whether it wavers
MOST_INTEGER = 2**24  # of the whole numbers that the kernel of a group is tried on
STRIDE = 5003  # by how many numbers the sets of two arguments are apart; a prime, so that all kinds meet

T = TypeVar("T")
Count = Callable[[int, Callable[[], Any]], Any]  # makes a call over the argument at a position, and counts its bytes

_known: dict[tuple[str, OpKey], Any] = {}  # by trial and op, what this process found


def ways_of(node: fx.Node, run: partial[Any], count: Count) -> dict[int, bool]:
    """The positions of arguments that an op could write over by the table, each with whether a trial kept the bits.

    None of them where there is no memory to try.

    Args:
        run: the op with made-up inputs, that are written to.
        count: makes the last call of each position; where it was not called, the op cannot write there.
    """
    todo = dict.fromkeys(positions_to_try(node), False)
    trial = partial(attempt, node, lambda: _try(node, run, count, todo))
    tried = not todo or within_memory(trial, named(node), "it is not tried over its inputs")
    return todo if tried else {}


def _try(node: fx.Node, run: partial[Any], count: Count, does: dict[int, bool]) -> None:
    target: Any = node.target
    numbers = [t for t in tensors((run.args, run.keywords)) if t.is_floating_point() or t.dtype is torch.bool]
    written = written_of(target)
    assert written is not None
    if isinstance(target, Kernel):
        for position in does:
            target.compiled(position)  # which allocates, and is no part of a run
    sets = POINTWISE_SETS if written.pointwise else BLOCK_SETS if written.block is not None else SETS
    good = [*does]
    for name in sets:
        _fill_all(numbers, name, run)
        plain = tensors(run())
        for position in [*good]:
            over = run.args[position]
            into, args, kwargs = call_over(target, run.args, run.keywords, position)
            call = partial(rehearsed(into), *args, **kwargs)
            if not _is_same(node, partial(count, position, call) if name == sets[-1] else call, over, plain):
                good.remove(position)
            _fill_all(numbers, name, run)
        del plain  # before there is the next one
    does.update(dict.fromkeys(good, True))


def _is_same(node: fx.Node, call: Callable[[], Any], over: torch.Tensor, plain: list[torch.Tensor]) -> bool:
    """Tell whether a call over an argument leaves there the bits that the plain call made."""
    where = over.data_ptr(), over.untyped_storage().nbytes()
    results = attempt(node, lambda: tensors(call()))
    if results is None or len(results) != len(plain):
        return False
    first = results[0].data_ptr(), results[0].untyped_storage().nbytes()
    return first == where and all(
        a.stride() == b.stride() and same_bytes(a, b) for a, b in zip(results, plain, strict=True)
    )


def _fill_all(numbers: list[torch.Tensor], name: str, run: partial[Any]) -> None:
    for i, tensor in enumerate(numbers):
        _fill(tensor, name, i)
    if name == "cancelling":
        cancel(run.func, run.args, torch.Generator().manual_seed(0))


def _fill(tensor: torch.Tensor, name: str, i: int) -> None:
    """Fill argument i, with all of its memory, from a set of numbers."""
    to = flat(tensor)
    numbers = _numbers(name, tensor.dtype).roll(-i * STRIDE)
    repeat(to, numbers)
    if name == "special" and tensor.is_floating_point():
        head = _numbers("head", tensor.dtype).roll(-i * STRIDE)[: min(SPECIAL, len(to))]
        to[: len(head)] = head.to(tensor.device)


@cache
def _numbers(name: str, dtype: torch.dtype) -> torch.Tensor:
    """(LENGTH,) numbers of a set, on the CPU: equal in every process; nothing stays on a device."""
    generator = torch.Generator().manual_seed(0)
    if name == "all" and dtype.itemsize == 2 and dtype.is_floating_point:
        return torch.randperm(2**16, generator=generator).to(torch.int16).view(dtype)
    drawn = torch.rand(LENGTH, generator=generator, dtype=torch.float64)
    if dtype is torch.bool:
        return drawn < 0.7  # more are true than false
    if not dtype.is_floating_point:  # none is zero, by which some ops divide
        most = min(torch.iinfo(dtype).max, MOST_INTEGER)
        signs = torch.where(drawn.roll(1) < 0.5, -1, 1) if dtype.is_signed else 1
        return ((most**drawn).floor() * signs).to(dtype)
    if name == "usual":
        return drawn.mul_(0.8).add_(0.1).to(dtype)
    signs = torch.where(drawn.roll(1) < 0.5, -1.0, 1.0)
    sizes = 10.0 ** (drawn * 8 - 5)
    info = torch.finfo(dtype)
    rare = [0.0, info.tiny / 4, info.tiny, info.eps, 1.0]
    if name == "head":
        rare += [math.inf, math.nan, info.max, info.max / 2, 100.0]
        sizes = torch.tensor(rare, dtype=torch.float64)[(drawn.roll(2) * len(rare)).long()]
    else:
        sizes[::64] = torch.tensor(rare, dtype=torch.float64).repeat(LENGTH)[: len(sizes[::64])]
    return (sizes * signs).to(dtype)


def tried_here(joint: Joint, profile: Profile) -> Profile:
    """A profile without slower ways that give other bits here. The global random state is not touched."""

    def holds(op: int, over: int) -> bool:
        node, instead = joint.nodes[op], "it does not run block by block over an input"
        assert node is not None
        bits = _once("ways", node, lambda: ways_of(node, call_of(node), lambda position, call: call()), instead) or {}
        return bits.get(position_of(joint, op, over), False)

    ways = tuple(way for way in profile.ways if not way.slower or holds(way.op, way.over))
    return profile if ways == profile.ways else replace(profile, ways=ways)


def same_in_two(node: fx.Node) -> bool:
    """Tell whether ``convolution_backward`` gives the same bits as one call for its input plus one for the rest.

    An op that does not run on made-up inputs stays as it is. The global random state is not touched.
    """

    def trial() -> bool:
        run = call_of(node)
        *args, (for_input, *for_others) = run.args
        whole: Any = run()
        alone = run.func(*args, [for_input, False, False])[:1]
        others = run.func(*args, [False, *for_others])[1:]
        return all(
            a is b is None or (a is not None and b is not None and a.stride() == b.stride() and same_bytes(a, b))
            for a, b in zip(whole, (*alone, *others), strict=True)
        )

    return bool(_once("in two", node, trial, "its gradients are computed at once"))


def runs_well(node: fx.Node, *, same_bits: bool, sizes: tuple[int, ...] = (), anew: bool = True) -> bool:
    """Tell whether the kernel of a group runs, and gives what its ops give, as they lie in memory.

    ``same_bits``: it has to give their bits too, where they are numbers, on numbers of all sets, whole ones among them,
    on all numbers of 16 bits, if a tensor is as large, and on as many drawn ones as it has elements, up to a million.
    ``sizes``: of the step, where they are open: what was tried at others is tried on special and drawn numbers only.
    ``anew``: a kernel that is for these sizes only is compiled.
    """
    target: Any = node.target

    def compiles(compile: Callable[..., Any], *args: Any) -> bool:
        try:
            return bool(compile(*args))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            log.warning("The kernel of %s is not compiled, its ops run one by one: %s", named(node), reason)
            return False

    sets: tuple[str, ...] = (*SETS, "all", "drawn") if same_bits else SETS[-1:]
    if sizes:
        with same_random_state(device_of_op(node)):
            if not compiles(partial(open_sizes.may_run, anew=anew), target, sizes):
                return False
        sets = SETS_AGAIN if open_sizes.was_tried(target) else sets

    def trial() -> bool:
        if not compiles(target.compiled):
            return False
        run = call_of(node)
        numbers = [t for t in tensors(run.args) if not t.is_complex()]
        draw = torch.Generator().manual_seed(0)
        for name in sets:
            _fill_all(numbers, name, run)
            for tensor in filter(torch.is_floating_point, numbers if name == "drawn" else ()):
                flat(tensor).copy_(flat(made_up(tensor, draw, seed=0)))
            results = run()
            if not _lie_alike(results, node.meta["val"], run.args):
                return False
            if same_bits and not all(map(_same_numbers, results, target.ops(*run.args))):
                return False
        return True

    is_good = bool(_once(f"kernel, bits: {same_bits}", node, trial, "its ops run one by one"))
    if sizes:
        open_sizes.note(target, sizes, is_good=is_good)
    return is_good


def _lie_alike(results: Any, like: Any, arguments: Any) -> bool:
    """Tell whether results lie in memory of their own as fake ones say."""
    memory = [t.untyped_storage().data_ptr() for t in tensors((results, arguments)) if t.numel()]
    return len({*memory}) == len(memory) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and all(s == t or n < 2 for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))
        for a, b in zip(results, like, strict=True)
    )


def _same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have the same bits, except that one NaN is as good as another."""
    if a.is_floating_point():
        a, b = (torch.where(t.isnan(), math.nan, t) for t in (a, b))
    return same_bytes(a, b)


def repeats(node: fx.Node) -> bool:
    """Tell whether an op gives the same bits each time, in the caller's thread and in autograd's.

    In each thread cuDNN chooses, and may try out, a kernel for a convolution when it first runs there: that is here.
    """

    def trial() -> bool:
        run = call_of(node)
        _fill_all([t for t in tensors((run.args, run.keywords)) if t.is_floating_point()], "cancelling", run)
        first = tensors(run())

        def are_same() -> list[bool]:
            return [all(map(same_bytes, first, tensors(run()))) for _ in range(AGAIN)]

        return all(are_same() + in_autograds_thread(device_of_op(node), are_same))

    return bool(_once("repeats", node, trial, "it runs once"))


def same_again(node: fx.Node) -> bool:
    """Tell whether an op on an accelerator draws the same numbers again from its generator's old state."""

    def trial() -> bool:
        run, device, draw = call_of(node), device_of_op(node), Drawn(node.target)
        saved = save_device_state(device)
        keywords = {**run.keywords, "on": device, "saved": saved}
        first = tensors(draw(*run.args, **keywords))
        state = save_device_state(device)
        again = tensors(drawn_again(draw)(*run.args, **keywords))
        pairs = zip((state, *first), (save_device_state(device), *again), strict=True)
        return saved.nbytes == DEVICE_STATE_BYTES and all(itertools.starmap(same_bytes, pairs))

    return bool(_once("again", node, trial, "it runs once"))


def _once(name: str, node: fx.Node, trial: Callable[[], T], instead: str) -> T | None:
    """The result of a trial of an op on this machine; None if its made-up inputs do not run, or memory ran out.

    ``instead``: what happens then, for the log.
    """
    device = device_of_op(node)
    key = name, (conditions_on(device), key_of(node))
    if key not in _known:
        with outside_tracing(), torch.no_grad(), same_random_state(device):
            outcome = within_memory(partial(attempt, node, trial), named(node), instead)
        if not outcome:
            return None
        _known[key] = outcome[0]
    return _known[key]
