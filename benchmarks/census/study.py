"""Study one model of the census: two steps plainly, two again, and two compiled; the row of what came of it."""

from __future__ import annotations

import gc
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor, fx, nn

import checkmate
from benchmarks.census import images, text
from benchmarks.common.rows import Row
from benchmarks.common.timing import budget_at, nothing_on_disk
from checkmate.backends.tensor_state import same_bits
from checkmate.core.problem import Problem
from checkmate.errors import CheckmateError
from checkmate.memory import measure_peak

SHARE = 0.3  # of the way from the smallest budget to keeping everything
ROOT = Path(__file__).parents[2]
PATCHES = str(ROOT / "checkmate" / "capture" / "patches")
PLANNING = 0.5  # seconds for one plan
Built = tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """Tensors that two steps leave behind, by name; the bytes of the second one, and those that were there before."""

    tensors: dict[str, Tensor]
    peak: int
    resident: int


def make(name: str) -> Built:
    """A model with its step and batch, always the same."""
    torch.manual_seed(0)
    return text.make(name) if name in text.models() else images.make(name)


class _Warnings(logging.Handler):
    """Keeps the first line of each warning that the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(plain(record.getMessage().splitlines()[0]))


def train(module: nn.Module, step: Callable[..., Tensor], batch: dict[str, Tensor]) -> Outcome:
    """Train two steps by SGD with momentum; the first is not metered, a compiled one plans in it."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    tensors: dict[str, Tensor] = {}
    replaced = 0

    def forward_backward() -> Tensor:
        loss = step(**batch)
        loss.backward()
        return loss.detach()

    for i in (1, 2):
        if i == 1:
            loss, peak = forward_backward(), 0
        else:
            before = kept(module)
            use = measure_peak(forward_backward)
            loss, peak = use.result, use.peak
            now = {tensor.untyped_storage().data_ptr() for tensor in kept(module)}
            replaced = bytes_of(tensor for tensor in before if tensor.untyped_storage().data_ptr() not in now)
            del use, before
        tensors[f"loss of step {i}"] = loss.clone()
        grads = {f"gradient of {n} in step {i}": p.grad for n, p in module.named_parameters() if p.grad is not None}
        tensors |= {name: grad.clone() for name, grad in grads.items()}
        del grads
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors |= {name: tensor.detach().clone() for name, tensor in state.items()}
    tensors["random state"] = torch.get_rng_state()
    return Outcome(tensors, peak, bytes_of([*state.values(), *batch.values()]) + replaced)


def kept(module: nn.Module) -> list[Tensor]:
    """Tensors that modules keep as plain attributes: one that a step replaces was there when its meter began."""
    attributes = [value for part in module.modules() for value in vars(part).values()]
    return [value for value in attributes if type(value) is Tensor]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def constants() -> list[Tensor]:
    """Tensors that captured graphs hold: those that a forward makes of Python's numbers."""
    graphs = [thing for thing in gc.get_objects() if issubclass(type(thing), fx.GraphModule)]
    held = [tensor for graph in graphs for tensor in (*graph.buffers(recurse=False), *vars(graph).values())]
    return list({id(tensor): tensor for tensor in held if type(tensor) is Tensor}.values())


def differing(found: Outcome, expected: Outcome) -> dict[str, float | None]:
    """Tensors of other bits, and by how much of their largest element; None where that is no number."""
    names = dict.fromkeys([*expected.tensors, *found.tensors])
    pairs = {name: (found.tensors.get(name), expected.tensors.get(name)) for name in names}
    return {name: _off(a, b) for name, (a, b) in pairs.items() if not same_bits(a, b)}


def _off(a: Tensor | None, b: Tensor | None) -> float | None:
    if a is None or b is None or a.shape != b.shape or not b.numel():
        return None
    off = float((a.double() - b.double()).abs().max() / b.double().abs().max())
    return off if off < float("inf") else None


@contextmanager
def entered() -> Iterator[set[str]]:
    """The functions of `checkmate.capture.patches` that are called meanwhile, each with its module.

    Those that are never called change nothing, for whatever is captured: a profiler of Python sees every call.
    """
    found: set[str] = set()
    names: dict[CodeType, str | None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            if code not in names:
                own = code.co_filename.startswith(PATCHES) and not code.co_name.startswith("<")
                names[code] = f"{Path(code.co_filename).stem}.{code.co_name}" if own else None
            if (name := names[code]) is not None:
                found.add(name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def study(name: str) -> Iterator[Row]:
    """Train one model plainly and compiled: what it is ``at``, and in the end a row, with what was warned of."""
    warnings = _Warnings()
    log = logging.getLogger("checkmate")
    log.addHandler(warnings)
    try:
        for row in _study(name):
            yield {**row, "warned": list(dict.fromkeys(warnings.lines))} if "status" in row else row
    finally:
        log.removeHandler(warnings)


def _study(name: str) -> Iterator[Row]:
    torch.set_num_threads(1)
    began = time.process_time()
    expected = again = None
    yield {"at": "plain"}
    expected, again = train(*make(name)), train(*make(name))
    about: Row = {"parameters": sum(p.numel() for p in make(name)[0].parameters())}
    about["plain_seconds"] = round(time.process_time() - began, 2)
    if any(not bool(tensor.isfinite().all()) for key, tensor in expected.tensors.items() if key.startswith("loss")):
        yield {**about, "status": "untrained", "error": "the loss is no finite number"}
        return
    if differing(again, expected):
        yield {**about, "status": "wavering"}
        return
    yield {"at": "capture"}
    trace: Callable[..., Problem] = checkmate.trace  # its own options have other names than a batch's tensors
    with nothing_on_disk():
        _, step, batch = make(name)
        with entered() as always:  # whatever is captured
            trace(lambda x: (x * x).sum(), torch.ones(2, requires_grad=True))
        with entered() as patches:
            problem = trace(step, **batch)
        lowest, keep_all = checkmate.min_budget(problem, time_limit=PLANNING).peak, problem.keep_all_peak
        about |= {"patches": sorted(patches - always), "ops": len(problem.graph.ops)}
        about |= {"min_budget": lowest, "keep_all_peak": keep_all, "budget": budget_at(SHARE, lowest, keep_all)}
        yield {"at": "compiled steps"}
        earlier = {id(tensor): tensor for tensor in constants()}  # held here, so that no other has its id
        module, step, batch = make(name)
        compiled = checkmate.compile(step, budget=about["budget"], time_limit=PLANNING, wait="best")
        found = train(module, compiled, batch)
        own = bytes_of(tensor for tensor in constants() if id(tensor) not in earlier)
    wrong, plan = differing(found, expected), compiled.plans[-1]
    about |= {"graphs": len(compiled.plans), "overhead": plan.overhead, "gap": plan.gap}
    about |= {"predicted_peak": plan.peak, "measured_peak": found.resident + own + found.peak}
    if wrong:
        about |= {"wrong": len(wrong), "differs": dict(list(wrong.items())[:8])}
    right = about["measured_peak"] == about["predicted_peak"]
    yield {**about, "status": "wrong" if wrong else "right" if right else "peak"}


def failure(error: Exception, at: str) -> Row:
    """The row of a model that ended in an error: plainly, refused, or raw."""
    status = "untrained" if at == "plain" else "refused" if isinstance(error, CheckmateError) else "error"
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    return {"status": status, "at": at, "class": type(error).__name__, "error": plain(said), "where": where}


def plain(message: str) -> str:
    """A message without what differs from machine to machine: where packages are installed, addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"/\S*/site-packages/", "", message).replace(f"{ROOT}/", ""))
