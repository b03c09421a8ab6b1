"""Train one program plainly and compiled at three budgets: its outcome."""

from __future__ import annotations

import functools
import random
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.timing import distance
from benchmarks.hunt.write import load
from checkmate.backends import plan_swap
from checkmate.backends.tensor_state import differing, same_bits
from checkmate.core.solution import Query, Solution
from checkmate.errors import CheckmateError
from checkmate.solvers import plan_cache
from checkmate.solvers.background_search import News
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.search.min_budget import least_memory
from checkmate.solvers.solve import solve

STEPS = 3
PLANNING = 0.2  # seconds for one plan
ROOM = "100 GB"
NEAR = 0.02  # of a tensor's largest number; sums in another order are nearer, unless something is chosen by them
AGAIN = 20  # plain runs after other bits: an LSTM on the CPU has had two kinds of bits, by where its tensors lie


class _Module(nn.Module):
    """A program as a module, with its parameters and buffers."""

    def __init__(self, fn: Callable[..., Any], p: list[Tensor], b: list[Tensor]) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(t) for t in p])
        for i, t in enumerate(b):
            self.register_buffer(f"b{i}", t)
        self.fn, self.count = fn, len(b)

    def forward(self, *x: Tensor) -> Any:
        return self.fn(list(self.p), x, [getattr(self, f"b{i}") for i in range(self.count)])


def train(
    text: str, wrap: Callable[..., Any] | None, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], Any]:
    """Run three steps, of which ``wrap`` compiles one, with ``between`` before each: all that they leave, by name."""
    scope = load(text, "program")
    how, fn = scope["HOW"], scope["fn"]
    p, x, b = scope["make"]()
    step: Callable[..., Any]
    module: Any = None
    if how.get("module"):
        module = _Module(fn, p, b)
        step, p = module, list(module.p)
    else:
        step = lambda *x: fn(p, x, b)  # noqa: E731
    optimizer = eval(f"torch.optim.{how['optimizer']}", {"torch": torch, "P": p})  # our own text
    accumulate = 2 if how["backward"] == "accumulate" and how.get("whole") else 1
    compiled: Any = None
    if wrap is not None:
        inner = _autocast(step, how) if how.get("whole") and "autocast" in how else step
        step = compiled = wrap(inner, optimizer, accumulate)
    elif how.get("whole"):
        step = _plain_whole(_autocast(step, how), optimizer, how.get("clip"), accumulate)
    found: dict[str, Any] = {}
    kept: list[Any] = []
    torch.manual_seed(7)
    random.seed(7)
    for i in range(STEPS):
        between()
        if how.get("whole"):
            for _ in range(accumulate):
                result = step(*x)
            results = _flat(result)
        else:
            results = _backward(how, _autocast(step, how), p, x, i)
            found |= {f"gradient {k} of step {i}": _copied(t.grad) for k, t in enumerate([*p, *x])}
        found |= {f"result {k} of step {i}": _copied(t) for k, t in enumerate(results)}
        found |= {f"result {k} of step {i} needs a gradient": t.requires_grad for k, t in enumerate(results)}
        kept.append(results)
        if not how.get("whole"):
            optimizer.step()
            if how["backward"] != "accumulate":
                for t in [*p, *x]:
                    t.grad = None
        state = {"parameter": p, "input": x, "buffer": b if module is None else list(module.buffers())}
        found |= {f"{kind} {k} after step {i}": _copied(t) for kind, ts in state.items() for k, t in enumerate(ts)}
        found[f"random state after step {i}"] = torch.get_rng_state()
    found["Python's random state"] = random.getstate()
    found |= {f"result {k} of step {i} in the end": _copied(t) for i, rs in enumerate(kept) for k, t in enumerate(rs)}
    for k, t in enumerate(p):
        found |= {f"{name} of parameter {k}": _copied(value) for name, value in optimizer.state[t].items()}
    return found, compiled


def _copied(value: Any) -> Any:
    """A copy, every NaN as the same one: which it is IEEE 754 leaves open, and kernels do too."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    numbers = torch.view_as_real(copy.resolve_conj()) if copy.is_complex() else copy
    return numbers.masked_fill(numbers.isnan(), torch.nan) if numbers.is_floating_point() else copy


def _flat(result: Any) -> list[Tensor]:
    return [*result] if isinstance(result, tuple) else [result]


def _autocast(fn: Callable[..., Any], how: dict[str, Any]) -> Callable[..., Any]:
    """The forward within autocast, as people write it."""
    if "autocast" not in how:
        return fn

    @functools.wraps(fn)
    def within(*x: Any) -> Any:
        with torch.autocast("cpu", getattr(torch, how["autocast"])):
            return fn(*x)

    return within


def _backward(how: dict[str, Any], step: Callable[..., Any], p: list[Tensor], x: list[Tensor], i: int) -> list[Tensor]:
    kind = how["backward"]
    results = _flat(step(*x))
    loss = results[0]
    if kind == "loss" or kind == "accumulate":
        loss.backward()
    elif kind == "sum":
        torch.stack([t.abs().float().sum() for t in results if t.requires_grad and t.numel()]).sum().backward()
    elif kind == "grad":
        leaves = [t for t in [*p, *x] if t.requires_grad and t.is_leaf]
        for t, grad in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
            t.grad = grad
    elif kind == "retain":
        loss.backward(retain_graph=True)
        loss.backward()
    elif kind == "thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
    elif kind == "two calls":
        other = _flat(step(*x))
        (loss + other[0] * 2).backward()
        results += other
    elif kind == "late":
        other = _flat(step(*x))
        loss.backward()
        other[0].backward()
        results += other
    elif kind == "parts":
        for t in results[::-1]:
            if t.requires_grad and t.is_floating_point():
                t.sum().backward(retain_graph=t is not results[0])
    elif kind == "gradient":
        loss.backward(torch.tensor(0.3 * i))
    elif kind == "hooks":
        handles = [t.register_hook(lambda g: None if g is None else g * 0.5) for t in p]
        handles.append(p[0].register_post_accumulate_grad_hook(lambda t: None if t.grad is None else t.grad.mul_(3)))
        handles += [t.register_hook(lambda g: None if g is None else g + 1) for t in results if t.requires_grad]
        loss.backward()
        for handle in handles:
            handle.remove()
    elif kind == "none between":
        with torch.no_grad():
            results += _flat(step(*x))
        loss.backward()
    return results


def _plain_whole(fn: Callable[..., Any], optimizer: Any, clip: float | None, accumulate: int) -> Callable[..., Any]:
    calls = [0]

    def step(*x: Any) -> Any:
        if calls[0] % accumulate == 0:
            optimizer.zero_grad()
        result = fn(*x)
        results = _flat(result)
        results[0].backward()
        calls[0] += 1
        if calls[0] % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([q for g in optimizer.param_groups for q in g["params"]], clip)
            optimizer.step()
        return tuple(t.detach() for t in results) if isinstance(result, tuple) else result.detach()

    return step


def compiling(how: dict[str, Any], budget: Any) -> Callable[..., Any]:
    """A function that compiles a step as its settings say."""
    options: dict[str, Any] = {"budget": budget, "time_limit": PLANNING, "wait": "first"}
    options |= {"memory": how["memory"]} if "memory" in how else {}
    options |= {"host_budget": "1 GB", "host": f"file:{tempfile.gettempdir()}"} if how.get("host") else {}
    options |= {"rules": {"*": how["rules"]}} if "rules" in how else {}
    options |= {"kernels": how["kernels"]} if "kernels" in how else {}

    def wrap(fn: Any, optimizer: Any, accumulate: int) -> Any:
        if how.get("whole"):
            return checkmate.training_step(fn, optimizer, accumulate=accumulate, clip_norm=how.get("clip"), **options)
        return checkmate.compile(fn, **options)

    return wrap


def outcome(text: str) -> Row:
    """Run a program: ``same``, ``plain``, ``refused``, ``wrong`` or ``raw``, at which budget, and why.

    One by fused kernels has the bits of the fused step that keeps everything; it is ``far`` if that is not near plain.
    """
    how = load(text, "program")["HOW"]
    torch.set_num_threads(how["threads"])
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = _outcome(text, how)
    torch._dynamo.reset()
    return {**row, "seconds": round(time.process_time() - began, 2)}


class _Turns:
    """Stands for a search beside the training, and finds plans of less and less memory."""

    def __init__(self, rest: Query) -> None:
        assert isinstance(rest.start, Solution)
        self.cost, self.failure, self.goes_on = rest.start.cost, "", True
        self.news, self.better = News(self.cost, 0.0, 0.0), cast("News | None", None)
        problem, most = rest.problem, rest.problem.keep_all_peak
        smallest, runs = least_memory(problem, time_limit=PLANNING)
        plans = [solve(problem, (smallest + most) // 2, time_limit=PLANNING).plan] if smallest < most - 1 else []
        plans += [certify(problem, most, runs, method="auto").plan] if smallest < most else []
        self.plans = [plan for plan in plans if plan is not None]

    def offer(self) -> None:
        if self.plans:
            self.news = self.better = News(self.cost, 0.0, len(self.plans), self.plans.pop(0))

    def start(self) -> None:
        pass  # nothing runs

    def end(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        return True


@contextmanager
def taking_turns() -> Iterator[Callable[[], None]]:
    """Within the block steps keep everything at first; each call of what it gives has all go on by less memory."""
    made: list[_Turns] = []

    def begin(query: Query) -> Solution:
        plan = solve(query.problem, query.budget, time_limit=PLANNING)
        return replace(plan, rest=replace(query, start=plan))

    def search(rest: Query) -> _Turns:
        made.append(_Turns(rest))
        return made[-1]

    def offer() -> None:
        for turns in made:
            turns.offer()

    with patch.object(plan_cache, "kept", lambda *known: begin), patch.object(plan_swap, "Search", search):
        yield offer


def _outcome(text: str, how: dict[str, Any]) -> Row:
    """Capture once, each step by another plan; where none can take over, or one in three times, each plan alone."""
    expected, refusal = _plain(text)
    if refusal is None and (off := differing(_plain(text)[0], expected)):
        return {"outcome": "wavering", "why": off[0]}

    def trained(budget: int | str, place: str, between: Callable[[], None] = lambda: None) -> tuple[Row, Any, Any]:
        """Train within a budget: the row, empty if that works, what is left, and the step."""
        try:
            found, step = train(text, compiling(how, budget), between)
        except CheckmateError as error:
            return {"outcome": "refused" if refusal is None else "plain", "at": place, "why": reason(error)}, {}, None
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what came of the program
            why = f"{type(error).__name__}: {reason(error)}"
            kind = "raw" if refusal is None else "plain"
            return {"outcome": kind, "at": place, "why": why, "where": _where(error)}, {}, None
        if refusal is not None:
            return {"outcome": "trained", "at": place, "why": reason(refusal)}, {}, None
        return {}, found, step

    def compiled(budget: int | str, place: str, between: Callable[[], None] = lambda: None) -> tuple[Row, Any]:
        """Train within a budget: the row, empty if the bits are the same, and the step."""
        row, found, step = trained(budget, place, between)
        off = [] if row else differing(found, expected)
        if off and any(differing(again(), expected) for _ in range(AGAIN)):
            return {"outcome": "wavering", "why": off[0]}, None
        if off:
            splits = [split for plan in step.plans for split in plan.problem.splits]
            why = f"{len(off)} differ: {', '.join(off[:4])}"
            return {"outcome": "wrong", "at": place, "why": why, "splits": splits}, None
        return row, step

    again: Callable[[], dict[str, Any]] = lambda: _plain(text)[0]  # noqa: E731
    if how.get("kernels") == "fused":
        row, found, _ = trained(ROOM, "keep all")
        if row or (off := _far(found, expected)):
            return row or {"outcome": "far", "why": f"{len(off)} differ: {', '.join(off[:4])}"}
        expected, again = found, lambda: trained(ROOM, "keep all")[1]
        torch._dynamo.reset()
    with taking_turns() as offer:
        row, step = compiled(ROOM, "keep all, then less", offer)
    if row:
        return row
    swaps = sum(planning.swaps for planning in step.planning)
    if step.plans and (not swaps or how.get("alone")):
        problem = step.plans[-1].problem
        smallest, most = checkmate.min_budget(problem, time_limit=PLANNING).peak, problem.keep_all_peak
        del step
        budgets = {"smallest": smallest} if swaps else {"smallest": smallest, "between": (smallest + most) // 2}
        for place, budget in budgets.items():
            if budget < most:
                torch._dynamo.reset()
                row, _ = compiled(f"{budget} B", place)  # fewer than a thousand need a unit
                if row:
                    return row
    return {"outcome": "same", "swaps": swaps}


def _far(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of tensors that are not near others in proportion to the largest number; those of indices are left out."""

    def is_near(x: Any, y: Any) -> bool:
        if not isinstance(y, Tensor) or not (y.is_floating_point() or y.is_complex()):
            return type(x) is type(y)
        if not isinstance(x, Tensor) or x.dtype != y.dtype:
            return False
        x, y = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (x, y))
        return same_bits(x.isnan(), y.isnan()) and distance([x.nan_to_num()], [y.nan_to_num()]) <= NEAR

    return [name for name, y in expected.items() if not is_near(found.get(name), y)]


def _plain(text: str) -> tuple[dict[str, Any], Exception | None]:
    try:
        return train(text, None)[0], None
    except Exception as error:  # noqa: BLE001  # plain PyTorch refuses it
        return {}, error


def _where(error: Exception) -> str:
    """The last line of ours that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([f for f in frames if "checkmate" in f.filename] or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def reason(error: BaseException) -> str:
    """The text of an error, without what differs from program to program or by the folder."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = re.sub(r"0x[0-9a-f]+|\d[\d_.]*", "#", line.replace(f"{Path(__file__).parents[2]}/", ""))
    return re.sub(r"\[[#, ]*\]|\([#, ]*\)", "[#]", line)[:200]
