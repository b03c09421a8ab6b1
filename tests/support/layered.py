"""Random layered graphs with no forward and backward, of the kind that Bartan et al. used ("Moccasin", 2023).

1. Layers. The first and the last have one op each; of those between, the mean one has 0.65 sqrt(n) ops. Each has from a
   quarter to seven quarters of that, drawn evenly and rounded, at least one; where n ops are reached it is cut off.
2. Reads. An op reads each op of the layer before with a chance of 0.25, and one of them at least. One that nobody in
   the next layer reads is read by an op there, drawn evenly. From a third layer on, an op also reads as many as a
   Poisson number of mean 0.16 times those, drawn evenly among all ops of the layers further back. Together 2 to 6.
3. Order. Ops run in an order drawn at random: of those whose inputs are made, one of the lowest layer with a chance of
   a half, else any, drawn evenly.
4. Bytes and seconds. A value has 0.1 MB and an exponential number of mean 2 MB more, an op takes 0 to 1 ms, drawn
   evenly; all are independent.
"""

from __future__ import annotations

import itertools

import numpy as np

from checkmate.core.problem import Problem

MEAN_LAYER = 0.65  # of the square root of n
FROM, TO = 0.25, 1.75  # of the mean layer
NEXT = 0.25  # how likely each op of the layer before is read
FARTHER = 0.16  # of the reads of the layer before: how many come from farther back
LOWEST = 0.5  # how likely the next op to run is one of the lowest layer
KB, MB, MS = 10**3, 10**6, 1e-3


def layered(ops: int, seed: int = 0) -> Problem:
    """Draw a random layered graph, as the module says."""
    rng = np.random.default_rng([ops, seed])
    # Layers
    mean = MEAN_LAYER * ops**0.5
    layers = [range(1)]
    while (first := layers[-1].stop) < ops - 1:
        layers.append(range(first, min(ops - 1, first + max(1, round(mean * rng.uniform(FROM, TO))))))
    layers.append(range(ops - 1, ops))
    # Reads
    deps: list[set[int]] = [set() for _ in range(ops)]
    for before, layer in itertools.pairwise(layers):
        for k in layer:
            deps[k].update(d for d in before if rng.random() < NEXT)
            if not deps[k]:
                deps[k].add(int(rng.choice(before)))
        for d in before:
            if all(d not in deps[k] for k in layer):
                deps[int(rng.choice(layer))].add(d)
        for k in layer if before.start else ():
            farther = rng.poisson(FARTHER * len(deps[k]))
            deps[k].update(rng.integers(before.start, size=farther).tolist())
    # Order
    layer_of = {k: i for i, layer in enumerate(layers) for k in layer}
    lacking, place = {k: set(ds) for k, ds in enumerate(deps)}, dict[int, int]()
    while lacking:
        ready = [k for k, ds in lacking.items() if not ds]
        if rng.random() < LOWEST:
            ready = [k for k in ready if layer_of[k] == min(layer_of[j] for j in ready)]
        k = int(rng.choice(ready))
        place[k] = len(place)
        del lacking[k]
        for ds in lacking.values():
            ds.discard(k)
    renamed = sorted((place[k], sorted(place[d] for d in ds)) for k, ds in enumerate(deps))
    # Bytes and seconds
    sizes = 100 * KB + rng.exponential(2 * MB, ops).astype(int)
    return Problem.from_dag([ds for _, ds in renamed], (MS * rng.random(ops)).tolist(), sizes.tolist())
