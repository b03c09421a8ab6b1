"""Plans by hand whose parameters are at home in a file: bits, bytes, and what a step that fails leaves."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends import step_problem
from checkmate.backends.step_problem import joint_of
from checkmate.backends.tensor_state import same_bits
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import updated
from checkmate.codegen.boxed import boxed
from checkmate.codegen.emit import Modules, emit
from checkmate.codegen.second_memory import SecondMemory
from checkmate.codegen.transfers import adopt, ending_calls, most_there
from checkmate.core.graph import Graph
from checkmate.core.plan import Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, lower, simulate
from checkmate.errors import HostError, SolverError, Unsupported
from checkmate.host import home_of
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.by_hand import random_runs

CPU, RATE = torch.device("cpu"), 0.1
X, Y = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 10


def at_home(graph: Graph, plan: Plan, homes: Iterable[int], rng: np.random.Generator) -> Plan:
    """The plan with these inputs at home elsewhere: here for some uses at a time, and sent back after their update."""
    before: list[list[Step]] = [[] for _ in plan.steps]
    behind: list[list[Step]] = [[] for _ in plan.steps]
    for v in homes:
        runs = {p: graph.ops[step.op] for p, step in enumerate(plan.steps) if isinstance(step, Run)}
        uses = [p for p, op in runs.items() if v in op.inputs]
        is_here = False
        for p, following in zip(uses, [*uses[1:], None], strict=True):
            before[p] += [] if is_here else [Fetch(v), Wait(v)]
            is_here = following is not None and rng.random() < 0.5
            behind[p] += [Send(v), Wait(v)] if v in runs[p].overwrites else []
            behind[p] += [] if is_here else [Free(v)]
    parts = [[*first, step, *then] for first, step, then in zip(before, plan.steps, behind, strict=True)]
    return Plan(tuple(step for part in parts for step in part), sum(map(len, parts[: plan.boundary])))


def peak_of(problem: Problem, plan: Plan, with_homes: Plan, homes: Collection[int]) -> int:
    """Bytes of a step beside its inputs: what the plan takes without homes, and the homes that are here then."""
    usage, here, peaks = simulate(plan, problem), 0, list[int]()
    for step in with_homes.steps:
        if isinstance(step, Run):
            peaks.append(usage.bytes_at[len(peaks)] + here - problem.resident)
        elif isinstance(step, (Fetch, Free)) and step.value in homes:
            size = problem.graph.values[step.value].size_bytes
            here += size if isinstance(step, Fetch) else -size
    assert here == 0
    return max(peaks)


class Twins:
    """A model in memory that trains plainly, and its copy in a file whose step is a plan by hand."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        layers[2][0].weight = layers[0][0].weight  # tied
        layers[1][0].weight.requires_grad_(seed != 2)  # frozen: it is fetched, and never sent
        self.plain = nn.Sequential(*layers, nn.Linear(512, 10))
        self.model = checkmate.in_file(deepcopy(self.plain), folder)
        self.train = checkmate.training_step(
            lambda x, y: F.cross_entropy(self.model(x), y), torch.optim.SGD(self.model.parameters(), lr=RATE)
        )
        problem = checkmate.trace(self.train, X, Y)
        self.problem, self.joint = problem, joint_of(problem)
        # An update of what its op is given: a parameter, or what has landed of one.
        for node in filter(updated, filter(None, self.joint.nodes)):
            node.target = replace(node.target, run=lambda gradient, p, *about: self.update(gradient, p))
        parameters = dict(self.model.named_parameters())
        self.inputs: list[Tensor] = []
        for node in self.joint.step.placeholders:
            if node not in self.joint.step.after_tangent:
                name = self.joint.step.name(node)
                key = next((key for key in parameters if name.endswith(key)), None)
                self.inputs.append(parameters[key].detach() if key else X if node.meta["val"].ndim == 2 else Y)
        names = {value.name: v for v, value in enumerate(problem.graph.values) if value.producer is None}
        self.homes = frozenset(v for name, v in names.items() if problem.graph.values[v].size_bytes >= 1 << 20)
        assert len(self.homes) == 2
        # Some ops run again, before the update of what they read.
        runs, last = random_runs(problem, seed), problem.limits.last_stage
        for k, t in last.items():
            runs[t + 1 :, k] = False
        self.before = lower(problem, Schedule.from_runs(problem.graph, runs))
        assert check_plan(self.before, problem) == []
        self.plan = at_home(problem.graph, self.before, self.homes, np.random.default_rng(seed))
        self.memory = SecondMemory(f"file:{folder}", 10**9, CPU, cache=False)
        modules = emit(self.joint, self.plan, self.memory.begin, self.homes)
        self.forward, self.backward = boxed(modules.forward), boxed(modules.backward)

    def update(self, gradient: Tensor, parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(gradient, alpha=-RATE)

    def step(self) -> Tensor:
        loss, *saved = self.forward([*self.inputs])
        tangent = torch.ones(())  # autograd holds it to the end
        saved.append(tangent)
        self.backward(saved)
        return loss

    def plain_step(self) -> Tensor:
        loss = F.cross_entropy(self.plain(X), Y)
        loss.backward()
        with torch.no_grad():
            for p in self.plain.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-RATE)
        self.plain.zero_grad()
        return loss.detach()

    def assert_alike(self) -> None:
        torch.manual_seed(5)
        planned = self.step()
        torch.manual_seed(5)
        assert_same_bits((planned, self.model.state_dict()), (self.plain_step(), self.plain.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bits_and_bytes_are_those_of_the_plan(seed: int, tmp_path: Path) -> None:
    twins = Twins(tmp_path, seed)
    for _ in range(3):
        twins.assert_alike()
    assert measure_peak(twins.step).peak == peak_of(twins.problem, twins.before, twins.plan, twins.homes)
    use, size = twins.memory.use, 1 << 20
    fetched = sum(isinstance(step, Fetch) for step in twins.plan.steps)
    sent = sum(isinstance(step, Send) for step in twins.plan.steps)
    assert (use.peak, use.sent, use.fetched, use.taken) == (2 * size, sent * size, fetched * size, 0)
    assert (use.calls, use.pending, sent) == (4, 0, 1 if seed == 2 else 2)
    assert most_there(twins.plan, twins.problem.graph, twins.homes) == 0


def test_what_the_step_writes_to_itself_is_not_at_home(tmp_path: Path) -> None:
    """Neither in the graph nor behind it: a copy that has landed would not have what the original gets."""
    table = nn.Parameter(torch.randn(512, 512))
    step = checkmate.training_step(
        lambda x: (x @ table.data.mul_(0.9)).square().mean() + (x @ table).mean(), torch.optim.SGD([table], lr=RATE)
    )
    problem = checkmate.trace(step, X)
    (v,) = (v for v, value in enumerate(problem.graph.values) if value.size_bytes == 1 << 20 and value.producer is None)
    with pytest.raises(SolverError, match="is at home in a second memory, and the step writes to it"):
        emit(joint_of(problem), Plan((), 0), homes=frozenset([v]))


def test_a_forward_that_fails_ends_its_call_also_if_it_reads_no_home(tmp_path: Path) -> None:
    memory, graph = SecondMemory(f"file:{tmp_path}", 10**9, CPU, cache=False), torch.fx.Graph()
    graph.call_function(adopt, (graph.placeholder("token"), 0, "a state"))

    def run(inputs: list[Any]) -> None:
        memory.begin(0)
        raise RuntimeError("in a kernel")

    with pytest.raises(RuntimeError):
        ending_calls(graph, run)([])
    assert memory.use.pending == 0


def test_a_plan_that_reads_what_is_at_home_is_refused(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    with pytest.raises(SolverError, match=r"The plan reads .* where it is not at hand"):
        emit(twins.joint, twins.before, twins.memory.begin, twins.homes)
    freed = next(step for step in twins.plan.steps if isinstance(step, Fetch))
    late = Plan((*twins.plan.steps, Send(freed.value)), twins.plan.boundary)
    with pytest.raises(SolverError, match=r"The plan reads .* where it is not at hand"):
        emit(twins.joint, late, twins.memory.begin, twins.homes)


def test_a_tensor_that_is_no_longer_at_home_is_told(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.inputs = [t.clone() for t in twins.inputs]
    with pytest.raises(
        HostError, match=r"weight is planned to be at home .* is an ordinary tensor now. Call checkmate"
    ):
        twins.step()
    assert twins.memory.use.pending == 0


@pytest.mark.parametrize(
    ("at", "when", "broken"),
    [(0, "before", KeyboardInterrupt()), (3, "after", KeyboardInterrupt()), (5, "after", RuntimeError("in a kernel"))],
)
def test_an_update_that_fails_leaves_each_tensor_whole(
    at: int, when: str, broken: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those updated so far are new at home; others are old, also one at home whose op failed when it had written."""
    twins, count, update = Twins(tmp_path), itertools.count(), Twins.update
    old, in_memory = {name: t.clone() for name, t in twins.model.state_dict().items()}, list[bool]()

    def breaks(twins: Twins, gradient: Tensor, parameter: Tensor) -> None:
        now = next(count)
        if now == at and when == "before":
            raise broken
        update(twins, gradient, parameter)
        if now == at:
            in_memory.append(parameter.nbytes < 1 << 20)
            raise broken

    with monkeypatch.context() as patch:
        patch.setattr(Twins, "update", breaks)
        torch.manual_seed(5)
        with pytest.raises(type(broken)) as caught:
            twins.step()
    del caught
    assert twins.memory.use.pending == 0
    torch.manual_seed(5)
    twins.plain_step()
    new, now = twins.plain.state_dict(), twins.model.state_dict()
    is_new = [name for name in now if not same_bits(now[name], old[name])]
    assert_same_bits({name: now[name] for name in is_new}, {name: new[name] for name in is_new})
    assert len({now[name].data_ptr() for name in is_new}) == at + sum(in_memory)
    # A checkpoint heals it.
    twins.model.load_state_dict(new)
    twins.assert_alike()


@pytest.mark.slow
def test_an_update_that_cannot_go_home_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where its own copy fails, and where the step failed before and what was updated is sent behind it."""
    for broken in (None, KeyboardInterrupt()):
        twins, update, count = Twins(tmp_path), Twins.update, itertools.count()

        def breaks(twins: Twins, gradient: Tensor, parameter: Tensor) -> None:
            update(twins, gradient, parameter)  # noqa: B023
            if parameter.nbytes >= 1 << 20 and next(count) and broken:  # noqa: B023
                raise broken  # noqa: B023

        def failing(*args: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(Twins, "update", breaks)
            patch.setattr(os, "pwrite", failing)
            with pytest.raises(
                HostError, match=r"copy of 1.05 MB .* to the file .* failed: .*No space .* load a check"
            ):
                twins.step()
        assert twins.memory.use.pending == 0
        twins.model.load_state_dict(twins.plain.state_dict())
        twins.assert_alike()


class Views(nn.Module):
    """Two parameters in one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * 512 * 512) / 32
        self.first = nn.Parameter(flat[: 512 * 512].view(512, 512))
        self.second = nn.Parameter(flat[512 * 512 :].view(512, 512).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout((x @ self.first).tanh() @ self.second, 0.1).sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "compiled", "views"])
def test_through_autograd(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as a user runs them, whose plans have the large parameters at home: each takes a clean copy or two."""
    memory, rng, plans = SecondMemory(f"file:{tmp_path}", 10**9, CPU, cache=False), np.random.default_rng(0), []

    def update(gradient: Tensor, parameter: Tensor, *about: Any) -> None:
        parameter.add_(gradient, alpha=-RATE)

    def with_homes(joint: Joint, plan: Plan, begin: Any, homes: Any) -> Modules:
        for node in filter(updated, filter(None, joint.nodes)):
            node.target = replace(node.target, run=update)
        given = [v for v, value in enumerate(joint.graph.values) if value.producer is None]
        homes = frozenset(v for v in given if joint.graph.values[v].size_bytes >= 1 << 20)
        assert len(homes) == (1 if kind == "views" else 3)
        plans.append(at_home(joint.graph, plan, homes, rng))
        return emit(joint, plans[-1], memory.begin, homes)

    monkeypatch.setattr(step_problem, "emit", with_homes)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
    plain, model = (Views(), Views()) if kind == "views" else (layers, deepcopy(layers))
    model.load_state_dict(plain.state_dict())
    checkmate.in_file(model, tmp_path)
    optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in (plain, model)]
    options: Any = {"budget": "1 GB", "time_limit": 0.5, "profile": "roofline:laptop", "cache": False}

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    whole = checkmate.training_step(loss_of, optimizers[1], **options)
    step = checkmate.compile(loss_of, **options)
    for seed in range(3):
        torch.manual_seed(seed)
        plain(X).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        torch.manual_seed(seed)
        if kind == "whole":
            whole(X)
        else:
            step(X).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        assert_same_bits(model.state_dict(), plain.state_dict())
    assert all(home_of(p) is not None for p in model.parameters() if p.ndim == 2)
    assert memory.use.calls == 3
    assert memory.use.fetched >= 3 << 20
    # As plainly, a parameter that is written to has no backward of before: by a user, or by a step beside PyTorch.
    if kind == "views":  # its copy that has landed in the forward serves the backward
        return
    results = [model(X).square().mean()] if kind == "whole" else [step(X), step(X)]
    if kind == "whole":
        whole(X)
    else:
        with torch.no_grad():
            model[1][0].weight.add_(1)
    for result in results:
        with pytest.raises(
            (RuntimeError, Unsupported), match=r"modified by an inplace|was written to between the step"
        ):
            result.backward()
    assert memory.use.pending == 0
