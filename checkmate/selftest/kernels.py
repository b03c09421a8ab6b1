"""Checks of single ops: cost, whether they repeat their bits, what they may write over, and draws made again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkmate.backends.step_problem import joint_of
from checkmate.capture import random_draws
from checkmate.capture.device import is_unordered, may_waver, same_random_state
from checkmate.capture.nodes import target_name, tensors
from checkmate.capture.ways.rounding_probes import same_bytes
from checkmate.devices import kind_of
from checkmate.profiling.measure import measure_ops
from checkmate.profiling.one_op import attempt, call_of, key_of, runs_alone
from checkmate.profiling.roofline import DEVICES, roofline_seconds
from checkmate.selftest import networks
from checkmate.selftest.check import REPORT, Finding, Setting
from checkmate.tracing import trace

RUNS = 4  # of which the first is compared with the others
KINDS = {
    "attention": r"attention",
    "convolutions": r"conv",
    "norms": r"norm",
    "products": r"\b(mm|bmm|addmm|baddbmm)\b",
}


def data_sheet(device: torch.device) -> str:
    """The name in `DEVICES` of a device, or of one like it where there is none."""
    name = "" if device.type == "cpu" else kind_of(device).name(device).lower()
    known = (key for key in DEVICES if re.search(rf"\b{re.sub(r'(?<=[a-z])(?=[0-9])', ' ?', key)}\b", name))
    return next(known, kind_of(device).like)


def ops_of_transformer(setting: Setting) -> Finding:
    """`ops_of` a transformer."""
    return ops_of("transformer", setting)


def ops_of_bottlenecks(setting: Setting) -> Finding:
    """`ops_of` convolutions and batch norms."""
    return ops_of("bottlenecks", setting)


def ops_of_mixed(setting: Setting) -> Finding:
    """`ops_of` what is less common."""
    return ops_of("mixed", setting)


def ops_of(network: str, setting: Setting) -> Finding:
    """Measure each distinct op of a step, run it again and again, and try what it may write over.

    Raises:
        RuntimeError: naming the op that has stopped the device.
    """
    _, step, batch = networks.make(network, setting)
    sheet = data_sheet(setting.device)
    problem = trace(step, *batch, profile=f"roofline:{sheet}")
    distinct = {key_of(node): node for node in joint_of(problem).nodes if node is not None and runs_alone(node)}
    rows, ratios = [], defaultdict[str, list[float]](list)
    with torch.no_grad():
        for node in distinct.values():
            row = _looked_at(node, setting.device)
            estimated = roofline_seconds(node, DEVICES[sheet])
            rows.append({**row, "estimated": estimated})
            if row["seconds"] is not None:
                ratios[_kind(node)].append(row["seconds"] / estimated)
    fails = [row["op"] for row in rows if row["seconds"] is None]
    strays = [row["op"] for row in rows if not row["repeats"] and not row["may waver"]]
    ways = [kept for row in rows for kept in row["ways"].values()]
    waver = sorted({row["op"] for row in rows if not row["repeats"]} - {*strays})
    found = [f"{len(rows) - len(fails)} of {len(rows)} ops measured"]
    found += [f"do not run by themselves: {', '.join(sorted({*fails}))}"] if fails else []
    found += [f"do not repeat their bits: {', '.join(sorted({*strays}))}"] if strays else []
    found += [f"waver, as is known: {', '.join(waver)}"] if waver else []
    found += [f"{sum(ways)} of {len(ways)} ways to write over an argument keep the bits"]
    by_kind = {kind: median(of_kind) for kind, of_kind in ratios.items()}
    found += [f"measured / estimated for {sheet}: " + ", ".join(f"{k} {r:.2f}" for k, r in sorted(by_kind.items()))]
    advice = f"Gradients differ from run to run: set torch.use_deterministic_algorithms(True). {REPORT}"
    facts = {"ops": rows, "measured_over_estimated": by_kind, "data_sheet": sheet}
    return Finding(not (fails or strays), "; ".join(found), advice if strays else REPORT, facts)


def _looked_at(node: fx.Node, device: torch.device) -> dict[str, Any]:
    """What one op costs, whether it repeats its bits, and over which arguments it can write."""
    with same_random_state(device):
        cost = dict(measure_ops({0: node})).get(0)
    return {
        "op": target_name(node),
        "key": key_of(node),
        "seconds": None if cost is None else cost.seconds,
        "bytes": None if cost is None else cost.allocated_bytes,
        "ways": {} if cost is None else {place: way is not None for place, way in cost.over.items()},
        "repeats": cost is None or _repeats(node, device),
        "may waver": is_unordered(node),
    }


def _repeats(node: fx.Node, device: torch.device) -> bool:
    """Whether the numbers that an op makes of the same arguments and draws are the same each time."""
    if "empty" in target_name(node):  # which makes none
        return True
    run = call_of(node)

    def numbers() -> list[torch.Tensor]:
        with same_random_state(device):
            return [t for t in tensors(run()) if t.is_floating_point()]

    first = attempt(node, lambda: [t.clone() for t in numbers()])
    return first is None or all(all(map(same_bytes, first, numbers())) for _ in range(RUNS - 1))


def _kind(node: fx.Node) -> str:
    name = target_name(node)
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")


def dropout(setting: Setting) -> Finding:
    """Draw masks, and again from what is kept of the generator: same bits, and the generator as it was."""
    device, wrong = setting.device, []
    shapes = [(1000,), (64, 257), (2, 3, 64, 64)]
    for shape in shapes:
        for p in (0.1, 0.5):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(shape, device=device).to(dtype)
                if not _drawn_again(x, p):
                    wrong.append(f"{shape} {dtype} at {p}")
                torch.rand(7, device=device)  # so that the next one is drawn elsewhere
    count = 4 * len(shapes)
    found = f"{count - len(wrong)} of {count} masks drawn again with the same bits"
    advice = f"Steps are right all the same: such a dropout runs once, and takes more memory. {REPORT}"
    return Finding(not wrong, found, advice, {"wrong": wrong})


def _drawn_again(x: torch.Tensor, p: float) -> bool:
    on = x.device
    if on.type != "cpu":
        given: dict[str, Any] = {"on": on, "saved": random_draws.save_device_state(on)}
        draw = random_draws.Drawn(torch.ops.aten.native_dropout.default)
        first, now = draw(x, p, True, **given), random_draws.save_device_state(on)
        drawn = random_draws.drawn_again(draw)(x, p, True, **given)
        return all(map(same_bytes, (now, *first), (random_draws.save_device_state(on), *drawn)))
    kept = random_draws.save_state(x)
    mask, now = random_draws.draw_saved(kept, tuple(x.shape), p), torch.get_rng_state()
    again = (random_draws.draw_again(kept, tuple(x.shape), p), torch.get_rng_state())
    return all(map(same_bytes, (mask, now), again))


def attention(setting: Setting) -> Finding:
    """Run each kernel of attention and its backward again and again."""
    device, found, strays = setting.device, {}, []
    length = 256 if setting.quick else 1024
    for dtype in (torch.float32, torch.bfloat16):
        for backend in (b for name, b in SDPBackend.__members__.items() if name not in ("ERROR", "OVERRIDEABLE")):
            name = f"{backend.name.lower().removesuffix('_attention')} {str(dtype).removeprefix('torch.')}"
            repeats = _attention_repeats(backend, dtype, device, length)
            found[name] = repeats
            if repeats is False and (backend is SDPBackend.MATH or not may_waver(device)):
                strays.append(name)
    verdicts = {True: "repeat", False: "waver", None: "not here"}
    named = {verdict: ", ".join(name for name, r in found.items() if r is verdict) or "none" for verdict in verdicts}
    said = "; ".join(f"{verdicts[verdict]}: {names}" for verdict, names in named.items())
    return Finding(not strays, said, facts={"repeats": found, "strays": strays})


def _attention_repeats(backend: Any, dtype: torch.dtype, device: torch.device, length: int) -> bool | None:
    """Whether a kernel's gradients are the same each time; None: it does not run here."""
    q, k, v = (torch.randn(2, 4, length, 64, device=device).to(dtype).requires_grad_() for _ in range(3))

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(), (q, k, v))

    with sdpa_kernel([backend]), _only_if_there():
        first = gradients()
        return all(all(map(same_bytes, first, gradients())) for _ in range(2 * RUNS))
    return None


@contextmanager
def _only_if_there() -> Iterator[None]:
    """Leave the block where no kernel was found; a device that has stopped is an error."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
