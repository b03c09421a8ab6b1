"""A random program as text, from a number: parameters, inputs, buffers, statements that PyTorch accepts, settings.

A statement is tried on the values that are there when it is written, and left out if plain PyTorch refuses it.
"""

from __future__ import annotations

import itertools
import linecache
import random
import string
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.hunt import prelude

TRIES = 6  # of one statement, with other arguments
MOST_NUMBERS, MOST_DIMENSIONS = 6000, 5  # of a value
HEAD = "from benchmarks.hunt.prelude import *  # noqa: F403\n"
FAMILIES = (
    *("elementwise", "reductions", "products", "viewed", "written"),
    *("random", "functional", "custom", "layers"),
)
LATER, LATER_FAMILIES = 20_000, ("complex", "within", "reentrant")  # programs from this number on draw from these too
COMPILED = 22_000  # programs from this number on may have kernels by Inductor, which take seconds to compile
KERNELS = (*("eager",) * 4, *("same-bits",) * 3, "fused")
SHAPES = (
    *((4, 6), (3, 4), (8, 3), (2, 3, 4), (6, 6), (16,), (1, 5), (5, 1), (2, 2, 3, 3), (0, 3), (33,), (), (4, 4)),
    *((7, 9), (12, 17), (65, 3), (130,), (3, 1, 4), (8, 8), (5, 129)),
)
PARAMETERS = (
    *("{0}",) * 16,
    *("{0}.bfloat16()", "{0}.half()", "{0}.double()", "{0}.cfloat()", "{0}.cfloat()", "{0}.t().clone().t()"),
    *("{0}.to(memory_format=torch.channels_last)", "{0}.mT.contiguous().mT", "{0}.bfloat16().mT.contiguous().mT"),
)
INPUTS = (  # also such as are expanded, overlap themselves, or show another or a parameter
    *("{0}",) * 6,
    *("{0}.bfloat16()", "{0}.half()", "{0}.double()", "{0}.cfloat()", "{0}.requires_grad_()", "{0}.requires_grad_()"),
    *("{0}.conj()", "{0}[None].expand(3, *{1})", "{0}.mul(2).int()", "{0} > 0", "{0}.cdouble()", "{0} * 1e4"),
    *("{0}[..., :1].expand({1})", "{0}.transpose(0, -1)", "{0}[::2]", "{0}[..., ::2]", "{0}.mT.contiguous().mT"),
    *("{0}.repeat_interleave(2, -1)[..., ::2]", "torch.arange(5)", "torch.randint(0, 4, (4, 6), generator=g)"),
    *("{2}", "{2}.detach()[..., :1]", "{2}.detach().view(-1)", "p[0].detach()", "p[-1].detach()[..., :2]"),
    *("randn(2, 4, 5, 5).to(memory_format=torch.channels_last)", "randn(3, 65537)[:, :7]"),
    *("randn(40).as_strided((4, 6), (2, 1), 3)", "randn(40).as_strided((3, 4), (4, 2))"),
)
BUFFERS = ("torch.zeros(64)", "torch.ones(64)", "torch.zeros((), dtype=torch.int64)", "torch.ones(4)")
OPTIMIZERS = (
    *("SGD(P, lr=0.01)", "SGD(P, lr=0.01, momentum=0.9, weight_decay=0.1)", "AdamW(P, lr=0.01)"),
    *("SGD(P, lr=0.01, momentum=0.9, nesterov=True)", "Adam(P, lr=0.01, amsgrad=True, weight_decay=0.1)"),
    *("Adagrad(P, lr=0.01)", "RMSprop(P, lr=0.01, momentum=0.5)", "NAdam(P, lr=0.01)", "Adamax(P, lr=0.01)"),
    *("AdamW(P, lr=0.01, foreach=False)", "AdamW(P, lr=0.01, fused=True)"),
)
BACKWARDS = (
    *("loss",) * 5,
    *("sum", "grad", "retain", "thread", "accumulate", "two calls", "late", "parts", "gradient", "hooks"),
    "none between",
)


@cache
def lines_of(name: str) -> list[str]:
    """The lines of a section of ``statements.txt``."""
    text = Path(__file__).with_name("statements.txt").read_text()
    return text.partition(f"\n[{name}]\n")[2].partition("\n\n")[0].splitlines()


def program(number: int) -> str:
    """The text of a program."""
    draw = random.Random(number)
    how = settings(draw)
    if number >= COMPILED and (kernels := draw.choice(KERNELS)) != "eager":
        how["kernels"] = kernels
    made, (p, x, b) = _making(draw, number)
    values = {f"{name}[{i}]": t for name, ts in (("p", p), ("x", x), ("B", b)) for i, t in enumerate(ts)}
    writer = _Writer(draw, {**vars(prelude), "p": p, "x": x, "B": b}, values)
    torch.manual_seed(number)
    random.seed(number)
    later = LATER_FAMILIES if number >= LATER else ()
    families = [*draw.choices(FAMILIES, k=draw.randint(2, 4)), *draw.sample(later, len(later) - 1 if later else 0) * 3]
    for _ in range(draw.randint(2, 9)):
        writer.add(draw.choice(lines_of(draw.choice([*families, *FAMILIES]))))
    writer.end()
    body = "".join(f"    {line}\n" for line in writer.lines)
    return f"# python -m benchmarks.hunt {number}\nHOW = {how!r}\n{HEAD}\n\n{made}\n\ndef fn(p, x, B):\n{body}"


def load(text: str, name: str = "program") -> dict[str, Any]:
    """Run a program; the names that it defines."""
    module = sys.modules["program"] = ModuleType("program")  # Dynamo looks it up
    filename = f"<{name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), vars(module))  # our own text
    return vars(module)


def settings(draw: random.Random) -> dict[str, Any]:
    """Settings by which a program is trained, but for those that are off."""
    whole = draw.random() < 0.25
    how: dict[str, Any] = {
        "whole": whole,  # by `training_step`, else by `compile`
        "backward": draw.choice(("loss", "loss", "accumulate") if whole else BACKWARDS),
        "module": draw.random() < 0.3,
        "autocast": draw.choice((None,) * 8 + ("bfloat16", "float16")),
        "threads": draw.choice((1, 1, 1, 2)),
        "memory": draw.choice((None, None, "allocator", "arena")),
        "host": draw.random() < 0.12,
        "rules": draw.choice((None,) * 8 + ("keep", "recompute", "once")),
        "optimizer": draw.choice(OPTIMIZERS),
        "alone": draw.random() < 0.35,  # each budget by a plan of its own, not one after the other
        "clip": draw.choice((None, None, 0.5)),
    }
    return {key: value for key, value in how.items() if value not in (None, False)}


def _making(draw: random.Random, number: int) -> tuple[str, Any]:
    """Write a function that makes parameters, inputs and buffers, and run it. Few shapes: many fit each other."""
    while True:
        shapes = draw.choices(SHAPES, k=2)
        drawn = [draw.choice(shapes) for _ in range(draw.choice((2, 3, 4, 5)))]
        numbers = [f"randn({', '.join(map(str, shape))})" for shape in drawn]
        count = draw.randint(1, len(drawn) - 1)
        p = [draw.choice(PARAMETERS).format(text) for text in numbers[:count]]
        inputs = enumerate(zip(numbers[count:], drawn[count:], strict=True))
        x = [draw.choice(INPUTS).format(text, shape, f"x[{i - 1}]") for i, (text, shape) in inputs]
        buffers = [*BUFFERS, *(["p[0].detach().clone()"] if draw.random() < 0.2 else [])]
        lines = [
            f"g = torch.Generator().manual_seed({number})",
            "randn = lambda *shape: torch.randn(shape, generator=g)",
            f"p, x = [{', '.join(p)}], []",
            *(f"x.append({text})" for text in x),
            f"return [t.requires_grad_() for t in p], x, [{', '.join(buffers)}]",
        ]
        text = "def make():\n" + "".join(f"    {line}\n" for line in lines)
        try:
            return text, load(HEAD + text, "making")["make"]()
        except (IndexError, RuntimeError):  # no such view of such a shape
            continue


@dataclass
class _Writer:
    """A program as far as it is written, and its values so far."""

    draw: random.Random
    scope: dict[str, Any]
    values: dict[str, Tensor]
    lines: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def add(self, line: str) -> None:
        """Add a statement that PyTorch accepts, if one is found."""
        for _ in range(TRIES):
            filled = _Filled(self, line)
            state = torch.get_rng_state()
            if filled.text and (made := self._tried(filled.text, filled.names)) is not None:
                self.values |= made
                self.lines += filled.text.split("\t")
                return
            torch.set_rng_state(state)

    def _tried(self, text: str, names: list[str]) -> dict[str, Tensor] | None:
        """The tensors that a statement makes; None if it cannot be run, or makes something else or too much."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(text.replace("\t", "\n"), self.scope)  # our own text
        except Exception:  # noqa: BLE001  # whatever it is
            return None
        made = {name: self.scope[name] for name in names}
        fits = all(
            isinstance(t, Tensor) and t.numel() <= MOST_NUMBERS and t.dim() <= MOST_DIMENSIONS for t in made.values()
        )
        return made if fits and all(t.layout is torch.strided for t in made.values()) else None

    def end(self) -> None:
        """Add the loss, and what is returned beside it."""
        draw, values = self.draw, self.values
        trained = [key for key in values if key[0] == "v" and values[key].requires_grad and values[key].numel()]
        chosen = draw.sample(trained, min(len(trained), draw.randint(1, 4)))
        chosen = chosen or [key for key in values if key[0] == "p"]
        self.lines.append(f"loss = part({chosen[0]})")
        self.lines += [f"loss = loss + part({key})" for key in chosen[1:]]
        others = [key for key in draw.sample([*values], min(len(values), 3)) if draw.random() < 0.35]
        others = [f"{key}.detach()" if draw.random() < 0.4 else key for key in others]
        self.lines.append(f"return {', '.join(['loss', *others])}")


class _Filled(string.Formatter):
    """A statement with names and numbers in place of braces; no text if there is no such tensor."""

    KINDS: Mapping[str, Callable[[str, Tensor], bool]] = {
        **dict.fromkeys("abe", lambda key, t: t.is_floating_point() or t.is_complex()),
        "r": lambda key, t: t.is_floating_point(),
        "c": lambda key, t: t.is_complex(),
        "i": lambda key, t: t.dtype in (torch.int32, torch.int64),
        "m": lambda key, t: t.dtype == torch.bool,
        "o": lambda key, t: not (t.is_leaf and t.requires_grad),
        "q": lambda key, t: t.requires_grad and not t.is_leaf,
        "p": lambda key, t: key[0] == "p",
        "x": lambda key, t: key[0] == "x",
        "B": lambda key, t: key[0] == "B",
    }

    def __init__(self, writer: _Writer, line: str) -> None:
        self._draw, self._values, self._numbers = writer.draw, writer.values, writer.numbers
        self._own: dict[str, str] = {}  # names that it gives
        self._first: list[str] = []  # tensors that it reads
        line = line if "{v}" in line or line[0] == ";" else f"{{v}} = {line}"
        try:
            self.text = self.format(line.removeprefix("; "))
        except (LookupError, RuntimeError):  # or one is a view that a statement has made useless: it has no `is_leaf`
            self.text = ""
        self.names = [*self._own.values()]

    def get_value(self, key: Any, args: Any, kwargs: Any) -> str:
        if key in ("v", "w"):
            return self._own.setdefault(key, f"v{next(self._numbers)}")
        if key == "a" and self._first:
            return self._first[0]
        return self._tensor(self.KINDS[key]) if key in self.KINDS else self.format(self._draw.choice(lines_of(key)))

    def _tensor(self, is_one: Callable[[str, Tensor], bool]) -> str:
        """Choose a tensor, rather a late one of the shape of the first."""
        draw, values = self._draw, self._values
        fits = [key for key, t in values.items() if is_one(key, t)]
        if not fits:
            raise LookupError
        alike = [key for key in fits if self._first and values[key].shape == values[self._first[0]].shape]
        if alike and draw.random() < 0.7:
            fits = alike
        late = draw.random() < 0.6
        found = fits[-1 - min(int(draw.expovariate(0.4)), len(fits) - 1)] if late else draw.choice(fits)
        self._first.append(found)
        return found
