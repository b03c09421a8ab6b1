"""Compile the ops of a group by Inductor, once in a process, and kernels of a CPU side by side in others.

What another process compiles comes by way of Inductor's folder on disk, where a second start finds it, too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.statusline import showing
from checkmate.torch_internals import capturing  # takes a second to import: looked up when needed
from checkmate.torch_internals.capturing import FakeTensorMode, tracing
from checkmate.torch_internals.running import outside_tracing, triton_utils

log = logging.getLogger("checkmate.capture.fusion")
aten = torch.ops.aten
Boxed = Callable[[list[Tensor]], Sequence[Tensor]]  # takes its arguments out of the list
Key = tuple[str, int | None]  # what a kernel computes, and the argument that it writes over
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # sizes and strides of an argument
FEW = 3  # kernels that are compiled as soon as other processes have begun
# Memory of captured graphs would be in no plan. Each op rounds its result to its type, as eager kernels do. None is
# chosen by its time, where that would change bits from one process to the next.
_SETTINGS = {
    "triton.cudagraphs": False,
    "emulate_precision_casts": True,
    "deterministic": True,
    "fallback_random": True,
}
_kernels: dict[Key, Boxed] = {}
_bound: dict[str, Callable[[int | None], Boxed]] = {}  # code of open sizes, for the sizes of a kernel, by its key
_begun: dict[Key, Future[None]] = {}  # kernels that another process compiles


def can_compile(device: torch.device) -> bool:
    """Tell whether Inductor can make kernels for a device here; the log says why it cannot."""
    try:
        if device.type == "cpu":
            capturing.get_cpp_compiler()
        elif not triton_utils.has_triton():
            raise RuntimeError(f"there is no Triton for {device}")
    except RuntimeError as error:
        log.warning("Groups of ops run one by one, as PyTorch's own kernels: %s", str(error).strip().partition("\n")[0])
        return False
    return True


@cache
def compiler() -> str:
    """The C++ compiler and its version; empty where there is none."""
    try:
        return str(capturing.get_compiler_version_info(capturing.get_cpp_compiler()))
    except RuntimeError:
        return ""


def compiled(key: str, ops: fx.GraphModule, like: Sequence[Tensor], threads: int, over: int | None = None) -> Boxed:
    """Compile a group, once in a process.

    Args:
        ops: its graph, of ATen's ops.
        like: tensors like its arguments.
        threads: in which it runs.
        over: the argument over which it writes its first result, which it does not return then.

    Raises:
        RuntimeError: if it cannot be compiled.
    """
    if (key, over) not in _kernels and key in _bound:
        _kernels[key, over] = _bound[key](over)
    elif (key, over) not in _kernels:
        with showing(lambda: f"compiling kernels, {1 + len(_begun)} left"):
            if (elsewhere := _begun.pop((key, over), None)) is not None:
                wait([elsewhere])  # if it failed, it is tried again here
            try:
                _kernels[key, over] = _compile((key, over), ops, [*map(_described, like)], threads)
            except Exception as error:  # of any kind: a compiler's
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return _kernels[key, over]


def compiled_at_open_sizes(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph, which Inductor may change, for inputs without data, symbols among them.

    Raises:
        RuntimeError: if it cannot be compiled.
    """
    settings = {**_SETTINGS, "cpp.threads": torch.get_num_threads()}
    with outside_tracing(), tracing(None), torch.no_grad():
        code: Callable[..., Any] = capturing.compile_fx(module, inputs, config_patches=settings)
    return code


def bind(key: str, at: Callable[[int | None], Boxed]) -> None:
    """Run a kernel by the code of open sizes from now on; ``at`` gives it, and its variants, for the kernel's sizes."""
    _bound[key] = at


def is_known(key: str) -> bool:
    """Tell whether a kernel's code is known, for its sizes or for open ones."""
    return (key, None) in _kernels or key in _bound


def begin(groups: Iterable[tuple[Key, fx.GraphModule, Sequence[Tensor], int]]) -> None:
    """Begin to compile groups for a CPU in other processes, by Inductor's pool of these; `compiled` waits for them.

    Args:
        groups: keys, and what `compiled` takes of each.
    """
    folder, processes = capturing.cache_dir(), capturing.get_compile_threads()
    todo = {
        key: (ops, [*map(_described, like)], threads)
        for key, ops, like, threads in groups
        if not (key in _kernels or key in _begun or key[0] in _bound or _mark(folder, key).exists())
    }
    process_pool = capturing.AsyncCompile.process_pool
    if processes <= 1 or len(todo) <= (1 if process_pool.cache_info().currsize else FEW):
        return
    log.info("compiling %d kernels in %d processes", len(todo), processes)
    try:
        pool = process_pool()
        for key, (ops, like, threads) in todo.items():
            _begun[key] = pool.submit(_compile_elsewhere, folder, key, ops, like, threads)
    except (RuntimeError, OSError) as error:
        log.info("Kernels are compiled one by one: %s", error)


def _compile_elsewhere(folder: str, key: Key, ops: fx.GraphModule, like: Sequence[Like], threads: int) -> None:
    """Compile a group in a process of the pool; its kernel is on disk then."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    _compile(key, ops, like, threads)


def _compile(key: Key, ops: fx.GraphModule, like: Sequence[Like], threads: int) -> Boxed:
    settings = {**_SETTINGS, "cpp.threads": threads}  # a part of Inductor's key of kernels on disk
    with outside_tracing(), tracing(None), torch.no_grad(), capturing.inductor_config.patch(settings):
        # Trace it in the ops that Inductor knows, on tensors without data.
        with FakeTensorMode() as mode:
            fakes = [torch.empty_strided(*layout, dtype=dtype, device=device) for *layout, dtype, device in like]
            step = torch.func.functionalize(alone(ops, key[1]))
            module = make_fx(step, decomposition_table=capturing.select_decomp_table())(*fakes)
        # Compile it: with no wrapper around, a call costs the least.
        with capturing.V.set_fake_mode(mode):
            code = capturing.compile_fx_inner(module, fakes, is_inference=True)
    with suppress(OSError):
        mark = _mark(capturing.cache_dir(), key)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    run: Boxed = getattr(code, "current_callable", None) or code
    return run


def alone(ops: fx.GraphModule, over: int | None) -> fx.GraphModule:
    """Copy a group's graph; ``over``: its last act is to copy the first result to this argument."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    results: Any = graph.graph_copy(ops.graph, copies)
    if over is not None:
        first, *results = results
        graph.call_function(aten.copy_.default, (copies[ops.graph.find_nodes(op="placeholder")[over]], first))
    graph.output(tuple(results))
    return fx.GraphModule(nn.Module(), graph)


def _mark(folder: str, key: Key) -> Path:
    """The file that tells that a kernel is on disk."""
    return Path(folder, "checkmate", torch.__version__, "-".join(map(str, key)))


def _described(tensor: Tensor) -> Like:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
