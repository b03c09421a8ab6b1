"""Parts of a step's bytes, by hand and as the simulator counts them, and the bytes of an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn, optim

from benchmarks.networks.dags import unit_chain
from checkmate import Problem
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Profile
from checkmate.sizes.batches import update_bytes
from checkmate.sizes.memory_parts import UPDATES, as_plain, gradients_of, lives_of_plain, parts_of

STATE = 20
BATCH = 3


def _two_layers() -> Problem:
    """Two layers, of whose weights each is updated as soon as its gradient is there."""
    ops = (
        Op("a", "f", (0,), (2,)),
        Op("b", "f", (1, 2), (3,)),
        Op("grad_w2", "g", (2, 3), (4,), "backward"),
        Op("update_w2", UPDATES, (4, 1), (), "backward", pinned="updates w2", overwrites=(1,)),
        Op("grad_a", "g", (3,), (5,), "backward"),
        Op("grad_w1", "g", (5,), (6,), "backward"),
        Op("update_w1", UPDATES, (6, 0), (), "backward", pinned="updates w1", overwrites=(0,)),
    )
    values = (
        *(Value("w1", 6, None, "parameter"), Value("w2", 4, None, "parameter"), Value("a", 100, 0), Value("b", 50, 1)),
        *(Value("w2.grad", 4, 2), Value("a.grad", 100, 4), Value("w1.grad", 6, 5)),
    )
    workspace = np.array([0, 0, 0, 1, 7, 0, 1])
    profile = Profile(np.ones(7), workspace, 10 + STATE + BATCH, state_bytes=STATE)
    return Problem(Graph(ops, values, (3,)), profile)


def test_the_parts_of_two_layers_are_those_by_hand() -> None:
    problem = _two_layers()
    assert gradients_of(problem) == {4, 6}
    kept = parts_of(problem)
    # a is gone, the loss b stays; the gradient of w2 was let go of as soon as it was used
    assert {name: size for name, size in dict(kept).items() if size} == {
        "parameters": 10,
        "optimizer state": 20,
        "activations": 50,
        "activation gradients": 100,
        "workspaces": 7,
        "buffers and batch": 3,
    }
    assert (kept.at, kept.peak) == ("grad_a", problem.keep_all_peak)
    plain = parts_of(as_plain(problem, update_bytes=0))
    assert (plain.gradients, plain.peak, plain.at) == (4, kept.peak + 4, "grad_a")
    # an update of all parameters at once may be the peak
    plain = parts_of(as_plain(problem, update_bytes=1000))
    assert (plain.at, plain.workspaces, plain.gradients) == ("optimizer.step()", 1000, 10)
    assert plain.activations == 50  # the loss is there yet
    for size in (0, 1000):
        plain = as_plain(problem, size)
        peak = parts_of(plain).peak
        assert problem.resident + lives_of_plain(plain).peak == plain.keep_all_peak == peak


def test_values_that_are_written_over_count_once() -> None:
    chain = Problem.from_dag([[], [0], [1]], seconds=[1] * 3, sizes=[10, 10, 4], over={1: [0]}, workspace=[0, 3, 0])
    assert parts_of(chain).peak == chain.keep_all_peak
    assert parts_of(unit_chain(6)).peak == unit_chain(6).keep_all_peak
    assert parts_of(as_plain(chain, 0)).peak == 23


class _ReadsNumbers(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].grad.sum().item()
        return super().step(closure)


def test_what_reads_numbers_is_not_taken_to_need_nothing() -> None:
    """No number is there without data: then it is twice what is updated at a time."""
    parameters = [nn.Parameter(torch.ones(n)) for n in (10, 30)]
    reading = _ReadsNumbers(parameters, lr=0.1)
    assert update_bytes([reading], at_once=False) == 2 * 30 * 4
    assert update_bytes([reading], at_once=True) == 2 * 40 * 4
    assert update_bytes([optim.SGD(parameters, lr=0.1, foreach=False)], at_once=False) < 2 * 30 * 4
