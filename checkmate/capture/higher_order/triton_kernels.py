"""Launches of Triton kernels in a step, as ops whose results are the tensors they write.

PyTorch captures a launch as ``triton_kernel_wrapper_functional``, which copies all that the kernel writes to, runs it
on the copies and gives these. What is written to is mostly empty memory: `make_what_they_write` has the op take that
itself, as a kernel of PyTorch's does, so that nothing is copied and nothing empty waits.

A kernel computes from its arguments alone, in programs of which each has its own order: another run leaves the same
bits. Not so where programs add to the same memory by atomic operations, or where a kernel asks the processor for
something by assembly; either is seen in its source, or in that of a function which it calls. On a device it is tried
besides, before it is planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from inspect import getclosurevars
from types import ModuleType
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import call
from checkmate.torch_internals.running import kernel_side_table
from checkmate.torch_internals.running import triton_kernel_wrapper_functional as WRAPPER

_TAKEN = ("kernel_idx", "constant_args_idx", "kwargs", "tensors_to_clone")
_UNORDERED = re.compile(r"\b(?:atomic_\w+|\w*inline_asm\w*|globaltimer|smid)\b")
_EMPTY = {
    *(torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default),
    *(torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default),
}


@dataclass(frozen=True)
class Memory:
    """The layout of a tensor that a kernel writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Launch:
    """A functional launch of a kernel: takes tensors by name and returns the written ones, by name."""

    kernel: int  # its number, and that of its other arguments, in PyTorch's table of this process
    constants: int
    options: dict[str, Any]  # the grid, and what else the wrapper takes
    makes: dict[str, Memory]  # results written to new memory
    bases: tuple[str, ...] = ()  # views that it copies; their bases come first among the arguments
    once: str | None = None  # why it must run exactly once, in words

    __name__ = "triton_kernel"

    def __call__(self, *bases: Any, **tensors: Any) -> dict[str, torch.Tensor]:
        """Launch the kernel and return the tensors that it wrote."""
        outputs = {
            name: torch.empty_strided(memory.shape, memory.strides, dtype=memory.dtype, device=memory.device)
            for name, memory in self.makes.items()
        }
        options = self.options | ({"tensor_bases": dict(zip(self.bases, bases, strict=True))} if bases else {})
        copied: dict[str, torch.Tensor] = WRAPPER(
            kernel_idx=self.kernel, constant_args_idx=self.constants, kwargs=tensors | outputs, **options
        )
        return copied | outputs

    def __str__(self) -> str:
        return f"triton.{self.name}"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(_plain(kernel_side_table.get_kernel(self.kernel)).fn.__name__)

    @property
    def tunes(self) -> bool:
        """Tell whether its first run in a process tries configurations, in extra memory."""
        return hasattr(kernel_side_table.get_kernel(self.kernel), "configs")

    @cached_property
    def key(self) -> str:
        """A hash of the kernel and its options, without tensors, equal in every process."""
        configs = [str(config) for config in getattr(kernel_side_table.get_kernel(self.kernel), "configs", ())]
        constants = kernel_side_table.get_constant_args(self.constants)
        text = repr((*_sources(self.kernel, self.constants), configs, constants, self.options, self.makes))
        return sha256(text.encode()).hexdigest()[:16]


def why_once(kernel: int, constants: int) -> str | None:
    """The reason why a kernel must run exactly once; None if its source shows none."""
    unordered = next((match for source in _sources(kernel, constants) if (match := _UNORDERED.search(source))), None)
    return None if unordered is None else f"runs a kernel of Triton's that calls {unordered[0]}"


def make_what_they_write(graph: fx.Graph, same_again: Callable[[fx.Node], bool] | None = None) -> None:
    """Let launches allocate those results themselves that were empty tensors before.

    ``same_again``: whether an op leaves the same bits when it runs again, as tried; None: each does.
    """
    for node in graph.find_nodes(op="call_function", target=WRAPPER):
        options = dict(node.kwargs)
        kernel, constants, arguments, written = (options.pop(name) for name in _TAKEN)
        # It can allocate what it writes to empty tensors that nobody else uses.
        own = [name for name in written if arguments[name].target in _EMPTY and list(arguments[name].users) == [node]]
        vals = {name: val for name in own if isinstance(val := arguments[name].meta["val"], torch.Tensor)}
        makes = {name: Memory(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for name, t in vals.items()}
        bases = {name: base for name, base in options.pop("tensor_bases", {}).items() if name not in makes}
        options["tensors_to_clone"] = [name for name in written if name not in makes]
        numbers: list[fx.Node] = []
        fx.node.map_arg(options, numbers.append)
        if numbers:  # of a grid that depends on a number which may be another in the next call
            continue
        arguments = {name: arg for name, arg in arguments.items() if name not in makes}
        launch = Launch(kernel, constants, options, makes, tuple(bases), why_once(kernel, constants))
        with graph.inserting_before(node):
            launched = call(node, launch, tuple(bases.values()), launch.name, node.meta["val"], arguments)
        if launch.once is None and same_again is not None and not same_again(launched):
            launched.target = replace(launch, once="left other bits when it ran again here")
        node.replace_all_uses_with(launched)
        graph.erase_node(node)


def _plain(kernel: Any) -> Any:
    """A kernel without its tuner."""
    while not hasattr(kernel, "src"):
        kernel = kernel.fn
    return kernel


def _sources(kernel: int, constants: int) -> Iterator[str]:
    """The source of a kernel, and of the Triton functions that it calls or is given, each once."""
    function = _plain(kernel_side_table.get_kernel(kernel))
    todo, seen = [function, *kernel_side_table.get_constant_args(constants).values()], set[int]()
    while todo:
        callee = todo.pop()
        if type(callee) is not type(function) or id(callee) in seen:
            continue
        seen.add(id(callee))
        yield callee.src
        names = getclosurevars(callee.fn)
        reach = [*names.globals.values(), *names.nonlocals.values()]
        modules = [module for module in reach if isinstance(module, ModuleType)]
        todo += [*reach, *(getattr(module, name, None) for module in modules for name in sorted(names.unbound))]
