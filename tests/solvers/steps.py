"""Steps that tests of several solvers plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from tests.support.oracle import pinned

STEPS = {
    "vgg": dags.vgg(16),
    "resnet": dags.resnet(),
    "unet": dags.unet(),
    "mobilenet": dags.mobilenet(6),
    "gpt": dags.gpt(4),
}

# op 3 needs ops 0 and 1, op 4 needs ops 0 and 2: op 2 runs again in the stage of op 4, and op 0 once more after it
FIVE = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])


def layers(n: int, *, size: int = 8) -> Problem:
    """A forward chain of n ops and its backward, each of whose ops reads what its layer read."""
    deps = [[k - 1] if k else [] for k in range(n)]
    deps += [[n + i - 1, n - 1 - i] for i in range(n)]
    return Problem.from_dag(deps, [1.0] * (2 * n), [size] * (2 * n), forward=n)


def masked(noise: int, mask: int) -> Problem:
    """A pinned op draws a mask, the next makes noise of it, which the last reads; in between there is pressure."""
    return pinned(Problem.from_dag([[], [0], [], [2], [1, 3]], [1] * 5, [mask, noise, 6, 1, 1]), 0)


def random_chain(seed: int, layers: int, *, most: int = 8) -> Problem:
    """The unit chain with seconds and sizes drawn."""
    rng = np.random.default_rng(seed)
    unit = dags.unit_chain(layers)
    n = len(unit.graph.ops)
    seconds, sizes = rng.integers(1, most + 1, n).tolist(), rng.integers(1, most + 1, n).tolist()
    deps = [list(op.inputs) for op in unit.graph.ops]
    return Problem.from_dag(deps, seconds, sizes, outputs=[n - 1], forward=layers + 1)


def whole_step(layers: int, *, clipped: bool) -> Problem:
    """Layers forward and backward, and an update of each one's parameter as soon as it can be.

    A gradient of a parameter has 20 bytes, all else 4 or less. Where gradients are clipped, each one's norm is taken
    (once) as soon as it is there, then the factor (once), and updates read the gradients again.
    """
    made: dict[str, tuple[list[int], float, int]] = {}  # what each op reads, its seconds and bytes
    place: dict[str, int] = {}

    def op(name: str, reads: list[str], takes: float, makes: int) -> None:
        place[name] = len(made)
        made[name] = ([place[of] for of in reads], takes, makes)

    for i in range(layers):
        op(f"layer {i}", [f"layer {i - 1}"][:i], 2, 4)
    op("loss", [f"layer {layers - 1}"], 1, 0)
    op(f"into {layers - 1}", ["loss", f"layer {layers - 1}"], 1, 4)
    for i in reversed(range(layers)):
        reads = [f"into {i}", *[f"layer {i - 1}"][:i]]
        op(f"gradient {i}", reads, 2, 20)
        if clipped:
            op(f"norm {i}", [f"gradient {i}"], 0.5, 1)
        if i:
            op(f"into {i - 1}", reads, 2, 4)
        if not clipped:
            op(f"update {i}", [f"gradient {i}"], 1, 0)
    if clipped:
        op("factor", [f"norm {i}" for i in range(layers)], 0.5, 1)
        for i in reversed(range(layers)):
            op(f"update {i}", [f"gradient {i}", "factor"], 1, 0)
    reading = {f"update {i}": [f"layer {i}", *[f"into {i - 1}"][:i]] for i in range(layers)}
    readers = {place[update]: [place[name] for name in names] for update, names in reading.items()}
    columns = (list(column) for column in zip(*made.values(), strict=True))
    problem = Problem.from_dag(*columns, outputs=[place["loss"]], forward=layers + 1, overwrites=readers)
    once = {name: "tells the norm" for name in made if name.split()[0] in ("norm", "factor")}
    named = zip(problem.graph.ops, made, strict=True)
    ops = tuple(replace(op, name=name, pinned=once.get(name, op.pinned)) for op, name in named)
    return replace(problem, graph=replace(problem.graph, ops=ops))
