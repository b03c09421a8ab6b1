"""The checks of ``checkmate selftest`` on a device: each tests one promise, and gives its findings and the way out.

Each runs in a process of its own, so that a failing or hanging check does not affect the next.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkmate.backends.step_problem import joint_of
from checkmate.backends.tensor_state import same_bits
from checkmate.capture import random_draws
from checkmate.capture.device import is_unordered, may_waver, same_random_state
from checkmate.capture.nodes import target_name, tensors
from checkmate.compiler import compile as compiled_within
from checkmate.compiler import verify
from checkmate.demo.training import Bottlenecks, Step, Transformer, paired_seconds, run_step, step_of
from checkmate.devices import kind_of
from checkmate.errors import CheckmateError
from checkmate.host.opening import measure, open_store
from checkmate.host.store import rounded
from checkmate.memory import measure_peak
from checkmate.memory.available import limits
from checkmate.profiling.measure import measure_ops
from checkmate.profiling.one_op import attempt, call_of, key_of, runs_alone
from checkmate.solvers.search.min_budget import min_budget
from checkmate.torch_internals.versions import TRIED, is_tried
from checkmate.tracing import trace
from checkmate.training import training_step
from checkmate.units import format_bytes
from checkmate.version import __version__

REPORT = "Please report it, with the file that --json writes."
MOST, OF_A_CHECK = 6, 3 * 10**9  # checks at a time, and bytes of memory of each
BLOCKS = (1 << 20, 16 << 20)  # bytes that are copied to a second memory
SHAPES = ((1000,), (64, 257), (2, 3, 64, 64))  # of masks
HALF_AND_FULL = (torch.float32, torch.bfloat16)
RUNS = 4  # of an op, of which the first is compared with the others
SHARES = (0.1, 0.5, 1.0)  # of the way from the smallest budget to keeping everything
PAIRS = 5  # of plain and compiled steps that are timed
SECONDS = 180.0  # for a check
LAST = 4000  # characters of what a process has printed that are kept of a check that failed
ALONE = ("capacity",)  # checks that need the device for themselves


@dataclass(frozen=True)
class Setting:
    """The device for the checks, and the size of their networks."""

    name: str  # of the device: "cpu", "cuda", "cuda:1"
    quick: bool = False  # small networks

    @property
    def plan_seconds(self) -> float:
        """Seconds to plan for one budget."""
        return 1.0 if self.quick else 5.0

    @property
    def device(self) -> torch.device:
        """The device itself; a CUDA device by its number."""
        device = torch.device(self.name)
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@dataclass(frozen=True)
class Finding:
    """A finding of a check; `run_all` adds which it was."""

    passed: bool | None  # None: there is nothing to check on this device
    found: str
    advice: str = REPORT  # what to do if it failed
    facts: dict[str, Any] = field(default_factory=dict)  # for JSON
    name: str = ""
    checked: str = ""  # the first line of what the check's function says of itself
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """The verdict in a word: "passed", "failed" or "skipped"."""
        return "skipped" if self.passed is None else "passed" if self.passed else "failed"

    def __str__(self) -> str:
        failed = self.verdict == "failed"
        head = f"{'FAILED' if failed else self.verdict:<9}{self.name}  ({self.seconds:.1f} s)"
        lines = [("checked", self.checked), ("found", self.found), *[("do", self.advice)] * failed]
        return "\n".join([head, *(f"           {title:<10}{text}" for title, text in lines)])


Check = Callable[[Setting], Finding]  # at the top of a module, as it is called in another process


def run_all(checks: Mapping[str, Check], setting: Setting, limit: float = SECONDS) -> Iterator[Finding]:
    """Run the checks and yield their findings; ``limit``: seconds after which each is ended, and has failed.

    Several run at a time where processors and memory allow; those that need the device for themselves come last.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["checkmate.demo.selftest"])
    run = partial(_run, context, setting, limit)
    pool = ThreadPoolExecutor(places())
    try:
        yield from pool.map(run, [item for item in checks.items() if item[0] not in ALONE])
        yield from map(run, [item for item in checks.items() if item[0] in ALONE])
    finally:  # where whoever asked has left, what has not begun does not begin
        pool.shutdown(wait=False, cancel_futures=True)


def places() -> int:
    """The number of checks to run at a time, from processors and memory."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = min((limit.free for limit in limits()), default=0)
    return max(1, min(MOST, processors, free // OF_A_CHECK))


def _run(context: Any, setting: Setting, limit: float, item: tuple[str, Check]) -> Finding:
    began, (name, check) = time.monotonic(), item
    # Run the check in a child until its limit.
    with tempfile.TemporaryDirectory(prefix="checkmate-selftest-") as place:
        folder = Path(place)
        child = context.Process(target=_child, args=(check, setting, folder))
        child.start()
        child.join(limit)
        code = child.exitcode  # None: it still runs
        child.kill()
        child.join()
        # Its answer, or how it ended without one.
        if (answer := folder / "answer").exists():
            finding = pickle.loads(answer.read_bytes())
        elif code is None:
            finding = Finding(False, f"it had not ended after {limit:g} s", f"Try --time-limit {2 * limit:g}. {REPORT}")
        else:
            finding = Finding(False, f"its process died (exit code {code})")
        file = folder / "printed"
        output = file.read_text(errors="replace")[-LAST:] if file.exists() else ""
    facts = {**finding.facts, **({"printed": output} if output and finding.passed is False else {})}
    summary = (inspect.getdoc(getattr(check, "func", check)) or "").partition("\n")[0]
    return replace(finding, name=name, checked=summary, facts=facts, seconds=time.monotonic() - began)


def _child(check: Check, setting: Setting, folder: Path) -> None:
    """Run a check with its output in a file; costs of ops are measured anew and not kept."""
    descriptor = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["CHECKMATE_CACHE_DIR"] = str(folder / "cache")
    try:
        finding = check(setting)
    except Exception as error:  # noqa: BLE001  # any error is this check's finding
        first = (str(error).strip().splitlines() or [""])[0]
        facts = {"traceback": traceback.format_exc()}
        finding = Finding(False, f"{type(error).__name__}: {first}", facts=facts)
    (folder / "partial").write_bytes(pickle.dumps(finding))
    (folder / "partial").replace(folder / "answer")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: a device that was stopped may keep a process from ending in order


def network(name: str, setting: Setting) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    """The network "transformer", "bottlenecks" or "chain", its step and a batch: equal at each call."""
    torch.manual_seed(0)
    quick = setting.quick or setting.device.type == "cpu"
    with setting.device:
        if name == "chain":  # of values of 10 MiB, or 160 at full size: from 10 on the allocator takes each by itself
            layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
            rows = 5 << (10 if setting.device.type == "cpu" else 13 if setting.quick else 17)
            chain = nn.Sequential(*layers)
            return chain, lambda x: chain(x).square().mean(), (torch.randn(rows, 64),)
        if name == "transformer":  # whose logits are the most of a step: the loss is to run in parts
            vocabulary, positions, *shape = (2048, 64, 64, 2, 2) if quick else (50257, 512, 768, 4, 12)
            module: nn.Module = Transformer(vocabulary, positions, *shape)
            text = torch.randint(vocabulary, (4, positions + 1))
            batch: tuple[Tensor, ...] = text[:, :-1], text[:, 1:]
        else:
            count, side, classes = (4, 32, 10) if quick else (32, 224, 1000)
            width, blocks = (8, (1, 1)) if quick else (64, (3, 4, 6, 3))
            module = Bottlenecks(blocks, width, classes)
            batch = torch.randn(count, 3, side, side), torch.randint(classes, (count,))
        return module, step_of(module), batch


def versions(setting: Setting) -> Finding:
    """Report versions and settings, and compute a sum on the device."""
    device = setting.device
    facts: dict[str, Any] = {"checkmate": __version__, "python": platform.python_version(), "torch": torch.__version__}
    facts |= {"tried": f"{TRIED[0]} to {TRIED[-1]}", "system": f"{platform.system()} {platform.machine()}"}
    words = [f"PyTorch {torch.__version__}" + ("" if is_tried() else ", which has not been tried: steps are compared")]
    if device.type == "cuda":
        card, driver, tool = torch.cuda.get_device_properties(device), "", shutil.which("nvidia-smi")
        if tool is not None:
            command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": driver or None}
        facts |= {"device": card.name, "capability": f"{card.major}.{card.minor}", "bytes": card.total_memory}
        settings = (os.environ.get(f"PYTORCH_{name}") for name in ("ALLOC_CONF", "CUDA_ALLOC_CONF"))
        facts["allocator"] = next(filter(None, settings), "as PyTorch has it")
        words += [f"{name} {facts[name]}" for name in ("cuda", "cudnn", "driver", "device", "capability", "allocator")]
    facts["threads"] = torch.get_num_threads()
    works = torch.ones(1000, device=device).sum().item() == 1000
    return Finding(works, ", ".join(words), "The device does not add: look at its driver.", facts)


def ops_of(name: str, setting: Setting) -> Finding:
    """Measure each distinct op of a network's step, repeat it, and try it in place: none wavers but those known to.

    Raises:
        RuntimeError: naming the op that has stopped the device.
    """
    device, (_, step, batch) = setting.device, network(name, setting)
    problem = trace(step, *batch, profile=f"roofline:{kind_of(device).like}")  # it measures nothing
    nodes_by_key = {key_of(node): node for node in joint_of(problem).nodes if node is not None and runs_alone(node)}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for key, node in nodes_by_key.items():
            with same_random_state(device):
                cost = dict(measure_ops({0: node})).get(0)
            row: dict[str, Any] = {"op": target_name(node), "key": key, "seconds": None, "bytes": None, "ways": {}}
            if cost is not None:
                ways = {place: way is not None for place, way in cost.over.items()}
                row |= {"seconds": cost.seconds, "bytes": cost.allocated_bytes, "ways": ways}
            repeats = cost is None or "empty" in target_name(node) or _repeats(node, device)  # empty makes no numbers
            rows.append({**row, "repeats": repeats, "may waver": is_unordered(node)})
    fails = sorted({row["op"] for row in rows if row["seconds"] is None})
    strays = sorted({row["op"] for row in rows if not row["repeats"] and not row["may waver"]})
    waver = sorted({row["op"] for row in rows if not row["repeats"]} - {*strays})
    verdicts = [keeps for row in rows for keeps in row["ways"].values()]
    kinds = {"do not run by themselves": fails, "do not repeat their bits": strays, "waver, as is known": waver}
    words = [f"{sum(row['seconds'] is not None for row in rows)} of {len(rows)} ops measured"]
    words += [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    words += [f"{sum(verdicts)} of {len(verdicts)} ways to write over an argument keep the bits"]
    advice = f"Gradients differ from run to run: set torch.use_deterministic_algorithms(True). {REPORT}"
    return Finding(not (fails or strays), "; ".join(words), advice if strays else REPORT, {"ops": rows})


def _repeats(node: fx.Node, device: torch.device) -> bool:
    """Tell whether an op gives the same numbers each time, from the same arguments and draws."""
    run = call_of(node)

    def numbers() -> list[Tensor]:
        with same_random_state(device):
            return [t for t in tensors(run()) if t.is_floating_point()]

    first = attempt(node, lambda: [t.clone() for t in numbers()])
    return first is None or all(all(map(same_bits, first, numbers())) for _ in range(RUNS - 1))


def dropout(setting: Setting) -> Finding:
    """Draw masks, and redraw them from the kept generator state: same bits, and the generator unchanged."""
    device, failures, cases = setting.device, [], [*itertools.product(SHAPES, (0.1, 0.5), HALF_AND_FULL)]
    for shape, p, dtype in cases:
        x = torch.randn(shape, device=device).to(dtype)
        if device.type == "cpu":
            state, mask_of = random_draws.save_state(x), (tuple(shape), p)
            first = [random_draws.draw_saved(state, *mask_of), torch.get_rng_state()]
            again = [random_draws.draw_again(state, *mask_of), torch.get_rng_state()]
        else:
            keywords: dict[str, Any] = {"on": device, "saved": random_draws.save_device_state(device)}
            draw = random_draws.Drawn(torch.ops.aten.native_dropout.default)
            first = [*draw(x, p, True, **keywords), random_draws.save_device_state(device)]
            again = [*random_draws.drawn_again(draw)(x, p, True, **keywords), random_draws.save_device_state(device)]
        if not all(map(same_bits, first, again)):
            failures.append(f"{shape} {dtype} at {p}")
        torch.rand(7, device=device)  # moves the generator on
    message = f"{len(cases) - len(failures)} of {len(cases)} masks drawn again with the same bits"
    advice = f"Steps are right all the same: such a dropout runs once, and takes more memory. {REPORT}"
    return Finding(not failures, message, advice, {"wrong": failures})


def attention(setting: Setting) -> Finding:
    """Run each attention kernel and its backward repeatedly: they repeat, or waver on a GPU where that is known."""
    device, results, strays, length = setting.device, {}, [], 256 if setting.quick else 1024
    for dtype in HALF_AND_FULL:
        for backend in (b for name, b in SDPBackend.__members__.items() if name not in ("ERROR", "OVERRIDEABLE")):
            name = f"{backend.name.lower().removesuffix('_attention')} {str(dtype).removeprefix('torch.')}"
            results[name] = repeats = _attention_repeats(backend, dtype, device, length)
            if repeats is False and (backend is SDPBackend.MATH or not may_waver(device)):
                strays.append(name)
    named = {verdict: [name for name, r in results.items() if r is verdict] for verdict in (True, False, None)}
    verdicts = zip(("repeat", "waver", "not here"), named.values(), strict=True)
    message = "; ".join(f"{verdict}: {', '.join(names) or 'none'}" for verdict, names in verdicts)
    return Finding(not strays, message, facts={"repeats": results, "strays": strays})


def _attention_repeats(backend: Any, dtype: torch.dtype, device: torch.device, length: int) -> bool | None:
    """Tell whether a kernel's gradients are the same each time; None if it does not run here."""
    q, k, v = (torch.randn(2, 4, length, 64, device=device).to(dtype).requires_grad_() for _ in range(3))

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(), (q, k, v))

    with sdpa_kernel([backend]):
        try:
            first = gradients()
        except RuntimeError as error:
            if re.search("No available kernel|No viable backend", str(error)):
                return None
            raise
        return all(all(map(same_bits, first, gradients())) for _ in range(2 * RUNS))


def copies(setting: Setting) -> Finding:
    """Measure rates to a second memory and back, and the bits that return while the device computes: the same."""
    device = setting.device
    if device.type == "cpu" and sys.platform != "linux":
        return Finding(None, "a file beside the RAM needs Linux")
    # Send, overwrite at once, fetch: the bits must come back.
    store = open_store("file:" if device.type == "cpu" else "pinned", 4 * rounded(max(BLOCKS)), device)
    try:
        links = measure(store, device, BLOCKS)
        same = True
        for size in BLOCKS:
            value = torch.randint(256, (size,), dtype=torch.uint8, device=device)
            expected, landing = value.clone(), torch.empty_like(value)
            store.send(0, value.untyped_storage())
            store.wait(0)
            value.zero_()  # at once: the copy must have ended by then, on the device's own time
            store.fetch(0, landing.untyped_storage())
            store.wait(0)
            same &= same_bits(landing, expected)
            store.drop(0)
    finally:
        store.close()
    rates = f"{links.send / 1e9:.2f} GB/s there, {links.fetch / 1e9:.2f} back, {links.latency * 1e6:.0f} us at least"
    message = f"{rates}; {'the same' if same else 'OTHER'} bits"
    return Finding(same, message, "Do not use host_budget on this machine. Please report it.", asdict(links))


def homes(setting: Setting) -> Finding:
    """Train a model that is on the CPU on the device: its bits, when a call returns, are those of one that is there."""
    device, width = setting.device, 512 if setting.quick else 4096
    if device.type == "cpu":
        return Finding(None, "a model on the CPU is where its step runs")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    models, x = (copy.deepcopy(model).to(device), model), torch.randn(64, width, device=device)
    states: list[list[Tensor]] = []
    peak = planned = 0
    for net, place in zip(models, ({}, {"device": device, "host_budget": 48 * width * width * 4}), strict=True):
        optimizer, options = torch.optim.AdamW(net.parameters()), dict[str, Any](place, time_limit=setting.plan_seconds)
        step = training_step(lambda x, net=net: net(x).square().mean(), optimizer, **options)
        for _ in range(3):
            use = measure_peak(partial(step, x), device)
        states.append([t for name in optimizer.state for t in (name, *optimizer.state[name].values())])
        peak, planned = (use.before or 0) + use.peak, step.plans[0].peak or 0
    same = all(same_bits(a.detach().cpu(), b.detach().cpu()) for a, b in zip(*states, strict=True))
    at_home = {t.device.type for t in states[1]} == {"cpu"}
    where = f"{'the same' if same else 'OTHER'} bits, {'on the CPU' if at_home else 'NOT ON THE CPU'} between calls"
    message = f"{where}; predicted {format_bytes(planned)}, measured {format_bytes(peak)}"
    facts = {"predicted": planned, "measured": peak}
    return Finding(same and at_home and peak <= planned, message, f"Do not use device=. {REPORT}", facts)


def _range(setting: Setting, step: Step, *batch: Tensor) -> tuple[int, int]:
    """The smallest budget of a step, and the peak of keep-all."""
    problem = trace(step, *batch)
    return min_budget(problem, time_limit=setting.plan_seconds).peak, problem.keep_all_peak


def capacity(setting: Setting) -> Finding:
    """Limit the device to a planned peak: the planned step trains there, and the plain one runs out of memory."""
    device = setting.device
    if device.type != "cuda":
        return Finding(None, "PyTorch has no limit for memory on the CPU")
    module, step, (x,) = network("chain", setting)
    least, most = _range(setting, step, x)
    budget, limit = least + (most - least) // 4, least + (most - least) // 2
    expected = run_step(module, step, x)
    compiled = compiled_within(step, budget=budget, time_limit=setting.plan_seconds, wait="best")

    def trained(step: Step, times: int) -> Tensor | None:
        # Gradients, what an error held and what the allocator keeps are given back before.
        module.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return [run_step(module, step, x) for _ in range(times)][-1]
        except torch.OutOfMemoryError:
            return None

    fraction = limit / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        plain, ours = trained(step, 1), trained(compiled, 2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    same = ours is not None and same_bits(ours, expected)
    facts = {"limit": limit, "budget": budget, "plain": most, "plain fits": plain is not None, "ours fits": same}
    outcome = f"plain PyTorch {'runs out of memory' if plain is None else 'FITS'}, a plan for {format_bytes(budget)}"
    trains = "trains, with the same loss" if same else "DOES NOT TRAIN"
    message = f"limit {format_bytes(limit)}: {outcome} {trains}"
    return Finding(plain is None and same, message, f"Leave more room: reserve= when you compile. {REPORT}", facts)


def within_budgets(name: str, setting: Setting, *, exact: bool = False) -> Finding:
    """Compare a network's step within three budgets with plain PyTorch: its bits or their spread, bytes, and time.

    ``exact``: no more may be asked for than the plan predicts; else no more than the budget.
    """
    # Three budgets between the smallest and keep-all.
    module, step, batch = network(name, setting)
    limit, (least, most) = setting.plan_seconds, _range(setting, step, *batch)
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        budget = least + int(share * (most - least))
        row: dict[str, Any] = {"budget": budget}
        rows.append(row)
        # Bits and bytes by `verify`, seconds beside plain PyTorch.
        try:
            report = verify(step, *batch, budget=budget, time_limit=limit)
            peaks = ("predicted", "measured", "plain", "allocated", "reserved")
            row |= {name: getattr(report, f"{name}_peak") for name in peaks}
            row |= {"plain repeats": report.repeats, "spread": report.spread}
            if share == SHARES[0] or not setting.quick:
                compiled = compiled_within(step, budget=budget, time_limit=limit, wait="best")
                steps = partial(run_step, module, step), partial(run_step, module, compiled)
                row |= paired_seconds(setting.device, *steps, batch, PAIRS)
                row["parts"] = list(compiled.plans[0].problem.splits)
        except (CheckmateError, RuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
    # Where bytes are exact, a measured peak above the predicted one fails too.
    above = max([0, *(row["measured"] - row["predicted"] for row in rows if exact and "error" not in row)])
    advice = f"Set reserve= to {format_bytes(above)} or more when you compile. {REPORT}" if above else REPORT
    passed = not above and not any("error" in row for row in rows)
    return Finding(passed, "; ".join(map(_said, rows)), advice, {"rows": rows})


def _said(row: dict[str, Any]) -> str:
    head = f"within {format_bytes(row['budget'])}"
    if "error" in row:
        return f"{head} {row['error'].splitlines()[0]}"
    bits = "the same bits" if not row["spread"] else f"plain PyTorch within its spread, {row['spread']:.3g}"
    names = [name for name in ("predicted", "measured", "allocated", "reserved") if row[name] is not None]
    times = [f"{row['ratio']:.2f} times plain"] if "ratio" in row else []
    peaks = (f"{name} {format_bytes(row[name])}" for name in names)
    return ", ".join([f"{head} {bits}", *peaks, *times, *row.get("parts", ())])


CHECKS: dict[str, Check] = {
    "versions": versions,
    "ops of a transformer": partial(ops_of, "transformer"),
    "ops of convolutions": partial(ops_of, "bottlenecks"),
    "dropout again": dropout,
    "attention repeats": attention,
    "predicted bytes": partial(within_budgets, "chain", exact=True),
    "second memory": copies,
    "a model on the CPU": homes,
    "a transformer in budgets": partial(within_budgets, "transformer"),
    "convolutions in budgets": partial(within_budgets, "bottlenecks"),
    "capacity": capacity,
}
